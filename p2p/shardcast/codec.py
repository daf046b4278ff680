"""From a safetensors file to wire chunks and back (the `ANCHOR` encoding), as pure functions.

Each chunk is one zstd frame of a fixed span of the file: chunks can be checked, forwarded,
decoded and lost one by one. Level 1, because no level buys weights anything more (1.19 times
smaller in fp32, 1.46 in bf16 with planes split, at level 1 and 9 alike) and the origin
compresses while all receivers wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import zstandard

from p2p.errors import BadMessage
from p2p.shardcast.manifest import MAX_SPAN, Chunk, digest_of
from p2p.wire import KI

MIN_SPAN: Final = 32 * KI
"""Smaller chunks cost more in frames, hashes and wake-ups than their earlier arrival is
worth."""
_GOAL: Final = 256
"""Chunks per policy to aim at: a stripe forest is within 7 % of the bound there, and within 26
% at 64. A chunk is passed on when it is whole, so each hop delays by a chunk's time: fewer and
larger chunks wait longer at every level. Example: 32 MiB are cut into 256 chunks of 128 KiB."""
_LEVEL: Final = 1
_MAX_WINDOW: Final = MAX_SPAN
"""What a chunk can refer back to is in it. The one-shot decoder takes no memory for a window;
others do."""
_LENGTH_BYTES: Final = 8

COMPRESS_RATE: Final = 300e6
"""Bytes per second of zstd level 1 on weights, one core: the modelled cost of `encode_span`."""
DECODE_RATE: Final = 700e6
"""Bytes per second of decompression and hashing, one core: the modelled cost of
`decode_chunk_untrusted`."""


def span_for(size: int) -> int:
    """Raw bytes per chunk for a file of ``size`` bytes: a power of two, about `_GOAL`
    chunks."""
    span = MIN_SPAN
    while span < MAX_SPAN and span * _GOAL < size:
        span *= 2
    return span


def spans(size: int, span: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each piece of a file."""
    for offset in range(0, size, span):
        yield offset, min(span, size - offset)


def header_span(front: bytes, size: int) -> int:
    """Bytes of a safetensors length and header, given the file's first 8 bytes; 0 if it is no
    such file."""
    if len(front) < _LENGTH_BYTES:
        return 0
    end = _LENGTH_BYTES + int.from_bytes(front[:_LENGTH_BYTES], "little")
    return end if end <= size else 0


def encode_span(raw: bytes | memoryview) -> tuple[Chunk, bytes]:
    """Compress one span; returns its entry for the index and its wire bytes."""
    wire = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)
    return Chunk(digest_of(wire), len(wire), len(raw)), wire


def encode_spans(raw: bytes, span: int) -> list[tuple[Chunk, bytes]]:
    """`encode_span` for each ``span`` bytes of ``raw``."""
    view = memoryview(raw)
    return [
        encode_span(view[offset : offset + length]) for offset, length in spans(len(raw), span)
    ]


def decode_chunk_untrusted(chunk: Chunk, wire: bytes | memoryview) -> bytes:
    """The raw span of ``chunk``. Raise `BadMessage`, and nothing else, whatever the bytes.

    The size is checked in the frame's header before a byte is decompressed, so a bomb costs
    nothing.
    """
    if len(wire) != chunk.wire or digest_of(wire) != chunk.digest:
        raise BadMessage("a chunk's digest is wrong")
    try:
        frame = zstandard.get_frame_parameters(wire)
        if frame.content_size != chunk.span or frame.window_size > _MAX_WINDOW:
            raise BadMessage(
                f"a chunk decompresses to {frame.content_size} bytes in a window of"
                f" {frame.window_size}, instead of to {chunk.span}"
            )
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        raw: bytes = decoder.decompress(
            wire, max_output_size=chunk.span, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise BadMessage(f"a chunk is not zstd: {error}") from None
    if len(raw) != chunk.span:
        raise BadMessage("a chunk's frame is shorter than it claims")
    return raw


def decode_chunks_untrusted(chunks: list[Chunk], wire: bytes) -> bytes:
    """The raw bytes of consecutive ``chunks`` whose wire bytes lie end to end. Raise
    `BadMessage`."""
    view, parts, offset = memoryview(wire), [], 0
    for chunk in chunks:
        parts.append(decode_chunk_untrusted(chunk, view[offset : offset + chunk.wire]))
        offset += chunk.wire
    return b"".join(parts)
