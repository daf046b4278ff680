"""What a peer sent last is not kept while its next word is awaited.

A task that waits for a stream keeps whatever its local variables name. The stream's account
knows of what the application received until that comes back for more; from then on, the last
piece, frame or message lived in no account for as long as the peer was silent: 32 KiB in each
of 3,600 streams of pings were 120 MiB (`window-hoard`), and a lane may keep a message of a
megabyte.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing

from p2p.host import FrameReceiver, Host, Stream, serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.shardcast.messages import ChunkHeader
from p2p.shardcast.receiver import BulkReader
from p2p.shardcast.sender import Sender, Throttle
from p2p.shardcast.store import PolicyStore
from p2p.swarm import identify
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork
from p2p.wire import KI, MIB, FrameReader, encode_varint
from p2p.world import World
from tests.attacks.hostile_mux import DATA, Hostile, frame, hello
from tests.attacks.test_transport_memory import grown

QUIET = SwarmConfig(keepalive=float("inf"), identify=False)
ECHO = ProtocolId("/test/echo")
NEWS = [ProtocolId(f"/test/news/{number}") for number in range(8)]
LARGE = 200 * KI
"""Bytes that fit the first window with what a stream's negotiation took of it."""


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


@asynccontextmanager
async def _attacked() -> AsyncIterator[tuple[SwarmHost, Hostile]]:
    """A host whose handlers are the product's, and a peer that takes all answers."""
    network = MemoryNetwork()
    async with (
        open_host(network=network, listen=("/memory/0",), strict=True, config=QUIET) as host,
        trio.open_nursery() as nursery,
    ):
        hostile = await Hostile.dial(host.world, network, host.addrs[0], KeyPair(b"\x66" * 32))
        nursery.start_soon(hostile.swallow)
        yield host, hostile
        nursery.cancel_scope.cancel()


async def _say(hostile: Hostile, stream_id: int, protocol: str, body: bytes) -> None:
    await hostile.send(hello(stream_id, protocol))
    for start in range(0, len(body), 32 * KI):
        await hostile.send(frame(DATA, 0, stream_id, body[start : start + 32 * KI]))
        await trio.testing.wait_all_tasks_blocked()


async def test_pings_that_wait_for_more_keep_nothing() -> None:
    """Before: 32 KiB in each of 32 streams, 1.1 MiB."""
    async with _attacked() as (_, hostile):
        await _say(hostile, 1, identify.PING_ID, bytes(32 * KI))  # what is shared is there
        with grown() as cost:
            for number in range(32):
                await _say(hostile, 3 + 2 * number, identify.PING_ID, bytes(32 * KI))
        assert cost[0] < 32 * 12 * KI  # the streams


async def test_lanes_that_wait_keep_no_message() -> None:
    """Before: the last message of each lane, 1.6 MiB of eight."""
    heard: list[int] = []
    async with _attacked() as (host, hostile):
        blocks = ExitStack()
        for protocol in NEWS:
            receiving = host.receiving(protocol, lambda _, message: heard.append(len(message)))
            blocks.enter_context(receiving)
        message = encode_varint(LARGE) + bytes(LARGE)
        await _say(hostile, 1, NEWS[0], message)
        with grown() as cost:
            for number, protocol in enumerate(NEWS):
                await _say(hostile, 3 + 2 * number, protocol, message)
        assert heard == [LARGE] * (1 + len(NEWS))
        assert cost[0] < LARGE


async def test_services_that_wait_keep_neither_question_nor_answer() -> None:
    """Before: the last question of each stream."""

    async def answer(_: PeerId, question: bytes) -> bytes:
        return bytes(len(question))

    async with _attacked() as (host, hostile):
        host.set_handler(ECHO, serve_requests(answer))
        question = encode_varint(LARGE) + bytes(LARGE)
        await _say(hostile, 1, ECHO, question)
        with grown() as cost:
            for number in range(8):
                await _say(hostile, 3 + 2 * number, ECHO, question)
        assert cost[0] < LARGE


async def test_a_message_that_a_stream_takes_slowly_counts_as_waiting() -> None:
    """Before: up to a megabyte of each lane had left the account by then."""
    network = MemoryNetwork()
    async with (
        open_host(network=network, listen=("/memory/0",), strict=True, config=QUIET) as host,
        open_host(network=network, listen=("/memory/0",), config=QUIET) as sleeper,
    ):

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
