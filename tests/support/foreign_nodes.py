"""Nodes of other libp2p implementations as processes, and what we and they try with them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

import p2p
from p2p import NatConfig, open_nat
from p2p.circuit.core.book import RelayConfig
from p2p.host import Stream
from p2p.identity import KeyPair
from p2p.reach.mapping import ReachConfig

ECHO = p2p.ProtocolId("/shoal/interop/echo/1.0.0")
OPEN = RelayConfig(strangers=True)
CLONE_NEWNET = 0x40000000
LITTLE = 16_000  # bytes that a circuit carries at once
QUIET = ReachConfig(map_port=False)
KEY = KeyPair(bytes([9]) * 32)


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


@contextmanager
def other_machine(*addresses: str) -> Iterator[None]:
    """Put this thread into a network of its own, with ``addresses`` on loopback."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", 0)
    try:
        if sys.platform != "linux" or shutil.which("ip") is None or libc.unshare(CLONE_NEWNET):
            pytest.skip("needs Linux, root and iproute2 for a network of its own")
        try:
            lines = [f"address add {address}/32 dev lo" for address in addresses]
            lines += ["link set lo up multicast on", "route add 224.0.0.0/4 dev lo"]
            for line in lines:
                subprocess.run(["ip", *line.split()], check=True)
            yield
        finally:
            assert libc.setns(here, CLONE_NEWNET) == 0
    finally:
        os.close(here)


@asynccontextmanager
async def talking(
    command: Sequence[str], cwd: Path | None = None
) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Run a program for the length of the block; yields what reads its next line."""
    # not by trio, which starts it in another thread: `other_machine`
    process = subprocess.Popen(  # noqa: ASYNC220
        command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    output, buffer = trio.lowlevel.FdStream(os.dup(process.stdout.fileno())), bytearray()

    async def next_line() -> str:
        while b"\n" not in buffer:
            data = await output.receive_some()
            assert data, f"{command} has ended"
            buffer.extend(data)
        line, _, rest = bytes(buffer).partition(b"\n")
        buffer[:] = rest
        return line.decode()

    try:
        yield next_line
    finally:
        process.kill()
        process.communicate()
        await trio.aclose_forcefully(output)


@asynccontextmanager
async def open_relay(at: str = "/ip4/127.0.0.1/tcp/0") -> AsyncIterator[p2p.Multiaddr]:
    """A relay of ours for strangers."""
    async with (
        p2p.open_host(key=KEY, strict=True, listen=[at]) as host,
        open_nat(host, KEY, NatConfig(relay=OPEN, reach=QUIET)),
    ):
        yield host.addrs[0]


@asynccontextmanager
async def open_home(
    relay: p2p.Multiaddr, *, punch: bool = False
) -> AsyncIterator[p2p.SwarmHost]:
    """A host of ours that listens behind ``relay`` and echoes."""
    config = p2p.SwarmConfig(punch=punch)
    async with p2p.open_host(strict=True, config=config) as host:
        await host.listen(relay.through)
        host.set_handler(ECHO, echo)
        yield host


def circuit_of(host: p2p.SwarmHost) -> p2p.Multiaddr:
    [addr] = [addr for addr in host.addrs if addr.relay is not None]
    return addr


async def until(host: p2p.SwarmHost, condition: Callable[[], bool]) -> None:
    while not condition():
        await host.news.wait()


async def try_echo(host: p2p.SwarmHost, peer: p2p.PeerId, size: int = 2**20) -> None:
    """Send bytes, which must come back."""
    sent, received = (bytes(range(256)) * (size // 256 + 1))[:size], bytearray()
    async with await host.open_stream(peer, ECHO) as stream, trio.open_nursery() as nursery:

        async def send() -> None:
            await stream.send_all(sent)
            await stream.send_eof()

        nursery.start_soon(send)
        while len(received) < size:
            data = await stream.receive_some()
            assert data
            received += data
    assert received == sent


async def try_circuit(host: p2p.SwarmHost, addr: p2p.Multiaddr) -> p2p.PeerId:
    """Connect to a peer behind a relay, and check that an echo comes back through it."""
    peer = await host.connect_addr(addr)
    await try_echo(host, peer, LITTLE)
    assert not host.is_direct(peer)
    return peer
