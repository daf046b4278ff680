"""From one version's bytes to the next's: what changed, and by how many ulps.

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
    sparse   u8 classes, u8 border * (classes - 1), (u32 count, u8 shift) * classes,
             low bits, u32 bytes of gaps, plane of gaps, steps of the changed values
    dense    steps of all values
    full     plane of each byte of all values, the lowest first
    steps    plane of pairs, plane of rests, plane of each byte of the wide, the lowest first
    plane    u32 wire size, bytes        themselves, or a zstd frame if that is shorter

A *gap* is the number of unchanged values in front of a changed one. Its lowest ``shift`` bits
are sent as they are (per class and bit a row of bits, the first value in the lowest bit, padded
to bytes). What is above them is a byte, in which 255 means "add 255 and read on".

A *step* is ``zigzag(order(new) - order(old))``, where ``order`` turns sign and magnitude into
two's complement and ``zigzag`` puts 0, -1, 1, -2, 2 ... in a row; sparse steps are never 0 and
count from 0 for -1. Up to 14 a step is a nibble, two to a byte, the first one in front: alone,
the commonest steps (+1 and -1) would take at least one and two bits in Huffman's code, where
they carry 1.4 on average. Nibble 15 means: read a byte of *rests*, which is added to 15; 255
there means: the step itself is in *wide*. Each plane's length follows from the one before.

In `DeltaMode.BY_EXPONENT` values are dealt into *classes* by the magnitude of their *old*
value, which both sides know: half the magnitude is half the ulp and twice the chance to have
changed. Class ``i`` takes the values whose upper magnitude byte (of a bf16: its exponent) is
below ``border[i]`` and not in a class before; the last class takes the others. Gaps then count
within a class, and all streams are in the order of classes. Both sides translate positions by
rank and select on bit masks, 64 values a word, so that an unchanged value costs one comparison
and one bit per class. A table of one entry per value (what the first attempt did) took ten
times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from itertools import accumulate
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from p2p.errors import BadMessage
from p2p.wire import KI, MIB

OPAQUE: Final = 0
"""Kind of bytes without known structure; other kinds give the bytes of one value."""
WIDTHS: Final = {OPAQUE: 1, 2: 2, 4: 4}
"""Bytes of one value, by kind."""

SEGMENT: Final = 2 * MIB
"""Values that are coded together: the unit of choice between codings, and of memory. Of bf16
that is the largest span. Half of it takes 2.5 % more bytes by exponent, double it 2 % fewer."""
MAX_CLASSES: Final = 16

_LEVEL: Final = 1
_MIN_MATCH: Final = 7
_HASH_LOG: Final = 6
"""The smallest match table of zstd level 1: zstd is here for its Huffman coder. On streams of
small numbers its matches are chance, and cost more than the literals they replace."""
_MORE: Final = 255
"""The byte that stands for itself and for what follows."""
_NIBBLE: Final = 15
"""The nibble that sends the reader to the plane of rests."""
_MEAN_GAP: Final = 128
"""From this mean on, a gap's lowest bits are sent apart, so many that the mean of the rest is
below. At a mean of 128 one byte in seven is a 255."""
_MEAN_GAP_IN_CLASS: Final = 8
"""The same where there are several classes: the nearer their means, the better one table of
Huffman's code fits two classes that are too small for one each. At lr 1e-6: 8 % fewer bytes
than with 128, 4 % fewer than with 32."""
_BLOCK: Final = 2 * KI
"""A class with at least this many bytes in a stream gets a zstd block, and so a table, of its
own; a table takes some 40 bytes."""
_SPARSE_ONLY: Final = 1 / 8
"""Up to this share of changed values sparse wins (at 13 % it is 26 % smaller than dense), and
the others are not tried."""
_MOST_SPARSE: Final = 1 / 2
"""Above this share dense wins (the two are level at 59 %), sparse is not tried, and a reader
refuses it: its integers of eight bytes would take a multiple of what the values do."""
_SAMPLE: Final = 16
"""One value in this many is examined to choose the classes, for which rough counts suffice."""
_CLASS_BITS: Final = 60
"""Cost of one more class in bits: 6 bytes, and the last byte of each row of bits half empty."""

_PIECE: Final = 256 * KI
"""Values compared with all borders in one go, so that they stay in a core's cache."""

_WORD: Final = struct.Struct(">I")
_CLASS: Final = struct.Struct(">IB")
_MAX_WINDOW: Final = 2 * SEGMENT
"""No stream of a segment is longer: gaps take a byte per change and one per 255 values."""
_MAX_SHIFT: Final = 31

Bytes = bytes | bytearray | memoryview
_U8 = NDArray[np.uint8]
_U64 = NDArray[np.uint64]
_I64 = NDArray[np.int64]
_Values = NDArray[np.unsignedinteger[Any]]


class DeltaMode(Enum):
    """How much time to spend for fewer bytes."""

    FAST = 0
    """One class."""
    BY_EXPONENT = 1
    """Classes by the old magnitude: about a fifth fewer bytes at a third of the speed."""


class Coding(IntEnum):
    """The coding of one segment."""

    SAME = 0
    SPARSE = 1
    DENSE = 2
    FULL = 3


def encode_delta(old: Bytes, new: Bytes, kind: int, mode: DeltaMode = DeltaMode.FAST) -> bytes:
    """What turns ``old`` into ``new``, two runs of values of one ``kind`` and equal size.

    A run whose size is not a multiple of its values' is coded as opaque bytes.
    """
    if len(old) != len(new):
        raise ValueError(f"a delta from {len(old)} to {len(new)} bytes")
    compressor = _compressor()
    parts: list[bytes] = []
    for before, after in zip(_segments(old, kind), _segments(new, kind), strict=True):
        parts += _encode_segment(before, after, _is_signed(kind, len(old)), mode, compressor)
    return b"".join(parts)


def decode_delta_untrusted(old: Bytes, wire: Bytes, size: int, kind: int) -> bytes:
    """The ``size`` bytes that ``wire`` makes of ``old``, which has as many.

    Raise `BadMessage`, and nothing else, whatever ``wire`` is. Beside the result it takes at
    most the memory of one segment some twelve times over: what a frame claims is compared with
    what its segment can hold before a byte is decompressed. Whether the result is right, its
    digest says.
    """
    if len(old) != size:
        raise ValueError(f"a delta for {size} bytes on a base of {len(old)}")
    result = np.empty(size, np.uint8)
    reader = _Reader(memoryview(wire))
    signed = _is_signed(kind, size)
    try:
        for before, after in zip(
            _segments(old, kind), _segments(result.data, kind), strict=True
        ):
            _decode_segment(before, after, signed, reader)
    except zstandard.ZstdError as error:
        raise BadMessage(f"a plane of a delta is not zstd: {error}") from None
    reader.finish()
    return result.tobytes()


# Segments


def _is_signed(kind: int, size: int) -> bool:
    """Whether bit patterns are signs and magnitudes, as in every float."""
    return kind != OPAQUE and size % WIDTHS[kind] == 0


def _segments(raw: Bytes, kind: int) -> Iterator[_Values]:
    width = WIDTHS[kind] if _is_signed(kind, len(raw)) else 1
    values = np.frombuffer(raw, f"<u{width}")
    for first in range(0, len(values), SEGMENT):
        yield values[first : first + SEGMENT]


def _encode_segment(
    old: _Values, new: _Values, signed: bool, mode: DeltaMode, compressor: Any
) -> list[bytes]:
    # A tensor may start anywhere in a mapped file, and numpy is slow between two addresses.
    old, new = np.require(old, requirements="A"), np.require(new, requirements="A")
    places = np.flatnonzero(old != new)
    if not len(places):
        return [bytes([Coding.SAME])]
    candidates = []
    if len(places) <= _MOST_SPARSE * len(old):
        steps = _steps(old[places], new[places], signed)
        by_exponent = signed and mode is DeltaMode.BY_EXPONENT
        borders = _choose_borders(old, places) if by_exponent else []
        candidates.append(_sparse(old, places, steps, borders, compressor))
    if len(places) > _SPARSE_ONLY * len(old):
        del places
        dense = _put_steps(_steps(old, new, signed), [len(old)], compressor)
        candidates.append([bytes([Coding.DENSE]), *dense])
        candidates.append([bytes([Coding.FULL]), *_put_planes(new, compressor)])
    return min(candidates, key=_wire_bytes)


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
        places, steps = _read_sparse(old, reader)
        out[places] = _stepped(old[places], steps + 1, signed)
    elif coding != Coding.SAME:
        raise BadMessage(f"a delta has no coding {coding}")


# Sparse segments


def _sparse(
    old: _Values, places: _I64, steps: _Values, borders: Sequence[int], compressor: Any
) -> list[bytes]:
    members = _members(old, places, borders)
    heads, low, high = [], [], []
    for mask, inside in zip(_masks(old, borders), members, strict=True):
        ranks = places[inside] if mask is None else _ranks(mask, places[inside])
        gaps = np.diff(ranks, prepend=-1) - 1
        mean = int(ranks[-1]) // len(ranks) if len(ranks) else 0
        shift = (mean // (_MEAN_GAP_IN_CLASS if borders else _MEAN_GAP)).bit_length()
        heads.append(_CLASS.pack(len(ranks), shift))
        low += [
            np.packbits(gaps >> bit & 1, bitorder="little").tobytes() for bit in range(shift)
        ]
        high.append(_escaped(gaps >> shift))
    order = np.concatenate(members)
    ends = list(accumulate(len(inside) for inside in members))
    return [
        bytes([Coding.SPARSE, len(members), *borders]),
        *heads,
        *low,
        _WORD.pack(sum(map(len, high))),
        *_put_plane(high, compressor),
        *_put_steps(steps[order] - steps.dtype.type(1), ends, compressor),
    ]


def _read_sparse(old: _Values, reader: _Reader) -> tuple[_I64, _Values]:
    """The changed places, in the order of classes, and their steps."""
    borders = reader.borders()
    heads = [reader.head(len(old)) for _ in range(len(borders) + 1)]
    total = sum(count for count, _ in heads)
    if total > _MOST_SPARSE * len(old):
        raise BadMessage(f"{total} of {len(old)} values are said to have changed")
    low = [reader.bits(count, shift) for count, shift in heads]
    gaps = reader.gaps(total, len(old))
    places, first = [], 0
    for mask, bits, (count, shift) in zip(_masks(old, borders), low, heads, strict=True):
        ranks = np.cumsum((gaps[first : first + count] << shift) + bits + 1) - 1
        places.append(_inside(ranks, len(old)) if mask is None else _places(mask, ranks))
        first += count
    return np.concatenate(places), reader.steps(total, old.dtype)


def _inside(ranks: _I64, count: int) -> _I64:
    if len(ranks) and int(ranks[-1]) >= count:
        raise BadMessage("a delta changes values behind its segment")
    return ranks


def _escaped(numbers: _I64) -> _U8:
    """Numbers as bytes, of which 255 means: add 255 and read on."""
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


# Classes: rank and select


def _choose_borders(old: _Values, places: _I64) -> list[int]:
    """Borders of classes that make the positions cheapest.

    Neighbouring magnitudes are joined, always the two whose union costs the fewest bits of
    entropy more, until no more than `MAX_CLASSES` are left and the next would cost more than
    the head of a class.
    """
    magnitudes = _magnitudes(old[::_SAMPLE])
    seen = np.bincount(magnitudes, minlength=256) * _SAMPLE
    changed = np.bincount(_magnitudes(old[places]), minlength=256)
    lowest = np.flatnonzero(seen + changed)
    here = np.maximum(seen, changed)[lowest].astype(np.float64)
    moved = changed[lowest].astype(np.float64)
    while len(lowest) > 1:
        union = _entropy(here[1:] + here[:-1], moved[1:] + moved[:-1])
        alone = _entropy(here, moved)
        price = union - alone[1:] - alone[:-1]
        cheapest = int(np.argmin(price))
        if len(lowest) <= MAX_CLASSES and price[cheapest] > _CLASS_BITS:
            break
        for counts in (here, moved):
            counts[cheapest] += counts[cheapest + 1]
        here, moved = np.delete(here, cheapest + 1), np.delete(moved, cheapest + 1)
        lowest = np.delete(lowest, cheapest + 1)
    return [int(border) for border in lowest[1:]]


def _entropy(count: NDArray[np.float64], part: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits that say which ``part`` of ``count`` values it is."""
    rest = count - part

    def bits(number: NDArray[np.float64]) -> NDArray[np.float64]:
        return number * np.log2(np.maximum(number, 1))

    return bits(count) - bits(part) - bits(rest)


def _magnitudes(values: _Values) -> _U8:
    """The eight bits below the sign."""
    return (values >> values.dtype.type(values.itemsize * 8 - 9)).astype(np.uint8)


def _members(old: _Values, places: _I64, borders: Sequence[int]) -> list[_I64]:
    """For each class, the ``places`` in it."""
    if not borders:
        return [np.arange(len(places))]
    classes = np.searchsorted(np.array(borders, np.uint8), _magnitudes(old[places]), "right")
    return [np.flatnonzero(classes == number) for number in range(len(borders) + 1)]


def _masks(old: _Values, borders: Sequence[int]) -> list[_U64 | None]:
    """For each class a bit per value, 64 to a word; None for a class of all."""
    if not borders:
        return [None]
    below = np.zeros((len(borders) + 1, -(-len(old) // 64) * 8), np.uint8)
    for first in range(0, len(old), _PIECE):
        magnitudes = _magnitudes(old[first : first + _PIECE])
        start, end = first // 8, (first + len(magnitudes) + 7) // 8
        for row, border in zip(below, borders, strict=False):
            row[start:end] = np.packbits(magnitudes < border, bitorder="little")
        below[-1, start:end] = np.packbits(np.ones(len(magnitudes), bool), bitorder="little")
    words = below.view("<u8")
    words[1:] &= ~words[:-1]
    return list(words)


def _ranks(mask: _U64, places: _I64) -> _I64:
    """The number of set bits of ``mask`` below each of ``places``."""
    totals = np.cumsum(np.bitwise_count(mask), dtype=np.int64)
    words = places >> 6
    below = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    ranks: _I64 = totals[words] - np.bitwise_count(mask[words] & ~below)
    return ranks


def _places(mask: _U64, ranks: _I64) -> _I64:
    """The positions of the set bits of ``mask`` with these ``ranks``, which ascend."""
    totals = np.cumsum(np.bitwise_count(mask), dtype=np.int64)
    _inside(ranks, int(totals[-1]))
    words = np.searchsorted(totals, ranks, side="right")
    rest = mask[words]
    left = (ranks - totals[words] + np.bitwise_count(rest)).astype(np.uint8)
    places = words << 6
    for half in (32, 16, 8, 4, 2, 1):
        below = np.bitwise_count(rest & np.uint64((1 << half) - 1))
        above = left >= below
        left -= below * above
        jump = above * np.uint8(half)
        rest >>= jump
        places += jump
    return places


# Steps


def _steps(old: _Values, new: _Values, signed: bool) -> _Values:
    """The zigzag number of each step; 0 where nothing changed."""
    step = _ordered(new, signed) - _ordered(old, signed)
    zigzag: _Values = (step << 1 ^ step >> step.itemsize * 8 - 1).view(old.dtype)
    return zigzag


def _stepped(old: _Values, zigzag: _Values, signed: bool) -> _Values:
    """``old`` moved by steps: what `_steps` took apart."""
    one = zigzag.dtype.type(1)
    step = (zigzag >> one ^ -(zigzag & one)).view(f"<i{zigzag.itemsize}")
    moved = _ordered(old, signed) + step
    return _ordered(moved.view(old.dtype), signed).view(old.dtype)


def _ordered(values: _Values, signed: bool) -> NDArray[np.signedinteger[Any]]:
    """Bit patterns as integers that ascend as the floats do. -0 is one below +0. Its own
    inverse."""
    patterns = values.view(f"<i{values.itemsize}")
    if not signed:
        return patterns
    bits = values.itemsize * 8
    ordered: NDArray[np.signedinteger[Any]] = patterns ^ (
        patterns >> bits - 1 & (1 << bits - 1) - 1
    )
    return ordered


# Planes


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(
            _LEVEL,
            strategy=zstandard.STRATEGY_FAST,
            min_match=_MIN_MATCH,
            hash_log=_HASH_LOG,
            write_content_size=True,
        )
    )


def _put_plane(streams: Sequence[_U8], compressor: Any) -> list[bytes]:
    raw = b"".join(stream.tobytes() for stream in streams)
    if len(streams) == 1:
        wire = compressor.compress(raw)
    else:
        frame = compressor.compressobj(len(raw))
        blocks, waiting = [], 0
        for stream in streams:
            blocks.append(frame.compress(stream.tobytes()))
            waiting += len(stream)
            if waiting >= _BLOCK:
                blocks.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
                waiting = 0
        wire = b"".join([*blocks, frame.flush()])
    if len(wire) >= len(raw):
        wire = raw
    return [_WORD.pack(len(wire)), wire]


def _put_planes(values: _Values, compressor: Any) -> Iterator[bytes]:
    octets = values.view(np.uint8).reshape(len(values), values.itemsize)
    for plane in range(values.itemsize):
        yield from _put_plane([octets[:, plane]], compressor)


def _put_steps(steps: _Values, ends: Sequence[int], compressor: Any) -> Iterator[bytes]:
    nibbles = np.minimum(steps, _NIBBLE).astype(np.uint8)
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    larger = steps[steps >= _NIBBLE]
    rests = np.minimum(larger - larger.dtype.type(_NIBBLE), _MORE).astype(np.uint8)
    pairs = nibbles[::2] << 4 | nibbles[1::2]
    yield from _put_plane(np.split(pairs, [end // 2 for end in ends[:-1]]), compressor)
    yield from _put_plane([rests], compressor)
    yield from _put_planes(larger[rests == _MORE], compressor)


class _Reader:
    """The wire of a delta, read from its front. Every method raises `BadMessage`."""

    def __init__(self, wire: memoryview) -> None:
        self._wire = wire
        self._at = 0
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)

    def finish(self) -> None:
        """Raise unless everything was read."""
        if self._at != len(self._wire):
            raise BadMessage(f"{len(self._wire) - self._at} bytes follow a delta")

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        part = self._wire[self._at : self._at + size]
        if len(part) != size:
            raise BadMessage("a delta ends too early")
        self._at += size
        return part

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def borders(self) -> list[int]:
        """The borders between classes."""
        classes = self.byte()
        if not 0 < classes <= MAX_CLASSES:
            raise BadMessage(f"{classes} classes of magnitudes")
        borders = list(self.take(classes - 1))
        if any(low >= high for low, high in zip([0, *borders], borders, strict=False)):
            raise BadMessage("borders of classes do not ascend")
        return borders

    def head(self, values: int) -> tuple[int, int]:
        """How many values of a class changed, and how many low bits of each gap are sent
        apart."""
        count, shift = _CLASS.unpack(self.take(_CLASS.size))
        if count > values or shift > _MAX_SHIFT:
            raise BadMessage(f"{count} changes among {values} values, gaps shifted by {shift}")
        return count, shift

    def bits(self, count: int, shift: int) -> _I64:
        """The lowest ``shift`` bits of ``count`` gaps."""
        numbers = np.zeros(count, np.int64)
        for bit in range(shift):
            row = np.frombuffer(self.take(-(-count // 8)), np.uint8)
            numbers |= (
                np.unpackbits(row, count=count, bitorder="little").astype(np.int64) << bit
            )
        return numbers

    def gaps(self, count: int, values: int) -> _I64:
        """The gaps without those low bits."""
        (size,) = _WORD.unpack(self.take(_WORD.size))
        if size > count + values // _MORE:
            raise BadMessage(f"{size} bytes for {count} gaps among {values} values")
        gaps = _unescaped(self.plane(size))  # together at most 255 * size: no sum overflows
        if len(gaps) != count:
            raise BadMessage(f"{len(gaps)} gaps for {count} changes")
        return gaps

    def steps(self, count: int, dtype: np.dtype[Any]) -> _Values:
        """The steps of ``count`` values."""
        pairs = self.plane(-(-count // 2))
        nibbles = np.stack([pairs >> 4, pairs & _NIBBLE], axis=1).reshape(-1)[:count]
        steps: _Values = nibbles.astype(dtype)
        larger = np.flatnonzero(nibbles == _NIBBLE)
        rests = self.plane(len(larger)).astype(dtype)
        steps[larger] += rests
        wide = larger[rests == _MORE]
        steps[wide] = self.planes(len(wide), dtype)
        return steps

    def planes(self, count: int, dtype: np.dtype[Any]) -> _Values:
        """``count`` values in byte planes."""
        octets = np.empty((count, dtype.itemsize), np.uint8)
        for plane in range(dtype.itemsize):
            octets[:, plane] = self.plane(count)
        values: _Values = octets.reshape(-1).view(dtype)
        return values

    def plane(self, size: int) -> _U8:
        """A stream of ``size`` bytes."""
        (stored,) = _WORD.unpack(self.take(_WORD.size))
        wire = self.take(stored)
        if stored == size:
            return np.frombuffer(wire, np.uint8)
        frame = zstandard.get_frame_parameters(wire)
        if frame.content_size != size or frame.window_size > _MAX_WINDOW:
            raise BadMessage(f"a plane of {size} bytes claims to have {frame.content_size}")
        raw = self._decompressor.decompress(wire, max_output_size=size, allow_extra_data=False)
        if len(raw) != size:
            raise BadMessage("a plane is shorter than it claims")
        return np.frombuffer(raw, np.uint8)


def _wire_bytes(parts: list[bytes]) -> int:
    return sum(map(len, parts))
