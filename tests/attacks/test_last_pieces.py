"""What a peer sent last is not kept while its next word is awaited.

A task that waits for a stream keeps whatever its local variables name, which no account knows
of: 32 KiB in each of 3,600 streams of pings were 120 MiB (`window-hoard`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing

from p2p.host import FrameReceiver, Host, Stream
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.shardcast.bulk import BulkReader, Sender, Throttle
from p2p.shardcast.messages import ChunkHeader
from p2p.shardcast.store import PolicyStore
from p2p.swarm import identify
from p2p.swarm.swarm import SwarmConfig
from p2p.wire import KI, MIB, FrameReader, encode_varint
from p2p.world import World
from tests.support.hosts import hosts

QUIET = SwarmConfig(keepalive=float("inf"), identify=False)
NEWS = [ProtocolId(f"/test/news/{number}") for number in range(8)]


class Piece(bytearray):
    """Bytes whose end can be seen: plain ones cannot be referred to weakly."""


class Pieces:
    """A stream that brings its pieces, and then is silent; it takes whatever is sent."""

    peer = KeyPair(b"\x05" * 32).peer_id

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self.given: list[weakref.ref[Piece]] = []

    async def receive_some(self, max_bytes: int | None = None) -> bytearray:
        if not self._pieces:
            await trio.sleep_forever()
        piece = Piece(self._pieces.pop(0))
        self.given.append(weakref.ref(piece))
        return piece

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def drained(self, most: int) -> None:
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Pieces:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def _read_frames(stream: Stream) -> None:
    reader = FrameReader(stream, MIB)
    while await reader.receive():
        pass


async def _receive_frames(stream: Stream) -> None:
    receiver = FrameReceiver(stream, MIB)
    while await receiver.receive():
        pass


async def _begin_bulk(stream: Stream) -> None:
    reader = BulkReader(stream)
    while length := await reader.begin():
        await reader.skip(length)


async def _take_bulk(stream: Stream) -> None:
    reader = BulkReader(stream)
    while length := await reader.begin():
        await reader.take(length)


WHOLE = encode_varint(1000) + bytes(1000)
BEGUN = encode_varint(5000) + bytes(1000)


READERS = [_read_frames, _receive_frames, _begin_bulk, _take_bulk, identify.serve_ping]
PIECES = [(WHOLE,), (WHOLE, WHOLE), (BEGUN,), (BEGUN, bytes(1000)), (WHOLE + BEGUN,)]


@pytest.mark.parametrize(
    ("read", "pieces"),
    [
        (read, pieces)
        for read in READERS
        for pieces in PIECES
        # a chunk that is not whole stays as it came, counted by the budget of frames
        if read is not _take_bulk or pieces in PIECES[:2]
    ],
)
async def test_a_reader_that_waits_keeps_no_piece_that_it_has_read(
    read: Callable[[Stream], Awaitable[None]], pieces: tuple[bytes, ...]
) -> None:
    stream = Pieces(*pieces)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, cast("Stream", stream))
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert len(stream.given) == len(pieces)
        assert not any(piece() for piece in stream.given)
        nursery.cancel_scope.cancel()


async def test_a_message_that_a_stream_takes_slowly_counts_as_waiting() -> None:
    """Before: up to a megabyte of each lane had left the account by then."""
    async with hosts(2, QUIET) as (host, sleeper):

        async def never_read(_: object) -> None:
            await trio.sleep_forever()

        sleeper.set_handler(NEWS[0], never_read)
        await host.connect_addr(sleeper.addrs[0])
        assert host.send(sleeper.peer_id, NEWS[0], bytes(MIB))
        await trio.testing.wait_all_tasks_blocked()
        assert host._outbox._total > MIB
        await sleeper.disconnect(host.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        assert host._outbox._total == 0


async def test_a_chunk_that_was_sent_is_not_kept() -> None:
    """Before: the last chunk for each peer, up to 4 MiB, until the next one for it."""
    chunks: list[weakref.ref[Piece]] = []

    class Store:
        async def chunk(self, _: bytes, __: int) -> Piece:
            piece = Piece(bytes(KI))
            chunks.append(weakref.ref(piece))
            return piece

    class Opens:
        async def open_stream(self, _: PeerId, __: str) -> Pieces:
            return Pieces()

    free = Throttle(cast("World", SimpleNamespace(now=lambda: 0.0)), 0.0)
    sender = Sender(Pieces.peer, cast("PolicyStore", Store()), free)
    reports: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run, cast("Host", Opens()), reports.append)
        sender.push_nowait(ChunkHeader(b"\x01" * 32, 0))
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert len(reports) == len(chunks) == 1
        assert chunks[0]() is None
        nursery.cancel_scope.cancel()
