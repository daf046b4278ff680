"""What peers send in bulk: one stream of each is read, and a chunk only if it is wanted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.identity import PeerId
from p2p.shardcast.bulk import MAX_UNBROKEN, BulkReader, FrameBudget
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.messages import (
    BULK_OVERHEAD,
    CHUNK_KIND,
    MAX_BULK,
    MAX_BULK_MESSAGE,
    MESSAGE_KIND,
    decode_chunk_header_untrusted,
    decode_message_untrusted,
)
from p2p.world import World, dawdle


class Receiver:
    """Bulk streams that peers open. The core says of each chunk's head whether it is wanted."""

    def __init__(
        self,
        world: World,
        core: ShardcastCore,
        handle: Callable[[ev.Event], object],
        taken: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """``handle`` is told what came; ``taken`` is awaited after each chunk of a policy."""
        self.budget = FrameBudget()
        self._world = world
        self._core = core
        self._handle = handle
        self._taken = taken
        self._readers: dict[PeerId, trio.CancelScope] = {}
        """The one stream that is read of each peer."""

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
        # A chunk of the wrong size has the wrong digest: its bytes need not be seen.
        data = (
            await self._read_body(reader, size, trusted=self._core.expects(peer, header))
            if wanted == size
            else b""
        )
        if data is None:
            return False
        await dawdle(self._world, "shardcast/slow reader")
        self._handle(ev.ChunkCame(peer, header, data))
        self._world.sometimes("shardcast/chunk came twice", self._core.stats.duplicates > 0)
        await self._taken(header.policy)
        return wanted == size

    async def _read_body(self, reader: BulkReader, size: int, *, trusted: bool) -> bytes | None:
        """The rest of a frame; None if it was given up for others."""
        if reader.has(size):
            return await reader.take(size)
        scope = trio.CancelScope()
        with self.budget.frame(trusted=trusted, give_up=scope.cancel) as hold, scope:
            return await reader.take(size, hold)
        return None
