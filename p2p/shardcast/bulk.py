"""One task and one bulk stream per peer for what the core pushes, at the owner's rate.

An owner lends a rate of the line in one direction, for all peers together. Each chunk is
charged before it leaves, or after it came, and whoever has moved it waits until the rate has
paid for it. Chunks, long indexes and answers to strangers (`p2p.meter`) are charged:
heartbeats, requests and work are few kilobytes a second, and a node that held them back would
seem gone.

Receiving in bulk: one stream of each peer is read, and a chunk only if it is wanted.

A frame may have 4 MiB, and any peer may open a bulk stream and begin one. So a chunk's header
is read before its bytes, and a chunk that is not wanted is thrown away as it comes; a peer has
one stream (the newest replaces the one before); and all frames that are unfinished share one
budget. When it is spent, the oldest frame of an unexpected sender goes first: refusing the
newest instead would let 16 peers that never finish shut out all others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from p2p.bounded import TokenBucket
from p2p.concurrency import AutoResetEvent
from p2p.errors import BadMessage, StorageError
from p2p.host import PEER_TROUBLE, Host, Stream
from p2p.identity import PeerId
from p2p.shardcast import messages as msg
from p2p.shardcast.codec import DECODE_RATE, decode_chunk_untrusted, wire_limit
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.index import Span
from p2p.shardcast.store import Cores, PolicyStore
from p2p.wire import KI, MIB, decode_varint_untrusted, encode_varint, frame
from p2p.world import World, dawdle

logger = logging.getLogger(__name__)


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
        self._items: deque[msg.Message | msg.ChunkHeader] = deque()
        self._some = AutoResetEvent()

    def push_nowait(self, item: msg.Message | msg.ChunkHeader) -> None:
        """Queue an item. A peer for which more than 64 pile up is given up: one chunk (the core
        gives no more), and answers to a peer that asks repeatedly."""
        self._items.append(item)
        self._some.set()
        if len(self._items) > 64:
            self.scope.cancel()

    async def run(self, host: Host, report: Callable[[ev.Event], object]) -> None:
        """Send until the peer is lost or dropped."""
        with self.scope:
            try:
                async with await host.open_stream(self.peer, msg.BULK_PROTOCOL_ID) as stream:
                    while True:
                        while self._items:
                            await self._send(stream, self._items.popleft(), report)
                        self._some.clear()
                        await self._some.wait()
            except PEER_TROUBLE as error:
                logger.debug("bulk_ended peer=%r reason=%r", self.peer, error)

    async def _send(
        self,
        stream: Stream,
        item: msg.Message | msg.ChunkHeader,
        report: Callable[[ev.Event], object],
    ) -> None:
        """Send one item. A chunk's 4 MiB are released when this returns."""
        if not isinstance(item, msg.ChunkHeader):
            message = frame(msg.encode_bulk_message(item))
            if len(message) > msg.INLINE_INDEX:  # a long index has mebibytes
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
            header = msg.encode_chunk_header(item)
            head = encode_varint(len(header) + len(data)) + header
            # Chunks up to this size are sent with their header in one piece: copying them costs
            # less than a packet and a wake-up for 47 bytes.
            if len(data) <= 64 * KI:
                await stream.send_all(head + data)
            else:
                await stream.send_all(head)
                await stream.send_all(data)
            # What may still wait for the line keeps it busy while the next chunk is chosen. 16
            # KiB are 45 ms of a seventh of 20 Mbit/s.
            await stream.drained(16 * KI)
        report(ev.ChunkSent(self.peer, len(data or b"")))


MAX_UNFINISHED: Final = 64 * MIB
"""Most bytes of unfinished frames of all peers: eight parents and as many holders with a
largest chunk each. Without it 200 peers held 800 MB."""


class FrameBudget:
    """Bounds the bytes of unfinished frames of all peers together."""

    def __init__(self) -> None:
        self._frames: dict[trio.CancelScope, tuple[bool, int]] = {}
        """Maps each unfinished frame to whether its sender is expected, and the bytes that have
        come."""
        self.held = 0
        """Bytes held now by unfinished frames."""

    @contextmanager
    def frame(self, *, trusted: bool) -> Iterator[Callable[[int], None]]:
        """Count a frame for the length of the block; yield the function that counts its bytes.

        The block is cancelled if the frame must make room for others. Frames of senders that
        are not ``trusted`` go first.
        """
        with trio.CancelScope() as scope:
            self._frames[scope] = trusted, 0

            def hold(count: int) -> None:
                if scope not in self._frames:
                    return
                self._frames[scope] = trusted, self._frames[scope][1] + count
                self.held += count
                while self.held > MAX_UNFINISHED and self._frames:
                    strangers = (one for one, (known, _) in self._frames.items() if not known)
                    victim = next(strangers, next(iter(self._frames)))
                    self._forget(victim)
                    victim.cancel()

            try:
                yield hold
            finally:
                self._forget(scope)

    def _forget(self, scope: trio.CancelScope) -> None:
        self.held -= self._frames.pop(scope, (True, 0))[1]


class BulkReader:
    """Reads length-prefixed frames in pieces."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._data: bytes | bytearray = b""
        self._at = 0
        self.unbroken = 0
        """Number of frames begun since the stream last had to wait."""

    async def begin(self) -> int | None:
        """Return the bytes of the next frame; None if the stream has ended. Raise `BadMessage`
        if a frame is too long."""
        self.unbroken += 1
        # Frames taken without waiting after which other tasks get a turn: 1 ms of the shortest
        # messages.
        if self.unbroken > 32:
            self.unbroken = 1
            await trio.lowlevel.checkpoint()
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

    async def take(self, count: int, hold: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``count`` bytes. ``hold`` is called with the number of bytes as they
        come."""
        parts = []
        while count:
            await self._fill()
            part = memoryview(self._data)[self._at : self._at + count]
            self._at += len(part)
            if hold is not None:
                hold(len(part))
            count -= len(part)
            parts.append(part)
        return b"".join(parts)  # the only copy between the stream and the decoder

    async def skip(self, count: int) -> None:
        """Discard the next ``count`` bytes as they come."""
        while count:
            await self._fill()
            here = min(count, len(self._data) - self._at)
            self._at += here
            count -= here

    async def _fill(self) -> None:
        """Return when there is at least one byte to take. Raise `BadMessage` if the stream ends
        first."""
        if self._at == len(self._data):
            self._data, self._at = b"", 0  # not kept while more is waited for
            self._data = await self._receive()
            if not self._data:
                raise BadMessage("the stream ended within a frame")

    async def _receive(self) -> bytes | bytearray:
        self.unbroken = 0
        return await self._stream.receive_some()


class Receiver:
    """Reads the bulk streams that peers open. The core decides by each chunk's header whether
    to read the chunk."""

    def __init__(
        self,
        world: World,
        core: ShardcastCore,
        handle: Callable[[ev.Event], object],
        written: Callable[[bytes], Awaitable[None]],
        cores: Cores,
        throttle: Throttle,
    ) -> None:
        """Read streams for a core.

        ``handle`` is called with what came, and ``written`` is awaited after each chunk of a
        policy. Chunks are unpacked on ``cores``. The next chunk is not read before ``throttle``
        has paid for the last.
        """
        self.budget = FrameBudget()
        self.in_hand: tuple[bytes, bytes | memoryview] = b"", b""
        """The chunk that is being reported to the core: its wire bytes and its raw bytes."""
        self._world = world
        self._core = core
        self._handle = handle
        self._written = written
        self._cores = cores
        self._throttle = throttle
        self._readers: dict[PeerId, trio.CancelScope] = {}
        """Maps each peer to the cancel scope of the one stream that is read."""

    @property
    def streams(self) -> int:
        """The number of streams being read."""
        return len(self._readers)

    async def read_bulk(self, stream: Stream) -> None:
        """Read a peer's bulk stream, in place of any earlier one, as fast as the disk takes the
        chunks. This is a `StreamHandler`."""
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
        """Read one frame. Return False if the stream is of no more use. Raise `BadMessage` if
        the frame is malformed."""
        kind = (await reader.take(1))[0] if length else None
        if kind == msg.MESSAGE_KIND and length <= msg.MAX_BULK_MESSAGE:
            message = None
            with self.budget.frame(trusted=False) as hold:
                message = await reader.take(length - 1, hold)
            if message is None:
                return False
            self._handle(ev.Heard(peer, msg.decode_message_untrusted(message)))
            return True
        if kind != msg.CHUNK_KIND or not msg.BULK_OVERHEAD < length <= msg.MAX_BULK:
            raise BadMessage(f"a bulk frame of {length} bytes that is no chunk and no message")
        header = msg.decode_chunk_header_untrusted(
            bytes((kind,)) + await reader.take(msg.BULK_OVERHEAD - 1)
        )
        size = length - msg.BULK_OVERHEAD
        offer = self._core.offer(peer, header)
        if offer is None:
            await reader.skip(size)
            self._handle(ev.ChunkCame(peer, header, size, is_right=None))
            return True
        if size > wire_limit(offer.span):  # no chunk of this span: its bytes need not be seen
            self._handle(ev.ChunkCame(peer, header, size, is_right=False))
            return False
        is_judged = False
        # A chunk counts against the budget until it is judged: a core may be awaited for that.
        with self.budget.frame(trusted=offer.is_expected) as hold:
            data = await reader.take(size, hold)
            await dawdle(self._world, "shardcast/slow reader")
            raw = await self._unpack(offer.span, data)
            is_judged = True
        if not is_judged:
            return False
        if raw is None:
            logger.debug("chunk_wrong peer=%r index=%d", peer, header.index)
        self.in_hand = data, raw or b""
        try:
            self._handle(ev.ChunkCame(peer, header, size, is_right=raw is not None))
        finally:
            self.in_hand = b"", b""
        del data, raw  # the store has them
        await self._written(header.policy)
        await self._throttle.charge(size)
        self._world.sometimes("shardcast/chunk came twice", self._core.stats.duplicates > 0)
        return True

    async def _unpack(self, span: Span, data: bytes) -> bytes | memoryview | None:
        """Unpack a chunk and compare its digest before any other node hears of the chunk.
        Return None if it is wrong."""
        decode, size = decode_chunk_untrusted, span.size
        try:
            return await self._cores.run(decode, span, data, size=size, rate=DECODE_RATE)
        except BadMessage:
            return None
