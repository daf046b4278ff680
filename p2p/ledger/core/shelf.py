"""What a node keeps of one other author's log: a set of signed statements that agree.

Theory of operation
-------------------
Entries are signed one by one, so they need not come in order, nor all of them: a *shelf* is a
set, and two shelves of one author are merged by putting in what either lacks. It has a window,
the newest entries that fit `budget` bytes, and beside it the entries of `LASTING` kinds,
which must reach who comes later. What falls out of either depends on what was put in and not on
the order in which it came, so that nodes which have heard the same keep the same. An `Extent`
says what is here, holes included, in so few bytes that another node can hand over just what is
missing (`Shelf.missing`).

Whatever comes is first held against what is there: a statement that binds its author to another
digest of some entry is a `Equivocation`, and ends the shelf.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

from p2p.bounded import BoundedDict
from p2p.equivocation import Equivocation, conflict
from p2p.ledger.core.chain import (
    Entry,
    SignedHead,
    Statement,
)
from p2p.wire import KI

LASTING: Final = ("ban", "lie")
"""Kinds of entries that are kept beyond the window: they say who lied."""
MAX_LASTING: Final = 256
"""Of one author: as many proofs of bans as a trainer keeps. The newest are kept."""
MAX_LASTING_BODY: Final = 4 * KI
"""Bytes of an entry that is kept so long; a trainer's have under 100."""
MAX_HEADS: Final = 64
"""Signed heads of one author that are kept beside its entries: those of five minutes. An entry
that comes is held against them, too."""

Span = tuple[int, int]
"""The first and the last of consecutive numbers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a node has of an author's log, and what it does not want any more."""

    top: int = -1
    """The highest number of an entry; -1 without any."""
    digest: bytes = b""
    """Of entry ``top``."""
    floor: int = -1
    """Up to here only entries of lasting kinds are wanted."""
    low: int = 0
    high: int = -1
    """Of the numbers from ``low`` to ``high``, ``spans`` says which are there. Of others up to
    ``top`` nothing is said, and nothing asked."""
    spans: tuple[Span, ...] = ()

    def lacks(self, seqno: int) -> bool:
        """Whether entry ``seqno`` is not there, as far as is said."""
        if seqno > self.top:
            return True
        if not self.low <= seqno <= self.high:
            return False
        at = bisect_right(self.spans, (seqno, math.inf)) - 1
        return at < 0 or self.spans[at][1] < seqno


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """Ascending ``numbers``, where they are consecutive in one."""
    found: list[Span] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


class Shelf:
    """Of one author. ``budget`` is in bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.top = -1
        """The highest number of an entry that is here; -1 if there is none."""
        self._floor = -1
        """The highest number that was too much for the window: nothing below comes back."""
        self._window: dict[int, Entry] = {}
        self._bytes = 0
        self._lasting: dict[int, Entry] = {}
        self._lasting_floor = -1
        self._heads: BoundedDict[int, SignedHead] = BoundedDict(MAX_HEADS)
        self._described = 0
        """How many spans of a long row the last question has named."""

    def __len__(self) -> int:
        return len(self._window.keys() | self._lasting.keys())

    @property
    def size(self) -> int:
        """Bytes of the window, about."""
        return self._bytes

    @property
    def budget(self) -> int:
        """Bytes that the window may have."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        if budget > self._budget:
            self._floor = -1
        self._budget = budget
        self._trim()

    def __iter__(self) -> Iterator[Entry]:
        """All entries, in the order of their numbers."""
        whole = self._window | self._lasting
        return (whole[seqno] for seqno in sorted(whole))

    def extent(self, room: int) -> Extent:
        """What is here, in ``room`` spans at most; of more the others come in the next."""
        found = spans_of(sorted(self._window.keys() | self._lasting.keys()))
        start = 0
        if len(found) > room:
            start = self._described % len(found)
            self._described = start + room
        named = tuple(found[start : start + room])
        low = 0 if not start else found[start - 1][1] + 1
        high = self.top if start + room >= len(found) else named[-1][1] if named else -1
        digest = self.digest(self.top)
        return Extent(self.top, digest, self._floor, low, high, named)

    def missing(self, extent: Extent) -> Iterator[Entry]:
        """What is here and not there: what is new and what lasts in turn, then what fills
        holes, newest first."""
        given: dict[int, None] = {}
        new = (self._window[at] for at in sorted(self._window) if at > extent.top)
        lasting = (
            self._lasting[at] for at in sorted(self._lasting, reverse=True) if extent.lacks(at)
        )
        holes = (
            self._window[at]
            for at in sorted(self._window, reverse=True)
            if extent.floor < at <= extent.top and extent.lacks(at)
        )
        for entry in chain(_alternate(new, lasting), holes):
            if entry.seqno not in given:
                given[entry.seqno] = None
                yield entry

    def get(self, seqno: int) -> Statement | None:
        """What says how entry ``seqno`` is: the entry, or a head, or the one behind it."""
        own = self._window.get(seqno) or self._lasting.get(seqno) or self._heads.get(seqno)
        return own or self._window.get(seqno + 1) or self._lasting.get(seqno + 1)

    def digest(self, seqno: int) -> bytes:
        """Of entry ``seqno``, as far as anything here says; else empty."""
        said = self.get(seqno)
        return b"" if said is None else said.bound.get(seqno, b"")

    def has(self, statement: Statement) -> bool:
        """Whether it is here already: then its signature need not be looked at."""
        if isinstance(statement, SignedHead):
            return self.digest(statement.seqno) == statement.digest
        kept = self._window.get(statement.seqno) or self._lasting.get(statement.seqno)
        return kept is not None and kept.digest == statement.digest

    def contradicted_by(self, statement: Statement) -> Equivocation[Statement] | None:
        """The proof, if ``statement``, which is signed, is another story than what is here."""
        for seqno in statement.bound:
            said = self.get(seqno)
            if said is not None and conflict(said.bound, statement.bound) is not None:
                return Equivocation(said, statement)
        return None

    def add(self, statement: Statement) -> bool:
        """Take in what agrees; whether it is an entry that is news, and stays."""
        if isinstance(statement, SignedHead):
            if not self.digest(statement.seqno):
                self._heads[statement.seqno] = statement
            return False
        seqno = statement.seqno
        if seqno > self._floor and seqno not in self._window:
            self._window[seqno] = statement
            self._bytes += _size(statement)
            self.top = max(self.top, seqno)
        is_short = len(statement.body) <= MAX_LASTING_BODY
        if statement.kind in LASTING and is_short and seqno > self._lasting_floor:
            self._lasting[seqno] = statement
        self._heads.pop(seqno, None)
        self._trim()
        return seqno in self._window or seqno in self._lasting

    def _trim(self) -> None:
        """Let go of what is too much."""
        while self._bytes > self._budget and len(self._window) > 1:
            self._floor = min(self._window)
            self._bytes -= _size(self._window.pop(self._floor))
        while len(self._lasting) > MAX_LASTING:
            self._lasting_floor = min(self._lasting)
            del self._lasting[self._lasting_floor]


def _size(entry: Entry) -> int:
    return len(entry.body) + KI // 4


def _alternate(first: Iterator[Entry], second: Iterator[Entry]) -> Iterator[Entry]:
    """Of either in turn, until both are at their end."""
    for pair in zip_longest(first, second):
        yield from (entry for entry in pair if entry is not None)
