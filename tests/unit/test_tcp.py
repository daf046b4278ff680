"""What is special about TCP: names, both families, and a machine that runs out of sockets."""

from __future__ import annotations

import errno
import select
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from p2p.errors import ConfigError, LimitExceeded, PeerUnreachable
from p2p.multiaddr import Multiaddr
from p2p.transport import tcp
from p2p.transport.connection import DirectStream, MeteredStream, Wakeup
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpListener, TcpNetwork, TcpStream
from p2p.wire import KI


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[TcpStream, TcpStream]]:
    listener = await TcpNetwork().listen(Multiaddr.parse("/ip4/127.0.0.1/tcp/0"))
    async with await TcpNetwork().dial(listener.addr) as one, await listener.accept() as other:
        assert isinstance(one, TcpStream)
        assert isinstance(other, TcpStream)
        yield one, other
    await listener.aclose()


async def test_names_are_looked_up() -> None:
    network = TcpNetwork()
    listener = await network.listen(Multiaddr.parse("/ip4/127.0.0.1/tcp/0"))
    for name in ("dns", "dns4"):
        addr = Multiaddr(((name, "localhost"), listener.addr.parts[1]))
        async with await network.dial(addr), await listener.accept():
            pass
    with pytest.raises(PeerUnreachable):
        await network.dial(Multiaddr.parse("/dns4/no-such-host.invalid/tcp/1"))
    await listener.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was never sent")
async def test_a_socket_says_what_the_kernel_has_not_sent() -> None:
    async with pair() as (ours, peer):
        assert isinstance(ours, MeteredStream)
        assert ours.unsent == 0
        ours.keep_short(16 * KI)
        piece = memoryview(bytes(256 * KI))
        sent = 0
        while (more := ours.send_nowait(piece)) or not sent:  # the peer reads nothing
            sent += more
        assert 0 < ours.unsent <= 256 * KI
        before = ours.unsent
        with trio.fail_after(60):
            await ours.wait_unsent(before)
            with trio.move_on_after(0.02) as waited:
                await ours.wait_unsent(before - 1)
            assert waited.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.wait_unsent, 0)
                while sent:
                    sent -= len(await peer.receive_some())
        assert ours.unsent == 0


async def test_listening_everywhere_names_an_address_others_can_use() -> None:
    listener = await TcpNetwork().listen(Multiaddr.parse("/ip4/0.0.0.0/tcp/0"))
    assert listener.addr.host_port[0] != "0.0.0.0"
    async with await TcpNetwork().dial(listener.addr), await listener.accept() as accepted:
        assert isinstance(accepted, TcpStream)
        assert isinstance(accepted, DirectStream)
        assert accepted.remote_addr.parts[1][0] == "tcp"
    await listener.aclose()


def test_the_address_of_an_interface_is_one_of_this_machine() -> None:
    """Where no route leads out, listening everywhere named loopback, which no other machine can
    dial."""
    addr = tcp._of_interface(socket.AF_INET)
    assert not addr.startswith("127.")
    if addr:
        with socket.socket() as own:
            own.bind((addr, 0))


async def test_only_tcp_addresses_will_do() -> None:
    with pytest.raises(ConfigError, match="not a TCP address"):
        await TcpNetwork().listen(Multiaddr.parse("/memory/1"))
    with pytest.raises(PeerUnreachable, match="not a TCP address"):
        await TcpNetwork().dial(Multiaddr.parse("/memory/1"))


async def test_a_machine_without_sockets_says_so(monkeypatch) -> None:
    listener = await TcpNetwork().listen(Multiaddr.parse("/ip4/127.0.0.1/tcp/0"))
    assert isinstance(listener, TcpListener)

    def exhausted(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with await TcpNetwork().dial(listener.addr):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", exhausted)
            with pytest.raises(LimitExceeded, match="no socket"):
                await listener.accept()
        async with await listener.accept():
            pass
    await listener.aclose()


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the kernel does not tell")
@pytest.mark.parametrize("how", ["closes", "ends", "resets"])
async def test_that_the_other_end_has_gone_is_known_before_all_is_read(how: str) -> None:
    async with pair() as (one, other):
        assert not other.has_spoken()
        await one.send_all(b"unread")
        await trio.lowlevel.wait_readable(other._sock)
        assert other.has_spoken()
        assert not other.has_gone()
        if how == "ends":
            await one.send_eof()
        else:
            if how == "resets":
                linger = struct.pack("ii", 1, 0)
                one._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await one.aclose()
        with trio.fail_after(60):
            while not other.has_gone():
                await trio.lowlevel.checkpoint()
        await other.aclose()
        assert other.has_gone()
        assert not other.has_spoken()


async def test_receiving_into_a_buffer_and_sending_without_waiting() -> None:
    async with pair() as (one, other):
        assert one.send_nowait(memoryview(b"hello")) == 5
        buffer = memoryview(bytearray(10))
        assert await other.receive_into(buffer) == 5
        assert bytes(buffer[:5]) == b"hello"
        while one.send_nowait(memoryview(bytes(65536))):
            pass
        await one.send_eof()
        with pytest.raises(trio.ClosedResourceError):
            one.send_nowait(memoryview(b"x"))
    with pytest.raises(trio.ClosedResourceError):
        await other.receive_into(buffer)


async def test_a_dead_peer_breaks_the_stream() -> None:
    async with pair() as (one, other):
        other._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await other.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await one.receive_some()


async def test_a_memory_backlog_is_bounded() -> None:
    network = MemoryNetwork()
    listener = await network.listen(Multiaddr.parse("/memory/5"))
    streams = [await network.dial(listener.addr) for _ in range(128)]
    with pytest.raises(PeerUnreachable):
        await network.dial(listener.addr)
    await listener.aclose()
    assert await streams[0].receive_some() == b""


async def test_one_task_waits_at_a_wakeup() -> None:
    wakeup = Wakeup()
    wakeup.set()  # nobody there: forgotten
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wakeup.wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await wakeup.wait()
        wakeup.set()
