"""What a node keeps of one other author's log: a set of signed statements that agree.

Theory of operation
-------------------
Entries are signed one by one, so they need not come in order, nor all of them: a *shelf* is a
set, and two shelves of one author are merged by putting in what either lacks. It has a window,
the newest entries that fit `budget` bytes, and beside it the entries of `LASTING` kinds,
which must reach who comes later. Whatever comes is first held against what is there: a
statement that binds its author to another digest of some entry is a `LedgerFork`, and ends the
shelf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from p2p.bounded import BoundedDict
from p2p.ledger.core.chain import (
    Entry,
    LedgerFork,
    SignedHead,
    Statement,
    bound_by,
)
from p2p.wire import KI

LASTING: Final = ("ban", "lie")
"""Kinds of entries that are kept beyond the window: what they say holds for days."""
MAX_LASTING: Final = 256
"""Of one author: as many workers as it can have banned at a time. The newest are kept."""
MAX_LASTING_BODY: Final = 4 * KI
"""Bytes of an entry that is kept so long: each of the signed verdicts that a ban cites has
400."""
MAX_HEADS: Final = 64
"""Signed heads of one author that are kept beside its entries: those of five minutes. An entry
that comes is held against them, too."""
PRINT_BYTES: Final = 8
"""Of a digest over the lasting entries that a shelf has: two that differ are told apart, and a
collision, which costs 2**32 tries, only delays what its maker could also have kept back."""


class Shelf:
    """Of one author. ``budget`` is in bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.top = -1
        """The highest number of an entry that is here; -1 if there is none."""
        self._window: dict[int, Entry] = {}
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._lasting: dict[int, Entry] = {}
        self._heads: BoundedDict[int, SignedHead] = BoundedDict(MAX_HEADS)

    def __len__(self) -> int:
        return len(self._window.keys() | self._lasting.keys())

    @property
    def size(self) -> int:
        """Bytes of the window, about."""
        return self._bytes

    def __iter__(self) -> Iterator[Entry]:
        """All entries, in the order of their numbers."""
        whole = self._window | self._lasting
        return (whole[seqno] for seqno in sorted(whole))

    def fingerprint(self, top: int) -> bytes:
        """What lasting entries are here up to number ``top``, in short."""
        numbers = sorted(seqno for seqno in self._lasting if seqno <= top)
        digests = (self._lasting[seqno].digest for seqno in numbers)
        return hashlib.sha256(b"".join(digests)).digest()[:PRINT_BYTES]

    def lasting(self, top: int) -> Iterator[Entry]:
        """Entries of the kinds that are kept longer which one that has the log up to ``top``
        may lack, newest first: those that are not in the window behind it."""
        numbers = sorted(self._lasting, reverse=True)
        return (self._lasting[at] for at in numbers if at <= top or at not in self._window)

    def get(self, seqno: int) -> Statement | None:
        """What says how entry ``seqno`` is: the entry, or a head, or the one behind it."""
        own = self._window.get(seqno) or self._lasting.get(seqno) or self._heads.get(seqno)
        return own or self._window.get(seqno + 1) or self._lasting.get(seqno + 1)

    def digest(self, seqno: int) -> bytes:
        """Of entry ``seqno``, as far as anything here says; else empty."""
        said = self.get(seqno)
        return b"" if said is None else bound_by(said).get(seqno, b"")

    def since(self, seqno: int) -> Iterator[Entry]:
        """The entries of the window behind ``seqno``, oldest first."""
        return (self._window[at] for at in sorted(self._window) if at > seqno)

    def has(self, statement: Statement) -> bool:
        """Whether it is here already: then its signature need not be looked at."""
        if isinstance(statement, SignedHead):
            return self.digest(statement.seqno) == statement.digest
        kept = self._window.get(statement.seqno) or self._lasting.get(statement.seqno)
        return kept is not None and kept.digest == statement.digest

    def contradicted_by(self, statement: Statement) -> LedgerFork | None:
        """The proof, if ``statement``, which is signed, is another story than what is here."""
        for seqno, digest in bound_by(statement).items():
            said = self.get(seqno)
            if said is not None and bound_by(said).get(seqno, digest) != digest:
                return LedgerFork(said, statement)
        return None

    def add(self, statement: Statement) -> bool:
        """Take in what agrees; whether it is an entry that is news, and stays."""
        if isinstance(statement, SignedHead):
            if not self.digest(statement.seqno):
                self._heads[statement.seqno] = statement
            return False
        seqno, size = statement.seqno, len(statement.body) + KI // 4
        is_lasting = statement.kind in LASTING and len(statement.body) <= MAX_LASTING_BODY
        if is_lasting:
            self._lasting[seqno] = statement
            if len(self._lasting) > MAX_LASTING:
                del self._lasting[min(self._lasting)]
        self._window[seqno], self._sizes[seqno] = statement, size
        self._bytes += size
        self.top = max(self.top, seqno)
        self._heads.pop(seqno, None)
        while self._bytes > self.budget and len(self._window) > 1:
            oldest = min(self._window)
            del self._window[oldest]
            self._bytes -= self._sizes.pop(oldest)
        return seqno in self._window or seqno in self._lasting
