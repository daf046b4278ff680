"""One task and one bulk stream per peer for what the core pushes, at the owner's rate.

An owner lends a rate of the line in one direction, for all peers together. Each chunk is
charged before it leaves, or after it came, and whoever has moved it waits until the rate has
paid for it. Chunks, long indexes and answers to strangers (`p2p.meter`) are charged:
heartbeats, requests and work are few kilobytes a second, and a node that held them back would
seem gone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from p2p.bounded import TokenBucket
from p2p.concurrency import AutoResetEvent
from p2p.errors import (
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    StorageError,
    WrongPeer,
)
from p2p.host import Host, Stream
from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.messages import (
    BULK_PROTOCOL_ID,
    INLINE_INDEX,
    ChunkHeader,
    Message,
    encode_bulk_message,
    encode_chunk_header,
)
from p2p.shardcast.store import PolicyStore
from p2p.wire import KI, encode_varint, frame
from p2p.world import World

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Most items that may wait: one chunk (the core gives no more), and answers to a peer that asks
repeatedly."""


UNSENT: Final = 16 * KI
"""Bytes of a chunk that may still wait for the line when the chunk is reported as sent. They
keep the line busy while the next chunk is chosen. 16 KiB are 45 ms of a seventh of 20
Mbit/s."""
LOST: Final = (
    PeerUnreachable,
    WrongPeer,
    ProtocolNotSupported,
    LimitExceeded,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""Exceptions that end a bulk stream without a bug. The peer then gets nothing for now."""


class Throttle:
    """Limits bytes to ``rate`` a second, with a second's worth at once after a pause. A rate of
    0 is no limit."""

    def __init__(self, world: World, rate: float) -> None:
        self._world = world
        self._rate = rate
        self._bucket = TokenBucket(rate, world.now())

    def take(self, size: int) -> None:
        """Charge ``size`` bytes that have already left; later chunks wait for them."""
        self._bucket.refill(self._world.now(), self._rate)
        self._bucket.take(size if self._rate else 0)

    async def charge(self, size: int) -> None:
        """Return when ``size`` bytes are paid for."""
        self.take(size)
        if self._bucket.level < 0:
            due = self._world.now() - self._bucket.level / self._rate
            await self._world.sleep_until(due)


class Sender:
    """Sends pushed items in order, and reports each chunk that has left."""

    def __init__(self, peer: PeerId, store: PolicyStore, throttle: Throttle) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self._store = store
        self._throttle = throttle
        self._items: deque[Message | ChunkHeader] = deque()
        self._some = AutoResetEvent()

    def push_nowait(self, item: Message | ChunkHeader) -> None:
        """Queue an item. A peer for which `MAX_WAITING` items pile up is given up."""
        self._items.append(item)
        self._some.set()
        if len(self._items) > MAX_WAITING:
            self.scope.cancel()

    async def run(self, host: Host, report: Callable[[ev.Event], object]) -> None:
        """Send until the peer is lost or dropped."""
        with self.scope:
            try:
                async with await host.open_stream(self.peer, BULK_PROTOCOL_ID) as stream:
                    while True:
                        while self._items:
                            await self._send(stream, self._items.popleft(), report)
                        self._some.clear()
                        await self._some.wait()
            except LOST as error:
                logger.debug("bulk_ended peer=%r reason=%r", self.peer, error)

    async def _send(
        self, stream: Stream, item: Message | ChunkHeader, report: Callable[[ev.Event], object]
    ) -> None:
        """Send one item. A chunk's 4 MiB are released when this returns."""
        if not isinstance(item, ChunkHeader):
            message = frame(encode_bulk_message(item))
            if len(message) > INLINE_INDEX:  # a long index has mebibytes
                await self._throttle.charge(len(message))
            await stream.send_all(message)
            return
        data = None
        try:
            data = await self._store.chunk(item.policy, item.index)
        except StorageError as error:
            name = item.policy.hex()[:8]
            logger.warning("chunk_unreadable policy=%s index=%d: %s", name, item.index, error)
        if data is not None:
            await self._throttle.charge(len(data))
            header = encode_chunk_header(item)
            head = encode_varint(len(header) + len(data)) + header
            # Chunks up to this size are sent with their header in one piece: copying them costs
            # less than a packet and a wake-up for 47 bytes.
            if len(data) <= 64 * KI:
                await stream.send_all(head + data)
            else:
                await stream.send_all(head)
                await stream.send_all(data)
            await stream.drained(UNSENT)
        report(ev.ChunkSent(self.peer, len(data or b"")))
