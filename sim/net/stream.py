"""Byte streams over simulated wires, with the back-pressure real ones have.

A stream may have four pieces under way, plus what fits into the latency of its path: without a
window a slow receiver eats its sender's line, with one piece the line runs half empty
(simulated and measured). A byte counts as under way until the receiving program has read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from p2p.concurrency import ConflictDetector
from p2p.door import check, check_number
from p2p.transport.connection import Wakeup
from sim.net.fabric import Direction, Fabric, tampered
from sim.net.link import SEGMENT

WINDOW_PIECES: Final = (3, 4, 5)
"""Window of each stream in pieces, drawn from these, as TCP's flows do not share a line evenly.
Under full uplinks a tree of fifteen took 11 % (bbr) to 18 % (cubic) longer than with even
shares; equal windows missed 12 % of that, these 6 % (bench/links.md)."""
MAX_WINDOW: Final = 16 * 1024 * 1024
"""Bytes under way on one stream at most, however long and fat the path: what our Yamux windows
allow."""
OVERHEAD: Final = 32
"""Bytes that framing, multiplexing and encryption add to a segment or message."""
_MARKER: Final = 12
"""Bytes of a header that only opens, ends or resets a stream."""


class SimStream(trio.abc.HalfCloseableStream):
    """One end of a stream. Passes trio's ``check_half_closeable_stream``."""

    def __init__(self, fabric: Fabric, direction: Direction) -> None:
        """Make an end whose bytes ``direction`` carries. `join` the two ends before use."""
        self._fabric = fabric
        self._direction = direction
        self._other: SimStream
        self._window = window_of(direction)
        self._under_way = 0
        self._inbox: deque[bytes] = deque()
        self._sender = Wakeup()
        self._receiver = Wakeup()
        self._leaving: deque[tuple[int, int]] = deque()
        """The nanosecond at which each segment leaves this machine's line, and its bytes."""
        self._sending = ConflictDetector("sending on this stream")
        self._receiving = ConflictDetector("receiving from this stream")
        self._send_closed = self._closed = False
        self._eof = self._broken = self._peer_closed = False

    def join(self, other: SimStream) -> None:
        """Make the two one stream."""
        self._other = other
        other._other = self

    # Sending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Return when the last byte is under way."""
        check("data", data, bytes, bytearray, memoryview)
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            if len(data) <= SEGMENT:
                if len(data):
                    await self._send_segment(bytes(data))
                return
            view = memoryview(data)
            for start in range(0, len(view), SEGMENT):
                await self._send_segment(bytes(view[start : start + SEGMENT]))

    async def _send_segment(self, segment: bytes) -> None:
        while self._under_way >= self._window:
            await self._sender.wait()
            self._check_sendable()
        if self._direction.src.lies:
            segment = tampered(self._direction.src, segment)
        self._under_way += len(segment)
        leaves = self._fabric.transmit(
            self._direction,
            len(segment) + OVERHEAD,
            "segment",
            self._other._take_segment,
            segment,
        )
        self._forget_left()
        self._leaving.append((leaves, len(segment)))

    def _forget_left(self) -> None:
        now = self._fabric.simulation.queue.now
        while self._leaving and self._leaving[0][0] <= now:
            self._leaving.popleft()

    @property
    def unsent(self) -> int:
        """Bytes that wait for this machine's line."""
        self._forget_left()
        now, cost = self._fabric.simulation.queue.now, self._direction.src.up_cost
        if not cost:
            return 0
        return sum(min(size, int((leaves - now) / cost)) for leaves, size in self._leaving)

    async def wait_unsent(self, at_most: int) -> None:
        """Return when at most ``at_most`` bytes wait for the line, at the pace that it had when
        they were sent.
        """
        while (due := self._when_unsent(at_most)) > self._fabric.simulation.queue.now:
            self._fabric.simulation.queue.schedule(
                due, self._direction.src.owner, "drained", self._sender.set
            )
            await self._sender.wait()
            self._check_unbroken()

    def _when_unsent(self, at_most: int) -> int:
        """Return the nanosecond at which no more than ``at_most`` bytes wait for the line."""
        for leaves, size in reversed(self._leaving):
            if at_most < size:
                return leaves - int(at_most * self._direction.src.up_cost)
            at_most -= size
        return 0

    def keep_short(self, low_water: int) -> None:
        """Do nothing: a window stays as it is."""

    async def drained(self, at_most: int = 0) -> None:
        """Return once at most ``at_most`` bytes of what was sent wait for this machine's
        line."""
        check_number("at_most", at_most)
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_unbroken()
            await self.wait_unsent(at_most)

    def _check_unbroken(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken:
            raise trio.BrokenResourceError("the other side went away")

    def _check_sendable(self) -> None:
        self._check_unbroken()
        if self._send_closed:
            raise trio.ClosedResourceError
        if self._peer_closed:
            raise trio.BrokenResourceError("the other side went away")

    async def wait_send_all_might_not_block(self) -> None:
        """Return when there is room for some bytes."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            while self._under_way >= self._window:
                await self._sender.wait()
                self._check_sendable()

    async def send_eof(self) -> None:
        """Say that nothing more will come; the other direction lives on."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError
            if not self._send_closed:
                self._check_sendable()
                self._send_closed = True
                self._mark(self._other._take_eof, "eof")

    # Receiving

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return at least one byte, or ``b""`` at the end."""
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 1):
            raise (ValueError if isinstance(max_bytes, int) else TypeError)(
                "max_bytes must be an integer >= 1"
            )
        with self._receiving:
            if self._inbox or self._eof or self._broken or self._closed:
                await trio.lowlevel.checkpoint()
            while not (self._inbox or self._eof or self._broken or self._closed):
                await self._receiver.wait()
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken:
            raise trio.BrokenResourceError("the other side went away")
        return self._next_piece(max_bytes) if self._inbox else b""

    def _next_piece(self, max_bytes: int | None) -> bytes:
        piece = self._inbox.popleft()
        if max_bytes is not None and len(piece) > max_bytes:
            self._inbox.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        sender = self._other
        sender._under_way -= len(piece)
        self._fabric.wake(sender._direction.src, sender._sender.set)
        return piece

    # Ending

    async def aclose(self) -> None:
        """Close both directions; sent bytes still arrive."""
        if not self._closed:
            self._closed = True
            self._ended()
            if not self._broken:
                self._mark(self._other._take_close, "close")
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Abandon both directions at once; the other side sees `trio.BrokenResourceError`."""
        if not self._closed:
            self._closed = True
            self._ended()
            if not self._broken:
                self._mark(self._other.break_off, "reset")

    def _ended(self) -> None:
        self._inbox.clear()
        self._sender.set()
        self._receiver.set()

    def _mark(self, deliver: Callable[[], None], label: str) -> None:
        self._fabric.transmit(self._direction, _MARKER, label, deliver)

    # What the wire brings

    def _take_segment(self, segment: bytes) -> None:
        if not (self._closed or self._broken):
            self._inbox.append(segment)
            self._receiver.set()

    def _take_eof(self) -> None:
        self._eof = True
        self._receiver.set()

    def _take_close(self) -> None:
        self._eof = self._peer_closed = True
        self._receiver.set()
        self._sender.set()

    def break_off(self) -> None:
        """Break this end: the other side or the wire is gone."""
        self._broken = True
        self._ended()


def window_of(direction: Direction) -> int:
    """Return the bytes that may be under way: four pieces, and the path's own capacity."""
    slowest = max(direction.src.up_cost, direction.dst.down_cost)
    in_path = int(direction.latency / slowest) if slowest > 0 else MAX_WINDOW
    return min(MAX_WINDOW, direction.src.rng.choice(WINDOW_PIECES) * SEGMENT + in_path)
