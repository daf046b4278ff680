"""Exchange of logs: the kept logs, questions, answers, and proofs of equivocation.

Theory of operation
-------------------
The run says whose statements matter: its trainers and validators. A node *follows* those, each
with a `Shelf`, and forgets whom the run names no more; of a stranger's log nothing is kept.
Every few seconds it asks one of its peers what that has beyond its own shelves, and is asked:
in a swarm of n nodes news is everywhere after about log n rounds, each of which costs a node
one question.

An author that equivocates is found by the first node that holds a part of both logs, wherever
they meet: in an answer, or in the signed head that each heartbeat carries. From then on the
proof is all that is kept of it: nothing that it states counts, nor has counted
(`Exchange.statements`). A proof needs no trust in who hands it over.

Entries are signed one by one, so they need not come in order, nor all of them: a *shelf* is a
set, and two shelves of one author are merged by putting in what either lacks. It has a window,
the newest entries that fit `budget` bytes, and beside it the *lasting* entries, which report
bans and lies and must reach who comes later. What falls out of either depends on what was put
in and not on the order in which it came, so that nodes which have heard the same keep the same.
An `Extent` says what is here, holes included, in so few bytes that another node can hand over
just what is missing (`Shelf.missing`).

Whatever comes is first held against what is there: a statement that binds its author to another
digest of some entry is an `Equivocation`, and ends the shelf.

A question says, for each author that its node follows, which entries of that log it has
(`Extent`), and whose forks it knows. The answer is what the other has beyond that: statements,
proofs of forks, and whether the one who asked has more. Both are one frame.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

from p2p.bounded import BoundedDict
from p2p.equivocation import Equivocation, conflict
from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, Verify, decode_peer_id_untrusted
from p2p.ledger.core.chain import (
    DIGEST_BYTES,
    DOMAIN,
    Entry,
    SignedHead,
    Statement,
    decode_fork_untrusted,
    decode_statement_untrusted,
)
from p2p.wire import KI, MIB, fields_untrusted, pack, unpack_untrusted

Span = tuple[int, int]
"""First and last of consecutive numbers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Describes which entries of an author's log a node has, and which it no longer wants."""

    top: int = -1
    """Highest number of an entry; -1 if there is none."""
    digest: bytes = b""
    """Digest of entry ``top``."""
    floor: int = -1
    """Number up to which only lasting entries are wanted."""
    low: int = 0
    high: int = -1
    """End of the range from ``low`` that ``spans`` describes. About other numbers up to ``top``
    nothing is known."""
    spans: tuple[Span, ...] = ()

    def lacks(self, seqno: int) -> bool:
        """Return True if entry ``seqno`` is known to be missing."""
        if seqno > self.top:
            return True
        if not self.low <= seqno <= self.high:
            return False
        at = bisect_right(self.spans, (seqno, math.inf)) - 1
        return at < 0 or self.spans[at][1] < seqno


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """Join ascending ``numbers`` into spans of consecutive ones."""
    found: list[Span] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


class Shelf:
    """Kept log of one author, with a ``budget`` in bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        """Maximum bytes of the window."""
        self.top = -1
        """Highest number of an entry held here; -1 if there is none."""
        self._floor = -1
        """Highest number dropped from the window. Entries up to it are not added again."""
        self._window: dict[int, Entry] = {}
        self.size = 0
        """Approximate bytes of the window."""
        self._lasting: dict[int, Entry] = {}
        self._lasting_floor = -1
        # Signed heads of one author that are kept beside its entries: those of five minutes. An
        # entry that comes is held against them, too.
        self._heads: BoundedDict[int, SignedHead] = BoundedDict(64)
        self._described = 0
        """Number of spans that earlier questions have described, when one question cannot hold
        all."""

    def __len__(self) -> int:
        return len(self._window.keys() | self._lasting.keys())

    def resize(self, budget: int) -> None:
        """Change the maximum bytes of the window."""
        if budget > self._budget:
            self._floor = -1
        self._budget = budget
        self._trim()

    def __iter__(self) -> Iterator[Entry]:
        whole = self._window | self._lasting
        return (whole[seqno] for seqno in sorted(whole))

    def extent(self, room: int) -> Extent:
        """Describe the held entries in at most ``room`` spans. Later calls describe the
        rest."""
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

    def differs(self, extent: Extent) -> bool:
        """Return True if a statement here contradicts the requester's newest one."""
        return extent.top >= 0 and self.digest(extent.top) not in (b"", extent.digest)

    def missing(self, extent: Extent) -> Iterator[Statement]:
        """Yield the entries that the responder has and the requester lacks, after a statement
        that contradicts the requester's newest one. New and lasting entries alternate; then
        come holes, newest first."""
        if self.differs(extent) and (other := self.get(extent.top)) is not None:
            yield other
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
        for entry in chain(chain.from_iterable(zip_longest(new, lasting)), holes):
            if entry is not None and entry.seqno not in given:
                given[entry.seqno] = None
                yield entry

    def get(self, seqno: int) -> Statement | None:
        """Return a statement that attests entry ``seqno``, or None. This may be the entry, a
        head, or the next entry."""
        own = self._window.get(seqno) or self._lasting.get(seqno) or self._heads.get(seqno)
        return own or self._window.get(seqno + 1) or self._lasting.get(seqno + 1)

    def digest(self, seqno: int) -> bytes:
        """Return the digest of entry ``seqno`` if a statement here attests it; else empty
        bytes."""
        said = self.get(seqno)
        return b"" if said is None else said.bound.get(seqno, b"")

    def has(self, statement: Statement) -> bool:
        """Return True if the statement is held already, so that its signature need not be
        checked."""
        if isinstance(statement, SignedHead):
            return self.digest(statement.seqno) == statement.digest
        kept = self._window.get(statement.seqno) or self._lasting.get(statement.seqno)
        return kept is not None and kept.digest == statement.digest

    def contradicted_by(self, statement: Statement) -> Equivocation[Statement] | None:
        """Return a proof of equivocation if a signed ``statement`` contradicts one held here;
        else None."""
        for seqno in statement.bound:
            said = self.get(seqno)
            if said is not None and conflict(said.bound, statement.bound) is not None:
                return Equivocation(said, statement)
        return None

    def add(self, statement: Statement) -> bool:
        """Add a statement that contradicts none. Return True if it is an entry that is held
        now."""
        if isinstance(statement, SignedHead):
            if not self.digest(statement.seqno):
                self._heads[statement.seqno] = statement
            return False
        seqno = statement.seqno
        if seqno > self._floor and seqno not in self._window:
            self._window[seqno] = statement
            self.size += _size(statement)
            self.top = max(self.top, seqno)
        # Bytes of an entry that is kept so long; a trainer's have under 100.
        is_short = len(statement.body) <= 4 * KI
        if statement.kind in ("ban", "lie") and is_short and seqno > self._lasting_floor:
            self._lasting[seqno] = statement
        self._heads.pop(seqno, None)
        self._trim()
        return seqno in self._window or seqno in self._lasting

    def _trim(self) -> None:
        """Drop the entries beyond the author's limits."""
        while self.size > self._budget and len(self._window) > 1:
            self._floor = min(self._window)
            self.size -= _size(self._window.pop(self._floor))
        # As many of the newest as a trainer's proofs of bans.
        while len(self._lasting) > 256:
            self._lasting_floor = min(self._lasting)
            del self._lasting[self._lasting_floor]


def _size(entry: Entry) -> int:
    return len(entry.body) + KI // 4


LEDGER_PROTOCOL: Final = ProtocolId(DOMAIN)
MAX_AUTHORS: Final = 256
"""Maximum number of authors that a node follows: the first that its run names, trainers before
validators. Each costs 90 bytes of every question."""
MAX_SPANS: Final = 1024
"""Maximum number of spans in a question: one for an author without holes, and one for each
older ban."""
MAX_QUESTION: Final = 64 * KI
"""Maximum bytes of a question: `MAX_AUTHORS` rows of at most 125, as many known equivocations
of 36, and `MAX_SPANS` of at most 18."""
MAX_STATEMENTS: Final = 512
"""Maximum number of statements in one answer. A verdict has some 600 bytes."""
ANSWER_BYTES: Final = 256 * KI
"""Maximum bytes of statements and proofs in an answer, which the last of them may exceed. At 10
s between questions, a node that was away catches up at 25 KB/s."""
MAX_ANSWER: Final = ANSWER_BYTES + 256 * KI
"""Maximum bytes of an answer that is read: two of the longest proofs beyond `ANSWER_BYTES`."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for the entries beyond those that the requester has."""

    extents: Mapping[PeerId, Extent]
    forked: Sequence[PeerId] = ()
    """Authors whose equivocation the requester can prove."""

    def to_bytes(self) -> bytes:
        """Return the question as sent."""
        rows = []
        for author, one in self.extents.items():
            ends = [*chain(*one.spans)]
            rows.append(
                [author.digest, one.top, one.digest, one.floor, one.low, one.high, ends]
            )
        return pack([rows, [peer.digest for peer in self.forked]])


@dataclass(frozen=True, slots=True)
class Answer:
    """Entries that the responder has and the requester lacks."""

    statements: Sequence[Statement] = ()
    forks: Sequence[Equivocation[Statement]] = ()
    is_behind: bool = False
    """True if the requester has something that the responder lacks."""

    def to_bytes(self) -> bytes:
        """Return the answer as sent."""
        said = [statement.encode() for statement in self.statements]
        return pack([said, [fork.encode() for fork in self.forks], self.is_behind])


def decode_question_untrusted(data: bytes) -> Question:
    """Decode a question.

    Raises:
        BadMessage: The bytes are not a question. Nothing else is raised, whatever the bytes.
    """
    most = 10 * MAX_AUTHORS + 2 * MAX_SPANS + 4
    value = unpack_untrusted(data, max_items=most, max_list=2 * MAX_SPANS)
    rows, forked = fields_untrusted(value, list, list, what="question about ledgers")
    if len(rows) > MAX_AUTHORS or len(forked) > MAX_AUTHORS:
        raise BadMessage(f"a question is about {MAX_AUTHORS} ledgers at most")
    extents = dict(map(_row_untrusted, rows))
    return Question(extents, [decode_peer_id_untrusted(peer) for peer in forked])


def _row_untrusted(row: object) -> tuple[PeerId, Extent]:
    author, top, digest, floor, low, high, ends = fields_untrusted(
        row, *(bytes, int, bytes), *(int, int, int), list, what="extent of a ledger"
    )
    if len(digest) not in (0, DIGEST_BYTES):
        raise BadMessage("the extent of a ledger has a digest of the wrong size")
    if not all(-1 <= number < 2**63 for number in (top, floor, low, high)):
        raise BadMessage("the extent of a ledger has a number that is out of range")
    spans = _spans_untrusted(ends)
    extent = Extent(top, digest, floor, low, high, spans)
    return decode_peer_id_untrusted(author), extent


def _spans_untrusted(ends: list[object]) -> tuple[Span, ...]:
    """Decode spans, which must be in ascending order so that they can be searched."""
    numbers = fields_untrusted(ends, *[int] * len(ends), what="row of entries")
    spans = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    before = -1
    for first, last in spans:
        if not before < first <= last < 2**63:
            raise BadMessage("the extent of a ledger names entries twice, or out of order")
        before = last
    if len(numbers) % 2:
        raise BadMessage("the extent of a ledger names entries by a first and a last")
    return spans


def decode_answer_untrusted(data: bytes) -> Answer:
    """Decode an answer without checking signatures.

    Raises:
        BadMessage: The bytes are not an answer. Nothing else is raised, whatever the bytes.
    """
    most = MAX_STATEMENTS + MAX_AUTHORS
    value = unpack_untrusted(data, max_items=most + 8, max_list=MAX_STATEMENTS)
    said, forks, is_behind = fields_untrusted(
        value, list, list, bool, what="answer about ledgers"
    )
    if not all(isinstance(item, bytes) for item in (*said, *forks)):
        raise BadMessage("an answer about ledgers carries statements as bytes")
    return Answer(
        [decode_statement_untrusted(item) for item in said],
        [decode_fork_untrusted(item) for item in forks],
        is_behind,
    )


_NONE: Final = Shelf(0)
LEAST: Final = 64 * KI
"""Minimum budget in bytes for an author, used when the run names many: the largest entry."""

News = Entry | Equivocation[Statement]
"""Result of a merge: a new entry, or a proof of equivocation."""


class Exchange:
    """Logs of the run's trainers and validators, as far as this node has them."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._shelves: dict[PeerId, Shelf] = {}
        self._questions = 0
        self._answers = 0
        self.forks: dict[PeerId, Equivocation[Statement]] = {}
        """Maps each author that equivocated to the proof."""

    def follow(self, authors: Iterable[PeerId]) -> None:
        """Keep the logs of these authors from now on, and of no others."""
        wanted: dict[PeerId, None] = {}
        for author in authors:
            if len(wanted) == MAX_AUTHORS:
                break
            wanted[author] = None
        # 16 MiB for all authors together, in memory and, twice, on disk: 20,000 verdicts.
        budget = max(LEAST, min(2 * MIB, 16 * MIB // max(1, len(wanted))))
        self.forks = {peer: self.forks[peer] for peer in wanted if peer in self.forks}
        before = self._shelves
        self._shelves = {peer: before.get(peer, Shelf(budget)) for peer in wanted}
        for shelf in self._shelves.values():
            shelf.resize(budget)

    @property
    def authors(self) -> list[PeerId]:
        """Authors whose logs are kept."""
        return list(self._shelves)

    def top(self, author: PeerId) -> int:
        """Return the number of the newest entry of ``author`` held here; -1 if there is
        none."""
        return self._shelves.get(author, _NONE).top

    def size(self, author: PeerId) -> int:
        """Return the approximate bytes kept of an author."""
        return self._shelves.get(author, _NONE).size

    def statements(self, author: PeerId) -> Iterator[Entry]:
        """Iterate over the entries of an author by number; empty if it equivocated."""
        shelf = self._shelves.get(author)
        return iter(()) if shelf is None or author in self.forks else iter(shelf)

    def take_untrusted(self, statement: Statement) -> News | None:
        """Add a statement and return it if it is a new entry, or the proof if it shows an
        equivocation; else None. Statements of authors that are not followed are ignored, since
        another version of the run file may name them.

        Raises:
            BadMessage: The statement is not signed by its author.
        """
        shelf = self._shelves.get(statement.author)
        if shelf is None or statement.author in self.forks or shelf.has(statement):
            return None
        if not statement.is_signed(self._verify):
            raise BadMessage("a statement for a ledger bears a wrong signature")
        fork = shelf.contradicted_by(statement)
        if fork is not None:
            return self._convict(fork)
        is_news = shelf.add(statement)
        return statement if is_news and isinstance(statement, Entry) else None

    def take_fork_untrusted(
        self, fork: Equivocation[Statement]
    ) -> Equivocation[Statement] | None:
        """Add a proof of equivocation and return it; None if it is known, or its author is not
        followed.

        Raises:
            BadMessage: A signature in the proof is wrong.
        """
        if fork.author in self.forks:
            return None
        if not all(one.is_signed(self._verify) for one in (fork.first, fork.second)):
            raise BadMessage("a proof of two ledgers bears a wrong signature")
        return self._convict(fork) if fork.author in self._shelves else None

    def _convict(self, fork: Equivocation[Statement]) -> Equivocation[Statement]:
        self.forks[fork.author] = fork
        self._shelves[fork.author] = Shelf(LEAST)
        return fork

    def question(self) -> Question:
        """Return a question about all authors. The author that comes first changes with each
        question, so that each gets room for its spans."""
        extents, left = {}, MAX_SPANS
        self._questions += 1
        for author in self._in_turn(self._questions):
            extents[author] = self._shelves[author].extent(left)
            left -= len(extents[author].spans)
        return Question(extents, list(self.forks))

    def answer(self, question: Question) -> Answer:
        """Return the entries that the requester lacks, within the size of an answer. Each
        author has a share, and the first author changes from one answer to the next."""
        known = dict.fromkeys(question.forked)
        forks = [fork for who, fork in self.forks.items() if who not in known]
        is_behind = any(who in self._shelves and who not in self.forks for who in known)
        said: list[Statement] = []
        left = ANSWER_BYTES - sum(len(fork.encode()) for fork in forks[:1])
        self._answers += 1
        asked = [one for one in self._in_turn(self._answers) if one in question.extents]
        for place, author in enumerate(asked):
            extent, shelf = question.extents[author], self._shelves[author]
            # The requester has something of an author that is not here.
            is_behind = is_behind or extent.top > shelf.top or shelf.differs(extent)
            parts = len(asked) - place
            room, most = left // parts, len(said) + (MAX_STATEMENTS - len(said)) // parts
            for statement in shelf.missing(extent):
                if room <= 0 or len(said) >= most:
                    break
                size = len(statement.encode())
                said.append(statement)
                room, left = room - size, left - size
        return Answer(said, forks[:1], is_behind)

    def _in_turn(self, turn: int) -> list[PeerId]:
        authors = [one for one in self._shelves if one not in self.forks]
        first = turn % max(1, len(authors))
        return authors[first:] + authors[:first]
