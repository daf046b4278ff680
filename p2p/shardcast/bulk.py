"""Frames of bulk streams, head first: their kind is known before room is made for their bytes.

A frame may have 4 MiB, and any peer may open a bulk stream and begin one. So a chunk's header
is read before its bytes, and a chunk that is not wanted is thrown away as it comes; a peer has
one stream (the newest replaces the one before); and all frames that are unfinished share one
budget. When it is spent, the oldest frame of an unexpected sender goes first: refusing the
newest instead would let 16 peers that never finish shut out all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.wire import MIB, decode_varint_untrusted

MAX_UNFINISHED: Final = 64 * MIB
"""Bytes of unfinished frames of all peers: eight parents and as many holders with a largest
chunk each. Without it 200 peers held 800 MB."""
MAX_UNBROKEN: Final = 32
"""Frames taken without waiting after which other tasks get a turn: 1 ms of the shortest
messages."""


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A frame whose bytes are coming."""

    trusted: bool
    give_up: Callable[[], object]
    held: int = 0

    def hold(self, count: int) -> None:
        """``count`` more bytes of it are here."""
        self.held += count


class FrameBudget:
    """The budget of unfinished frames."""

    def __init__(self, limit: int = MAX_UNFINISHED) -> None:
        self._limit = limit
        self._frames: dict[_Unfinished, None] = {}
        self.held = 0
        """Bytes held now."""
        self.evicted = 0
        """Frames that were given up for others."""

    @contextmanager
    def frame(
        self, *, trusted: bool, give_up: Callable[[], object]
    ) -> Iterator[Callable[[int], None]]:
        """A frame for the length of the block; gives what counts its bytes.

        ``trusted`` says that its sender is expected to send it: others go first. ``give_up`` is
        called if it must go; nothing of it is counted any more then.
        """
        frame = _Unfinished(trusted, give_up)
        self._frames[frame] = None

        def hold(count: int) -> None:
            if frame not in self._frames:
                return
            frame.hold(count)
            self.held += count
            while self.held > self._limit and self._frames:
                self._evict()

        try:
            yield hold
        finally:
            self._forget(frame)

    def _evict(self) -> None:
        victim = next(
            (frame for frame in self._frames if not frame.trusted), next(iter(self._frames))
        )
        self.evicted += 1
        self._forget(victim)
        victim.give_up()

    def _forget(self, frame: _Unfinished) -> None:
        if frame in self._frames:
            del self._frames[frame]
            self.held -= frame.held


class BulkReader:
    """Reads length-prefixed frames in pieces."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._data: bytes | bytearray = b""
        self._at = 0
        self.unbroken = 0
        """Frames begun since the stream last had to be waited for."""

    async def pause(self) -> None:
        """Let other tasks have a turn."""
        self.unbroken = 0
        await trio.lowlevel.checkpoint()

    async def begin(self) -> int | None:
        """Bytes of the next frame, or None if the stream has ended. Raises `BadMessage`."""
        self.unbroken += 1
        while (head := decode_varint_untrusted(self._data, self._at)) is None:
            self._data, self._at = self._data[self._at :], 0
            more = await self._receive()
            if not more:
                if self._data:
                    raise BadMessage("the stream ended within a frame")
                return None
            self._data = self._data + more if self._data else more
        length, self._at = head
        return length

    def has(self, count: int) -> bool:
        """Whether the next ``count`` bytes are here: taking them does not wait."""
        return len(self._data) - self._at >= count

    async def take(self, count: int, hold: Callable[[int], None] | None = None) -> bytes:
        """The next ``count`` bytes; ``hold`` hears how many of them came."""
        parts = []
        while count:
            part = await self._part(count)
            if hold is not None:
                hold(len(part))
            count -= len(part)
            parts.append(part)
        return b"".join(parts)  # the only copy between the stream and the decoder

    async def skip(self, count: int) -> None:
        """Throw the next ``count`` bytes away as they come."""
        while count:
            await self._fill()
            here = min(count, len(self._data) - self._at)
            self._at += here
            count -= here

    async def _part(self, most: int) -> memoryview:
        await self._fill()
        part = memoryview(self._data)[self._at : self._at + most]
        self._at += len(part)
        return part

    async def _fill(self) -> None:
        """Return when there is a byte to take. Raises `BadMessage` if there never is."""
        if self._at == len(self._data):
            self._data, self._at = b"", 0  # not kept while more is waited for
            self._data = await self._receive()
            if not self._data:
                raise BadMessage("the stream ended within a frame")

    async def _receive(self) -> bytes | bytearray:
        self.unbroken = 0
        return await self._stream.receive_some()
