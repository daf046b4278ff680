"""A chunk of tiny frames took time in its square, all were held at once."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import trio

from p2p.errors import BadMessage
from p2p.wire import KI, MIB, FrameParser, FrameReader, encode_varint, frame
from tests.counting import memory_at_most


class Chunks:
    """A stream of given pieces, which says what its reader keeps."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.kept: list[int] = []

    async def receive_some(self, max_bytes: int | None = None, /) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.pieces.pop(0) if self.pieces else b""

    def keep(self, count: int) -> None:
        self.kept.append(count)


async def _seconds(count: int) -> float:
    """CPU time to read ``count`` empty messages that came in one chunk, at best."""
    best = float("inf")
    for _ in range(2):
        reader = FrameReader(Chunks(frame(b"") * count), KI)
        start = time.process_time()  # CPU time is what the attack costs
        while await reader.receive() is not None:
            pass
        best = min(best, time.process_time() - start)
    return best


async def test_tiny_frames_cost_time_in_proportion() -> None:
    """262,144 empty messages in a chunk: 3.3 s of moving a list about, and now 0.3 s."""
    assert await _seconds(256 * KI) < 8 * await _seconds(64 * KI)


async def test_whole_frames_are_not_unpacked_before_they_are_asked_for() -> None:
    reader = FrameReader(Chunks(frame(b"ab") * (64 * KI)), KI)
    tracemalloc.start()
    try:
        await reader.receive()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.pending == 3 * (64 * KI - 1)
    assert held < 2 * 3 * 64 * KI  # 2.8 MiB as a list of frames


def test_a_length_beyond_the_limit_fails_before_the_frame_comes() -> None:
    parser = FrameParser(KI)
    parser.feed(encode_varint(KI + 1))
    with pytest.raises(BadMessage, match="over the limit"):
        parser.next_frame()


def test_an_announced_length_takes_no_memory() -> None:
    parser = FrameParser(64 * MIB)
    with memory_at_most(KI):
        parser.feed(encode_varint(64 * MIB) + b"x")
        assert parser.next_frame() is None


async def test_a_reader_says_how_far_it_is_and_what_it_keeps() -> None:
    whole = frame(bytes(20 * KI))
    stream = Chunks(whole[:100], whole[100 : 10 * KI], whole[10 * KI :], frame(b"next"))
    reader = FrameReader(stream, 32 * KI)
    assert await reader.receive() == bytes(20 * KI)
    assert stream.kept == [10 * KI, 0]  # a hundred bytes are not worth a word
    assert await reader.receive() == b"next"
    assert await reader.receive() is None
