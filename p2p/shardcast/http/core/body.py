"""A body as pieces: ranges of files, and bytes between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Slice:
    """``length`` bytes of file number ``file`` of a version, from ``offset`` on."""

    file: int
    offset: int
    length: int


class Body:
    """A response body of known size, of which any part can be produced by itself."""

    def __init__(self, parts: Sequence[Slice | bytes]) -> None:
        self._parts = tuple(parts)
        lengths = (p.length if isinstance(p, Slice) else len(p) for p in parts)
        self._ends = tuple(accumulate(lengths))

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        return f"Body({self.size} bytes in {len(self._parts)} parts)"

    def pieces(self, start: int, end: int, most: int) -> Iterator[Slice | bytes]:
        """Return bytes ``start`` to ``end`` as pieces of at most ``most`` bytes."""
        part = bisect_right(self._ends, start)
        while start < end:
            first = self._ends[part - 1] if part else 0
            within = start - first
            count = min(most, end - start, self._ends[part] - start)
            source = self._parts[part]
            if count and isinstance(source, Slice):
                yield Slice(source.file, source.offset + within, count)
            elif count and isinstance(source, bytes):
                yield source[within : within + count]
            start += count
            part += start == self._ends[part]
