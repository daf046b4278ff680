"""A network inside one process: ``/memory/N`` addresses, bounded pipes, no delays."""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import Final

import trio

from p2p.concurrency import ConflictDetector
from p2p.door import check
from p2p.errors import ConfigError, PeerUnreachable
from p2p.multiaddr import Multiaddr
from p2p.network import Listener
from p2p.transport.connection import Wakeup
from p2p.wire import KI

PIPE_BYTES: Final = 256 * KI
"""Most bytes that wait in one direction of one stream, about as many as in a kernel's socket
buffer."""


class _Pipe:
    """One direction of a stream."""

    __slots__ = ("buffer", "ended", "readable", "reader_gone", "writable")

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.ended = False
        self.reader_gone = False
        self.readable = Wakeup()
        self.writable = Wakeup()


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a connected pair, made by `memory_pair`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in = incoming
        self._out = outgoing
        self._closed = False
        self._sending = ConflictDetector("sending on this stream")
        self._receiving = ConflictDetector("receiving from this stream")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, waiting while the pipe is full."""
        with self._sending:
            self._check_open()
            await trio.lowlevel.checkpoint()
            view = memoryview(data)
            while True:
                self._check_open()
                room = PIPE_BYTES - len(self._out.buffer)
                if view and room > 0:
                    self._out.buffer += view[:room]
                    view = view[room:]
                    self._out.readable.set()
                if not view:
                    return
                await self._out.writable.wait()

    @property
    def unsent(self) -> int:
        """Bytes waiting in the pipe, which stands for a kernel's buffer."""
        return len(self._out.buffer)

    async def wait_unsent(self, at_most: int) -> None:
        """Return when the other end has read all but ``at_most`` bytes."""
        with self._sending:
            self._check_open()
            await trio.lowlevel.checkpoint()
            self._check_open()
            while len(self._out.buffer) > at_most:
                await self._out.writable.wait()
                self._check_open()

    def keep_short(self, low_water: int) -> None:
        """Do nothing, since a pipe is short anyway."""

    async def wait_send_all_might_not_block(self) -> None:
        """Return when there is room in the pipe."""
        await self.wait_unsent(PIPE_BYTES - 1)

    def _check_open(self) -> None:
        if self._closed or self._out.ended:
            raise trio.ClosedResourceError("this stream was closed")
        if self._out.reader_gone:
            raise trio.BrokenResourceError("the other end was closed")

    async def send_eof(self) -> None:
        """End the outgoing direction."""
        with self._sending:
            if self._closed:
                raise trio.ClosedResourceError("this stream was closed")
            self._out.ended = True
            self._out.readable.set()
            await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return available bytes, or ``b""`` at the end."""
        limit = PIPE_BYTES if max_bytes is None else operator.index(max_bytes)
        if limit < 1:
            raise ValueError("max_bytes must be at least 1")
        with self._receiving:
            await trio.lowlevel.checkpoint()
            while not self._closed and not self._in.buffer and not self._in.ended:
                await self._in.readable.wait()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        data = bytes(self._in.buffer[:limit])
        del self._in.buffer[:limit]
        self._in.writable.set()
        return data

    async def aclose(self) -> None:
        """Close both directions; sent bytes can still be read."""
        if not self._closed:
            self._closed = True
            self._out.ended = True
            self._in.reader_gone = True
            self._in.buffer.clear()
            for pipe in (self._in, self._out):
                pipe.readable.set()
                pipe.writable.set()
        await trio.lowlevel.checkpoint()


def memory_pair() -> tuple[MemoryStream, MemoryStream]:
    """Return two connected ends."""
    one, other = _Pipe(), _Pipe()
    return MemoryStream(one, other), MemoryStream(other, one)


class MemoryListener:
    """Accepts streams at one ``/memory/`` address."""

    def __init__(self, addr: Multiaddr, listeners: dict[Multiaddr, MemoryListener]) -> None:
        """Listen at ``addr``. ``listeners`` are those of the network, which this one leaves
        when it is closed."""
        self.addr = addr
        self._listeners = listeners
        # The kernel's default backlog for TCP is 128 too.
        self._send, self._receive = trio.open_memory_channel[MemoryStream](128)

    def offer(self, stream: MemoryStream) -> bool:
        """Put a dialled stream into the backlog. Return False if the backlog is full."""
        try:
            self._send.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Return the next incoming stream."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError("this listener was closed") from None

    async def aclose(self) -> None:
        """Stop listening."""
        if self._listeners.get(self.addr) is self:
            del self._listeners[self.addr]
        self._send.close()
        with contextlib.suppress(trio.ClosedResourceError):  # it is closed already
            async for stream in self._receive:
                await stream.aclose()
        self._receive.close()
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """A network between the hosts that share one instance."""

    def __init__(self) -> None:
        self._listeners: dict[Multiaddr, MemoryListener] = {}
        self._numbers = itertools.count(1)

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Open a stream to a listener. Raise `PeerUnreachable` if there is none or its backlog
        is full."""
        check("addr", addr, Multiaddr)
        await trio.lowlevel.checkpoint()
        listener = self._listeners.get(addr.transport)
        ours, theirs = memory_pair()
        if listener is None or not listener.offer(theirs):
            raise PeerUnreachable(f"there is no listener at {addr}")
        return ours

    async def listen(self, addr: Multiaddr) -> Listener:
        """Listen at ``/memory/N``; 0 picks a free number. Raise `ConfigError` if the number is
        taken."""
        check("addr", addr, Multiaddr)
        await trio.lowlevel.checkpoint()
        place = addr.transport
        if [name for name, _ in place.parts] != ["memory"]:
            raise ConfigError(f"a MemoryNetwork cannot listen at {addr}: write /memory/0")
        if place.parts[0][1] == "0":
            free = (Multiaddr((("memory", str(number)),)) for number in self._numbers)
            place = next(place for place in free if place not in self._listeners)
        if place in self._listeners:
            raise ConfigError(f"{place} is taken")
        listener = self._listeners[place] = MemoryListener(place, self._listeners)
        return listener
