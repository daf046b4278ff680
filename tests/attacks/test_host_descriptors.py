"""Connections until there is no file descriptor left. Also: a key file that was left behind."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio

import p2p
from p2p.errors import PeerUnreachable
from p2p.identity import KeyPair
from p2p.machine import load_or_create_key, open_world
from p2p.multiaddr import Multiaddr
from p2p.swarm.core.limits import ResourceLimits
from p2p.swarm.swarm import open_host
from p2p.transport.connection import secure
from p2p.transport.core.noise import StaticKey
from p2p.transport.tcp import TcpNetwork

DESCRIPTORS = 320 + 64
VICTIM = f"""
import resource, trio
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
import p2p

async def main():
    async with p2p.open_host(listen=("/ip4/0.0.0.0/tcp/0",)) as host:
        print(host.addrs[0].parts[1][1], host.peer_id, flush=True)
        while True:  # what a heartbeat's timer does
            host.addrs
            await trio.sleep(0.01)

trio.run(main)
"""


async def test_a_node_survives_more_connections_than_it_has_descriptors() -> None:
    """Before, 1,008 connections to a process with 1,024 descriptors ended it within 4 s."""
    process = subprocess.Popen(  # noqa: ASYNC220 - starts at once
        [sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port, peer = process.stdout.readline().split()
    addr = Multiaddr.parse(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
    network = TcpNetwork()
    raw: list[trio.abc.HalfCloseableStream] = []
    try:
        async with open_world(key=KeyPair(bytes(32))) as world:
            for number in range(DESCRIPTORS + 20):
                raw.append(await network.dial(addr))
                if number % 4:
                    continue  # silent sockets
                static = StaticKey.create(
                    KeyPair(number.to_bytes(32, "big")), world.entropy(32)
                )
                with trio.fail_after(60):
                    await secure(raw[-1], static, world.entropy, dialer=True)
        with trio.fail_after(60):
            async with open_host(listen=()) as honest:
                await p2p.ping(honest, await honest.connect_addr(addr))
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        for stream in raw:
            await trio.aclose_forcefully(stream)


async def test_no_socket_for_a_look_at_our_own_address_is_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Host.addrs` is asked in timers; an error there ended the node."""
    listener = await TcpNetwork().listen(Multiaddr.parse("/ip4/0.0.0.0/tcp/0"))
    before = listener.addr

    def exhausted(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", exhausted)
        assert listener.addr == before
    await listener.aclose()


async def test_no_socket_for_a_dial_is_a_peer_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine's shortage is not the caller's error."""

    async def exhausted(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(trio, "open_tcp_stream", exhausted)
    with pytest.raises(PeerUnreachable):
        await TcpNetwork().dial(Multiaddr.parse("/ip4/127.0.0.1/tcp/1"))


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 2**20])
def test_limits_leave_a_reserve(descriptors: int) -> None:
    """Limits are derived from what the operating system allows."""
    limits = ResourceLimits().within(descriptors)
    assert limits.connections >= 1
    assert limits.handshakes >= 1
    assert limits.connections + limits.handshakes <= max(descriptors - 320, 8)
    assert ResourceLimits(connections=5).within(descriptors).connections <= 5


def test_a_key_file_that_a_killed_start_left_is_no_obstacle(tmp_path: Path) -> None:
    """Before, a start with the same process id failed (in containers it always is)."""
    (tmp_path / f".key.{os.getpid()}").write_bytes(b"half a key")
    key = load_or_create_key(tmp_path / "key")
    assert load_or_create_key(tmp_path / "key").peer_id == key.peer_id
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
