"""What peers send in bulk: one stream of each is read, and a chunk only if it is wanted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.identity import PeerId
from p2p.shardcast.bulk import MAX_UNBROKEN, BulkReader, FrameBudget
from p2p.shardcast.codec import ANCHOR, DECODE_RATE, decode_chunk_untrusted
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.messages import (
    BULK_OVERHEAD,
    CHUNK_KIND,
    MAX_BULK,
    MAX_BULK_MESSAGE,
    MESSAGE_KIND,
    ChunkHeader,
    decode_chunk_header_untrusted,
    decode_message_untrusted,
)
from p2p.shardcast.store import Cores
from p2p.shardcast.throttle import Throttle
from p2p.world import OFF_LOOP, World, dawdle

logger = logging.getLogger(__name__)


class Receiver:
    """Bulk streams that peers open. The core says of each chunk's head whether it is wanted."""

    def __init__(
        self,
        world: World,
        core: ShardcastCore,
        handle: Callable[[ev.Event], object],
        written: Callable[[bytes], Awaitable[None]],
        cores: Cores,
        throttle: Throttle,
    ) -> None:
        """``handle`` is told what came; ``written`` is awaited before each chunk of a policy:
        one is written while the next comes; chunks are unpacked on ``cores``, and none is
        read before ``throttle`` has been paid for the last."""
        self.budget = FrameBudget()
        self._world = world
        self._core = core
        self._handle = handle
        self._written = written
        self._cores = cores
        self._throttle = throttle
        self._readers: dict[PeerId, trio.CancelScope] = {}
        """The one stream that is read of each peer."""

    @property
    def streams(self) -> int:
        """The number of streams being read."""
        return len(self._readers)

    async def read_bulk(self, stream: Stream) -> None:
        """A `StreamHandler`: take chunks as fast as the disk does, on a peer's newest
        stream.
        """
        before = self._readers.pop(stream.peer, None)
        if before is not None:
            before.cancel()
        self._readers[stream.peer] = scope = trio.CancelScope()
        try:
            with scope:
                reader = BulkReader(stream)
                while (length := await reader.begin()) is not None:
                    if not await self._read_frame(stream.peer, reader, length):
                        break
                else:
                    return
        finally:
            if self._readers.get(stream.peer) is scope:
                del self._readers[stream.peer]
        stream.reset()

    async def _read_frame(self, peer: PeerId, reader: BulkReader, length: int) -> bool:
        """Take one frame. False if the stream is of no more use. Raises `BadMessage`."""
        if reader.unbroken >= MAX_UNBROKEN:
            await reader.pause()
        kind = (await reader.take(1))[0] if length else None
        if kind == MESSAGE_KIND and length <= MAX_BULK_MESSAGE:
            message = await self._read_body(reader, length - 1, trusted=False)
            if message is not None:
                self._handle(ev.Heard(peer, decode_message_untrusted(message)))
            return message is not None
        if kind != CHUNK_KIND or not BULK_OVERHEAD < length <= MAX_BULK:
            raise BadMessage(f"a bulk frame of {length} bytes that is no chunk and no message")
        header = decode_chunk_header_untrusted(
            bytes((kind,)) + await reader.take(BULK_OVERHEAD - 1)
        )
        size = length - BULK_OVERHEAD
        wanted = self._core.wants(peer, header)
        if wanted is None:
            await reader.skip(size)
            self._handle(ev.ChunkDiscarded(peer, header, size))
            return True
        if size > wanted:  # no chunk of this span: its bytes need not be seen
            self._handle(ev.ChunkCame(peer, header, b"", is_right=False))
            return False
        event = await self._read_chunk(peer, header, reader, size)
        if event is None:
            return False
        await self._written(header.policy)
        self._handle(event)
        await self._throttle.charge(size)
        self._world.sometimes("shardcast/chunk came twice", self._core.stats.duplicates > 0)
        return True

    async def _read_chunk(
        self, peer: PeerId, header: ChunkHeader, reader: BulkReader, size: int
    ) -> ev.ChunkCame | ev.ChunkDiscarded | None:
        """The rest of a chunk's frame, judged; None if it was given up for others. It counts
        against the budget until it is judged: a core may be awaited for that."""
        scope = trio.CancelScope()
        trusted = self._core.expects(peer, header)
        with self.budget.frame(trusted=trusted, give_up=scope.cancel) as hold, scope:
            data = await reader.take(size, hold)
            await dawdle(self._world, "shardcast/slow reader")
            return await self._judge(peer, header, data)
        return None

    async def _judge(
        self, peer: PeerId, header: ChunkHeader, data: bytes
    ) -> ev.ChunkCame | ev.ChunkDiscarded:
        """Unpack a chunk and compare its digest, once, before any other node hears of it."""
        span = self._core.span(header)
        if span is None:
            return ev.ChunkDiscarded(peer, header, len(data))
        unpack = decode_chunk_untrusted
        try:
            if span.size <= OFF_LOOP:
                raw = unpack(ANCHOR, (span,), data)
            else:
                cost = span.size / DECODE_RATE
                raw = await self._cores.run(unpack, ANCHOR, (span,), data, cost=cost)
        except BadMessage as error:
            logger.debug("chunk_wrong peer=%r index=%d: %s", peer, header.index, error)
            return ev.ChunkCame(peer, header, data, is_right=False)
        return ev.ChunkCame(peer, header, data, raw=raw)

    async def _read_body(self, reader: BulkReader, size: int, *, trusted: bool) -> bytes | None:
        """The rest of a frame; None if it was given up for others."""
        if reader.has(size):
            return await reader.take(size)
        scope = trio.CancelScope()
        with self.budget.frame(trusted=trusted, give_up=scope.cancel) as hold, scope:
            return await reader.take(size, hold)
        return None
