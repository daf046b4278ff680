"""Encoding of spans as wire chunks and back, as pure functions.

`ANCHOR` packs each span alone, so chunks can be checked, forwarded, unpacked and lost one by
one. Its bytes are split in *planes*: the first byte of every value, then the second, and so on
(one plane where the kind is not known). A plane that zstd makes smaller is a zstd frame; one
that it does not, as the mantissas of weights, is stored as it is. In front of the planes stand
their lengths.

Planes compress better: of bf16 weights the byte with the exponent shrinks 2.7 to 2.9 times and
the other byte not at all, together 1.46 to 1.49 times, while zstd on the unsplit bytes gives
1.28. No lossless coder does better than 1.5.

Planes of numbers are packed at level 1 with the smallest match table and the longest minimal
match (`_NUMBERS`): exponents have an uneven distribution but nothing to match, so a compressor
that hardly looks for matches is faster and better. Example: 2 MiB of exponents, one core: level
1 gives 2.71 times at 370 MB/s, level 3 2.37 at 129, this 2.94 at 1,040. Unpacking is faster
too: 2,800 MB/s for 1,490.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard

from p2p.errors import BadMessage
from p2p.shardcast.index import MAX_SPAN, Span, digest_of

ANCHOR: Final = "planes-zstd1"
"""Name of the encoding that packs every span by itself, in byte planes."""
PATCH: Final = "gap-ulp-zstd1"
"""Name of the encoding that turns another version into this one (`p2p.shardcast.patch`). It is
cut into spans of its own, each packed like a policy's."""
ADAPTER: Final = "lora-sum-fp32"
"""Name of the encoding that adds products of small matrices to the version that a run began
with (`p2p.shardcast.adapter`). It travels as a patch does."""
_LEVEL: Final = 1
_LENGTH: Final = struct.Struct(">I")
_STORED: Final = 1 << 31
"""Bit of a plane's length that marks a plane stored without compression."""

ENCODE_RATE: Final = 800e6
"""Modelled cost of `encode_chunk`: bytes of weights per second on one core."""
DECODE_RATE: Final = 1500e6
"""Modelled cost of `decode_chunk_untrusted`, hash included: bytes per second on one core."""

Bytes = bytes | memoryview


def wire_limit(span: Span) -> int:
    """Return the most bytes that the chunk of a span can have, which is when all planes are
    stored."""
    return span.size + _LENGTH.size * max(1, span.kind)


MAX_WIRE: Final = wire_limit(Span(b"", MAX_SPAN, 4))
"""Most wire bytes of one chunk."""


def encode_chunk(span: Span, raw: Bytes) -> bytes:
    """Pack the bytes of a span. The same bytes give the same chunk with the same version of
    zstd."""
    planes = _split(raw, span.kind)
    packed = [pack_plane(plane, is_number=span.kind > 0) for plane in planes]
    lengths = [
        _LENGTH.pack(len(wire) | (_STORED if wire is plane else 0))
        for wire, plane in zip(packed, planes, strict=True)
    ]
    return b"".join([*lengths, *packed])


def decode_chunk_untrusted(span: Span, wire: Bytes) -> Bytes:
    """Return the bytes of ``span``, unpacked from ``wire`` and compared with the span's digest.

    Raises:
        BadMessage: The chunk is malformed or wrong. Nothing else is raised, whatever the bytes.
    """
    # The sizes in the heads of the frames are checked before a byte is decompressed, so a
    # decompression bomb costs nothing.
    count = max(1, span.kind)
    if len(wire) < count * _LENGTH.size:
        raise BadMessage("a chunk is shorter than the lengths of its planes")
    view, at = memoryview(wire), count * _LENGTH.size
    planes: list[Bytes] = []
    for number in range(count):
        (length,) = _LENGTH.unpack_from(view, number * _LENGTH.size)
        plane = view[at : at + (length & ~_STORED)]
        at += length & ~_STORED
        planes.append(
            plane if length & _STORED else unpack_plane_untrusted(plane, span.size // count)
        )
    if at != len(view) or any(len(plane) * count != span.size for plane in planes):
        raise BadMessage("a chunk's planes are not as long as they should be")
    raw = _merge(planes)
    if digest_of(raw) != span.digest:
        raise BadMessage("a chunk's digest is wrong")
    return raw


def pack_plane(plane: Bytes, *, is_number: bool) -> Bytes:
    """Return a plane as a zstd frame, or unchanged if compression saves too little."""
    if is_number:
        compressor = zstandard.ZstdCompressor(compression_params=_numbers(len(plane)))
    else:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    wire: bytes = compressor.compress(plane)
    # A plane is compressed if that saves at least one byte in so many: else every receiver
    # would unpack it for nothing.
    return wire if len(wire) <= len(plane) - len(plane) // 32 - 1 else plane


def _numbers(size: int) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=size,
        window_log=max(10, (size - 1).bit_length()),
        hash_log=6,
        min_match=7,
        target_length=0,
        write_content_size=True,
    )


def unpack_plane_untrusted(frame: memoryview, size: int) -> bytes:
    """Return the content of a zstd frame. Raise `BadMessage` unless it has ``size`` bytes."""
    try:
        head = zstandard.get_frame_parameters(frame)
        if head.content_size != size or head.window_size > MAX_SPAN:
            raise BadMessage(
                f"a plane decompresses to {head.content_size} bytes in a window of"
                f" {head.window_size}, instead of to {size}"
            )
        decoder = zstandard.ZstdDecompressor(max_window_size=MAX_SPAN)
        raw: bytes = decoder.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a plane is not zstd: {error}") from None
    return raw


def _split(raw: Bytes, kind: int) -> list[Bytes]:
    """Split values of ``kind`` bytes into planes, the lowest bytes first."""
    if kind <= 1:
        return [raw]
    columns = np.frombuffer(raw, np.uint8).reshape(-1, kind).T.copy()
    return [columns[number].data for number in range(kind)]


def _merge(planes: Sequence[Bytes]) -> Bytes:
    if len(planes) == 1:
        return planes[0]
    parts = [np.frombuffer(plane, np.uint8) for plane in planes]
    if len(parts) == 2:  # three times as fast as writing every other byte
        words = parts[1].astype("<u2")
        words <<= 8
        words |= parts[0]
        return words.data.cast("B")
    merged = np.empty((len(parts[0]), len(parts)), np.uint8)
    for number, part in enumerate(parts):
        merged[:, number] = part
    return merged.data.cast("B")
