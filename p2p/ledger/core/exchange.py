"""Which authors' logs a node keeps, what it asks for and answers, and who has told two stories.

Theory of operation
-------------------
The run says whose statements matter: its trainers and validators. A node *follows* those, each
with a `Shelf`, and forgets whom the run names no more; of a stranger's log nothing is kept.
Every few seconds it asks one of its peers what that has beyond its own shelves, and is asked
(`p2p.ledger.messages`): in a swarm of n nodes news is everywhere after about log n rounds, each
of which costs a node one question.

An author that tells two stories is found by the first node that holds a part of both, wherever
they meet: in an answer, or in the signed head that each heartbeat carries. From then on the
proof is all that is kept of it: nothing that it states counts, nor has counted
(`Exchange.statements`). A proof needs no trust in who hands it over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import Entry, SignedHead, Statement
from p2p.ledger.core.shelf import Extent, Shelf
from p2p.ledger.messages import (
    ANSWER_BYTES,
    MAX_AUTHORS,
    MAX_SPANS,
    MAX_STATEMENTS,
    Answer,
    Question,
)
from p2p.wire import KI, MIB

TOTAL: Final = 16 * MIB
"""Bytes of entries that are kept of all authors together, in memory and, twice, on the disk:
20,000 verdicts."""
MOST: Final = 2 * MIB
"""Of one author, where the run names few."""
LEAST: Final = 64 * KI
"""Of one author, where it names very many: the largest entry there can be, just."""

News = Entry | Equivocation[Statement]
"""What a merge brings: an entry that was not here, or the proof that an author lies."""


class Exchange:
    """What one node knows of the logs of those that its run names."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._shelves: dict[PeerId, Shelf] = {}
        self._questions = 0
        self._answers = 0
        self.forks: dict[PeerId, Equivocation[Statement]] = {}
        """Who has told two stories, and the proof."""

    def follow(self, authors: Iterable[PeerId]) -> None:
        """Keep the logs of these from now on, and of no others."""
        wanted: dict[PeerId, None] = {}
        for author in authors:
            if len(wanted) == MAX_AUTHORS:
                break
            wanted[author] = None
        budget = max(LEAST, min(MOST, TOTAL // max(1, len(wanted))))
        self.forks = {peer: self.forks[peer] for peer in wanted if peer in self.forks}
        before = self._shelves
        self._shelves = {
            peer: before[peer] if peer in before else Shelf(budget) for peer in wanted
        }
        for shelf in self._shelves.values():
            shelf.budget = budget

    @property
    def authors(self) -> list[PeerId]:
        """Whose logs are kept."""
        return list(self._shelves)

    def top(self, author: PeerId) -> int:
        """The number of the newest entry of ``author`` that is here; -1 if there is none."""
        shelf = self._shelves.get(author)
        return -1 if shelf is None else shelf.top

    def size(self, author: PeerId) -> int:
        """Bytes of what is kept of ``author``."""
        shelf = self._shelves.get(author)
        return 0 if shelf is None else shelf.size

    def statements(self, author: PeerId) -> Iterator[Entry]:
        """The entries of ``author``, by number; none of one that has told two stories."""
        shelf = self._shelves.get(author)
        return iter(()) if shelf is None or author in self.forks else iter(shelf)

    def take_untrusted(self, statement: Statement) -> News | None:
        """Put it in; what is news of it. Raise `BadMessage` if its author did not sign it.

        A statement of one that is not followed is no one's fault: editions name others.
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
        """Take up a proof; None if it is no news here. Raise `BadMessage` if it proves
        nothing."""
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
        """What is here of each author. Those that have no room for it come first in a later
        question."""
        extents, left = {}, MAX_SPANS
        self._questions += 1
        for author in self._in_turn(self._questions):
            extents[author] = self._shelves[author].extent(left)
            left -= len(extents[author].spans)
        return Question(extents, list(self.forks))

    def answer(self, question: Question) -> Answer:
        """What is here and not there, as far as an answer has room. Each author has a part of
        it; who comes first changes from one answer to the next."""
        known = dict.fromkeys(question.forked)
        forks = [fork for who, fork in self.forks.items() if who not in known]
        is_behind = any(who in self._shelves and who not in self.forks for who in known)
        said: list[Statement] = []
        left = ANSWER_BYTES - sum(len(fork.encode()) for fork in forks[:1])
        self._answers += 1
        asked = [one for one in self._in_turn(self._answers) if one in question.extents]
        for place, author in enumerate(asked):
            extent, shelf = question.extents[author], self._shelves[author]
            is_behind = is_behind or self._lacks(shelf, extent)
            parts = len(asked) - place
            room, most = left // parts, len(said) + (MAX_STATEMENTS - len(said)) // parts
            for statement in self._beyond(shelf, extent):
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

    def _lacks(self, shelf: Shelf, extent: Extent) -> bool:
        """Whether the one who asks has something of an author that is not here."""
        return extent.top > shelf.top or (
            extent.top >= 0 and shelf.digest(extent.top) not in (b"", extent.digest)
        )

    def _beyond(self, shelf: Shelf, extent: Extent) -> Iterator[Statement]:
        """What the one who asks lacks of one author: another story first."""
        other = shelf.get(extent.top) if extent.top >= 0 else None
        if other is not None and shelf.digest(extent.top) != extent.digest:
            yield other
        yield from shelf.missing(extent)

    def hears_head(self, head: SignedHead) -> tuple[Equivocation[Statement] | None, bool]:
        """The proof, if a heartbeat's head is another story than what is here; and whether it
        is ahead of what is here. Raise `BadMessage` if it is not signed."""
        news = self.take_untrusted(head)
        is_ahead = head.author in self._shelves and head.seqno > self.top(head.author)
        return (news if isinstance(news, Equivocation) else None), is_ahead
