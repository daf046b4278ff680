"""Which files of a policy a node fetches, if it does not fetch all.

Such a node is no member of a roster: it pulls the spans of the files that it wants, and gives
on what it has. To it the policy is never whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.index import Index


@dataclass(frozen=True, slots=True)
class Selection:
    """The files whose path, or its last part, matches a shell pattern."""

    pattern: str

    def files(self, index: Index) -> tuple[int, ...]:
        """The numbers of those files."""
        return tuple(
            number
            for number, file in enumerate(index.files)
            if fnmatchcase(file.path, self.pattern)
            or fnmatchcase(file.path.rpartition("/")[2], self.pattern)
        )

    def spans(self, index: Index) -> ChunkSet:
        """Their spans."""
        chosen = dict.fromkeys(self.files(index))
        return ChunkSet.of(n for n in range(len(index)) if index.place(n).file in chosen)
