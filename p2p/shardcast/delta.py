"""Deltas between two versions' bytes: changed values and their steps in ulps.

Theory of operation
-------------------
A bf16 weight changes only when its fp32 master crosses a rounding border. At a learning rate
of 1e-6 an update moves some 1.7 % of them, and nine of ten by a single ulp. So a delta says
*where* (the gaps between changed values) and *by how much* (the step between the two bit
patterns, taken as integers in the order of the numbers they stand for). All of it is integer
arithmetic on bit patterns, modulo 2^width: exact for NaN, infinities, -0 and whatever the bits
may be. Everything here is a pure function.

Values are taken in *segments* of `SEGMENT`, and each segment is written in the coding
that takes the fewest bytes:

- *same*: nothing changed;
- *sparse*: gaps and steps of the changed values, half of all at most;
- *dense*: the steps of all values, 0 where nothing changed;
- *full*: the new values in byte planes.

The wire, all integers big-endian::

    delta    segment*                    until the raw size is reached
    segment  u8 coding, body
    sparse   u8 1, u32 count, u8 shift, low bits, u32 bytes of gaps, plane of gaps,
             steps of the changed values
    dense    steps of all values
    full     plane of each byte of all values, the lowest first
    steps    plane of pairs, plane of rests, plane of each byte of the wide, the lowest first
    plane    u32 wire size, bytes        themselves, or a zstd frame if that is shorter

A *gap* is the number of unchanged values in front of a changed one. Its lowest ``shift`` bits
are sent as they are (per bit a row, the first value in the lowest bit, padded to bytes). The
rest is a byte, in which 255 means "add 255 and read on".

A *step* is ``zigzag(order(new) - order(old))``, where ``order`` turns sign and magnitude into
two's complement and ``zigzag`` puts 0, -1, 1, -2, 2 ... in a row; sparse steps are never 0 and
count from 0 for -1. Up to 14 a step is a nibble, two to a byte, the first one in front: alone,
the commonest steps (+1 and -1) would take at least one and two bits in Huffman's code, where
they carry 1.4 on average. Nibble 15 means: read a byte of *rests*, which is added to 15; 255
there means: the step itself is in *wide*. Each plane's length follows from the one before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage
from p2p.shardcast.codec import pack_plane, unpack_plane_untrusted
from p2p.wire import MIB

SEGMENT: Final = 2 * MIB
"""Number of values that are coded together, with one coding and in one buffer. In bf16 this is
the largest span."""

_MORE: Final = 255
"""Byte that stands for itself plus the byte that follows."""

_CHANGES: Final = struct.Struct(">BIB")
Bytes = bytes | bytearray | memoryview
_U8 = NDArray[np.uint8]
_I64 = NDArray[np.int64]
_Values = NDArray[np.unsignedinteger[Any]]


class Coding(IntEnum):
    """The coding of one segment."""

    SAME = 0
    SPARSE = 1
    DENSE = 2
    FULL = 3


def encode_delta(old: Bytes, new: Bytes, kind: int) -> bytes:
    """Encode the change from ``old`` to ``new``, two runs of equal size with values of one
    ``kind``.

    A run whose size is not a multiple of its values' is coded as opaque bytes.
    """
    if len(old) != len(new):
        raise ValueError(f"a delta from {len(old)} to {len(new)} bytes")
    parts: list[bytes] = []
    for before, after in zip(_segments(old, kind), _segments(new, kind), strict=True):
        parts += _encode_segment(before, after, _is_signed(kind, len(old)))
    return b"".join(parts)


def decode_delta_untrusted(old: Bytes, wire: Bytes, size: int, kind: int) -> bytes:
    """Apply the delta ``wire`` to ``old`` and return ``size`` bytes, as many as ``old`` has.

    Raise `BadMessage`, and nothing else, whatever ``wire`` is. Beside the result this takes at
    most the memory of some twelve segments: the size that a frame claims is compared with what
    its segment can hold before a byte is decompressed. The caller compares the result with its
    digest.
    """
    if len(old) != size:
        raise ValueError(f"a delta for {size} bytes on a base of {len(old)}")
    result = np.empty(size, np.uint8)
    reader = _Reader(memoryview(wire))
    signed = _is_signed(kind, size)
    for before, after in zip(_segments(old, kind), _segments(result.data, kind), strict=True):
        _decode_segment(before, after, signed, reader)
    reader.finish()
    return result.tobytes()


# Segments


def _is_signed(kind: int, size: int) -> bool:
    """Return True if the bit patterns are sign and magnitude, as in every float. ``kind`` is
    the number of bytes of one value, or 0 for bytes without known structure."""
    return kind != 0 and size % kind == 0


def _segments(raw: Bytes, kind: int) -> Iterator[_Values]:
    width = kind if _is_signed(kind, len(raw)) else 1
    values = np.frombuffer(raw, f"<u{width}")
    for first in range(0, len(values), SEGMENT):
        yield values[first : first + SEGMENT]


def _encode_segment(old: _Values, new: _Values, signed: bool) -> list[bytes]:
    # A tensor may start anywhere in a mapped file, and numpy is slow between two addresses.
    old, new = np.require(old, requirements="A"), np.require(new, requirements="A")
    places = np.flatnonzero(old != new)
    if not len(places):
        return [bytes([Coding.SAME])]
    candidates = []
    # Beyond half dense wins (the two are level at 59 %), and the eight-byte integers of sparse
    # would take a multiple of the memory of the values: a reader refuses more.
    if 2 * len(places) <= len(old):
        steps = _steps(old[places], new[places], signed)
        candidates.append(_sparse(places, steps))
    # Up to this share of changed values sparse wins (at 13 % it is 26 % smaller than dense),
    # and the others are not tried.
    if len(places) > (1 / 8) * len(old):
        del places
        dense = _put_steps(_steps(old, new, signed))
        candidates.append([bytes([Coding.DENSE]), *dense])
        candidates.append([bytes([Coding.FULL]), *_put_planes(new)])
    return min(candidates, key=lambda parts: sum(map(len, parts)))


def _decode_segment(old: _Values, out: _Values, signed: bool, reader: _Reader) -> None:
    coding = reader.byte()
    if coding == Coding.FULL:
        out[:] = reader.planes(len(out), out.dtype)
        return
    if coding == Coding.DENSE:
        out[:] = _stepped(old, reader.steps(len(out), out.dtype), signed)
        return
    out[:] = old
    if coding == Coding.SPARSE:
        places, steps = reader.sparse(old)
        out[places] = _stepped(old[places], steps + 1, signed)
    elif coding != Coding.SAME:
        raise BadMessage(f"a delta has no coding {coding}")


# Sparse segments


def _sparse(places: _I64, steps: _Values) -> list[bytes]:
    gaps = np.diff(places, prepend=-1) - 1
    # From this mean on, a gap's lowest bits are sent apart, so many that the mean of the rest
    # is below. At a mean of 128 one byte in seven is a 255.
    shift = (int(places[-1]) // len(places) // 128).bit_length()
    low = [np.packbits(gaps >> bit & 1, bitorder="little").tobytes() for bit in range(shift)]
    high = _escaped(gaps >> shift)
    return [
        bytes([Coding.SPARSE]),
        _CHANGES.pack(1, len(places), shift),
        *low,
        len(high).to_bytes(4, "big"),
        *_put_plane(high),
        *_put_steps(steps - steps.dtype.type(1)),
    ]


def _escaped(numbers: _I64) -> _U8:
    """Encode numbers as bytes, where 255 means: add 255 and read on."""
    if not len(numbers) or int(numbers.max()) < _MORE:
        return numbers.astype(np.uint8)
    more, rest = np.divmod(numbers, _MORE)
    ends = np.cumsum(more + 1)
    stream = np.full(int(ends[-1]), _MORE, np.uint8)
    stream[ends - 1] = rest
    return stream


def _unescaped(stream: _U8) -> _I64:
    ends = np.flatnonzero(stream != _MORE)
    if len(ends) == len(stream):
        return stream.astype(np.int64)
    before: _I64 = np.diff(ends, prepend=-1) - 1
    return before * _MORE + stream[ends]


# Steps


def _steps(old: _Values, new: _Values, signed: bool) -> _Values:
    """Return the zigzag number of each value's step; 0 where nothing changed."""
    step = _ordered(new, signed) - _ordered(old, signed)
    zigzag: _Values = (step << 1 ^ step >> step.itemsize * 8 - 1).view(old.dtype)
    return zigzag


def _stepped(old: _Values, zigzag: _Values, signed: bool) -> _Values:
    """Apply zigzag steps to ``old``; the inverse of `_steps`."""
    one = zigzag.dtype.type(1)
    step = (zigzag >> one ^ -(zigzag & one)).view(f"<i{zigzag.itemsize}")
    moved = _ordered(old, signed) + step
    return _ordered(moved.view(old.dtype), signed).view(old.dtype)


def _ordered(values: _Values, signed: bool) -> NDArray[np.signedinteger[Any]]:
    """Map bit patterns to integers in the order of the floats, with -0 one below +0. The
    function is its own inverse."""
    patterns = values.view(f"<i{values.itemsize}")
    if not signed:
        return patterns
    bits = values.itemsize * 8
    ordered: NDArray[np.signedinteger[Any]] = patterns ^ (
        patterns >> bits - 1 & (1 << bits - 1) - 1
    )
    return ordered


# Planes


def _put_plane(stream: _U8) -> list[bytes]:
    wire = pack_plane(stream.tobytes(), is_number=True)
    return [len(wire).to_bytes(4, "big"), bytes(wire)]


def _put_planes(values: _Values) -> Iterator[bytes]:
    octets = values.view(np.uint8).reshape(len(values), values.itemsize)
    for plane in range(values.itemsize):
        yield from _put_plane(octets[:, plane])


def _put_steps(steps: _Values) -> Iterator[bytes]:
    # A nibble of 15 sends the reader to the plane of rests.
    nibbles = np.minimum(steps, 15).astype(np.uint8)
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    larger = steps[steps >= 15]
    rests = np.minimum(larger - larger.dtype.type(15), _MORE).astype(np.uint8)
    pairs: _U8 = (nibbles[::2] << 4 | nibbles[1::2]).astype(np.uint8)
    yield from _put_plane(pairs)
    yield from _put_plane(rests)
    yield from _put_planes(larger[rests == _MORE])


class _Reader:
    """Reads a delta from its front. Every method raises `BadMessage`."""

    def __init__(self, wire: memoryview) -> None:
        self._wire = wire
        self._at = 0

    def finish(self) -> None:
        """Raise `BadMessage` unless everything was read."""
        if self._at != len(self._wire):
            raise BadMessage(f"{len(self._wire) - self._at} bytes follow a delta")

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        part = self._wire[self._at : self._at + size]
        if len(part) != size:
            raise BadMessage("a delta ends too early")
        self._at += size
        return part

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def sparse(self, old: _Values) -> tuple[_I64, _Values]:
        """Read the changed places of a segment and their steps."""
        values = len(old)
        classes, count, shift = _CHANGES.unpack(self.take(_CHANGES.size))
        if classes != 1 or 2 * count > values or shift > 31:
            raise BadMessage(
                f"{count} changes in {classes} classes among {values} values, gaps shifted by"
                f" {shift}"
            )
        low = self.bits(count, shift)
        places = np.cumsum((self.gaps(count, values) << shift) + low + 1) - 1
        if count and int(places[-1]) >= values:
            raise BadMessage("a delta changes values behind its segment")
        return places, self.steps(count, old.dtype)

    def bits(self, count: int, shift: int) -> _I64:
        """Read the lowest ``shift`` bits of ``count`` gaps."""
        numbers = np.zeros(count, np.int64)
        for bit in range(shift):
            row = np.frombuffer(self.take(-(-count // 8)), np.uint8)
            numbers |= (
                np.unpackbits(row, count=count, bitorder="little").astype(np.int64) << bit
            )
        return numbers

    def gaps(self, count: int, values: int) -> _I64:
        """Read the gaps without their low bits."""
        size = int.from_bytes(self.take(4), "big")
        if size > count + values // _MORE:
            raise BadMessage(f"{size} bytes for {count} gaps among {values} values")
        gaps = _unescaped(self.plane(size))  # together at most 255 * size: no sum overflows
        if len(gaps) != count:
            raise BadMessage(f"{len(gaps)} gaps for {count} changes")
        return gaps

    def steps(self, count: int, dtype: np.dtype[Any]) -> _Values:
        """Read the steps of ``count`` values."""
        pairs = self.plane(-(-count // 2))
        nibbles = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[:count]
        steps: _Values = nibbles.astype(dtype)
        larger = np.flatnonzero(nibbles == 15)
        rests = self.plane(len(larger)).astype(dtype)
        steps[larger] += rests
        wide = larger[rests == _MORE]
        steps[wide] = self.planes(len(wide), dtype)
        return steps

    def planes(self, count: int, dtype: np.dtype[Any]) -> _Values:
        """Read ``count`` values stored in byte planes."""
        octets = np.empty((count, dtype.itemsize), np.uint8)
        for plane in range(dtype.itemsize):
            octets[:, plane] = self.plane(count)
        values: _Values = octets.reshape(-1).view(dtype)
        return values

    def plane(self, size: int) -> _U8:
        """Read a plane of ``size`` bytes."""
        stored = int.from_bytes(self.take(4), "big")
        wire = self.take(stored)
        if stored == size:
            return np.frombuffer(wire, np.uint8)
        raw = unpack_plane_untrusted(wire, size)
        return np.frombuffer(raw, np.uint8)
