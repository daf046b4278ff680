"""`ChunkSet`: some chunks of a version, as the bits of one integer and as ranges on the wire;
and `Selection`: those of some files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Final

from p2p.errors import BadMessage
from p2p.shardcast.index import MAX_CHUNKS, Index
from p2p.wire import KI

MAX_RANGES: Final = KI
"""Most ranges in one list, which has 4 KiB on the wire. A set with more holes is sent in
parts."""
_RANGE: Final = struct.Struct(">HH")
"""A range on the wire: its first chunk, and how many chunks follow that one. Packed flat:
msgpack makes room for as many items as a list claims, so 3 KiB of lists within lists would cost
13 ms if 2,048 were allowed."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges as (start, count) pairs, ascending and separated by gaps."""


class ChunkSet:
    """A set of chunk numbers, stored as the bits of ``mask`` (bit i is chunk i). It is
    immutable: every operation makes a new set. 64 Ki chunks take 8 KiB.

    BitTorrent calls it a bitfield. A Python `set` of as many numbers has 2 MiB besides the
    numbers themselves, and a union, which is what most of its use here is, takes 6 ms instead
    of 0.3 us.
    """

    __slots__ = ("mask",)  # not a frozen dataclass, whose birth takes twice as long

    def __init__(self, mask: int = 0) -> None:
        self.mask = mask

    @classmethod
    def below(cls, count: int) -> ChunkSet:
        """Return the set of chunks 0 to ``count`` - 1."""
        return cls((1 << count) - 1)

    @classmethod
    def of(cls, chunks: Iterable[int]) -> ChunkSet:
        """Return the set of ``chunks``. It is meant for small sets."""
        mask = 0
        for chunk in chunks:
            mask |= 1 << chunk
        return cls(mask)

    @classmethod
    def of_ranges(cls, ranges: Ranges) -> ChunkSet:
        """Return the set of chunks that ``ranges`` name."""
        # Ranges up to which a set is made by shifts. For the longest list a shift per range
        # would move 8 MiB, 3 ms; as text, in one pass, it takes 0.2 ms.
        if len(ranges) <= 16:
            mask = 0
            for start, count in ranges:
                mask |= ((1 << count) - 1) << start
            return cls(mask)
        text, end = [], 0
        for start, count in ranges:
            text += ["0" * (start - end), "1" * count]
            end = start + count
        return cls(int("".join(text)[::-1], 2))

    def ranges(self) -> Iterator[Ranges]:
        """Return the chunks as ranges, in parts of at most `MAX_RANGES`. The empty set gives no
        parts."""
        # As text, in one pass: shifts of 64 Ki chunks, every other of them, take 620 ms.
        text = bin(self.mask)[:1:-1]
        found = ((ones.start(), len(ones[0])) for ones in re.finditer("1+", text))
        while part := tuple(islice(found, MAX_RANGES)):
            yield part

    def including(self, chunk: int) -> ChunkSet:
        """Return this set with ``chunk`` added."""
        return ChunkSet(self.mask | 1 << chunk)

    def excluding(self, chunk: int) -> ChunkSet:
        """Return this set with ``chunk`` removed."""
        return ChunkSet(self.mask & ~(1 << chunk))

    def from_place(self, start: int) -> Iterator[int]:
        """Return the chunks from ``start`` upwards, followed by those below ``start``."""
        mask = self.mask
        while mask:
            above = mask >> start << start
            chosen = (above or mask) & -(above or mask)
            yield chosen.bit_length() - 1
            mask ^= chosen

    @property
    def lowest(self) -> int:
        """The lowest chunk; -1 for the empty set."""
        return (self.mask & -self.mask).bit_length() - 1

    @property
    def end(self) -> int:
        """One beyond the highest chunk; 0 for the empty set."""
        return self.mask.bit_length()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkSet) and self.mask == other.mask

    def __hash__(self) -> int:
        return self.mask

    def __or__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self.mask | other.mask)

    def __and__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self.mask & other.mask)

    def __sub__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self.mask & ~other.mask)

    def __contains__(self, chunk: int) -> bool:
        return bool(self.mask >> chunk & 1)

    def __bool__(self) -> bool:
        return bool(self.mask)

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __iter__(self) -> Iterator[int]:
        # As text, in one pass: taking bits off a number of 64 Ki of them one by one moves 500
        # MB, which takes 130 ms.
        text = bin(self.mask)[:1:-1]
        place = text.find("1")
        while place >= 0:
            yield place
            place = text.find("1", place + 1)

    def __repr__(self) -> str:
        spans = [
            str(start) if count == 1 else f"{start}-{start + count - 1}"
            for part in self.ranges()
            for start, count in part
        ]
        return f"ChunkSet({' '.join(spans)})"


EMPTY: Final = ChunkSet()


def pack_ranges(ranges: Ranges) -> bytes:
    """Return the wire bytes of a list of ranges, four for each range."""
    return b"".join(_RANGE.pack(start, count - 1) for start, count in ranges)


def unpack_ranges_untrusted(data: bytes) -> Ranges:
    """Decode ranges that are ascending and separated by gaps.

    Raises:
        BadMessage: The bytes are no such ranges. Nothing else is raised.
    """
    if len(data) % _RANGE.size or len(data) > MAX_RANGES * _RANGE.size:
        raise BadMessage("a list of ranges is cut off, or has too many")
    pairs = tuple((start, before + 1) for start, before in _RANGE.iter_unpack(data))
    end = -1
    for start, count in pairs:
        if not (end < start and count <= MAX_CHUNKS - start):
            raise BadMessage(
                "ranges must ascend, keep apart and stay below the largest chunk number"
            )
        end = start + count
    return pairs


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to fetch: those whose path, or last part of the path, matches a shell pattern.

    A node that fetches no others is no member of a roster: it pulls their spans, and gives on
    what it has. To it the version is never whole.
    """

    pattern: str

    def files(self, index: Index) -> tuple[int, ...]:
        """Return the numbers of the selected files."""
        return tuple(
            number
            for number, file in enumerate(index.files)
            if fnmatchcase(file.path, self.pattern)
            or fnmatchcase(file.path.rpartition("/")[2], self.pattern)
        )

    def spans(self, index: Index) -> ChunkSet:
        """Return the spans of the selected files."""
        chosen = dict.fromkeys(self.files(index))
        return ChunkSet.of(n for n in range(len(index)) if index.place(n).file in chosen)
