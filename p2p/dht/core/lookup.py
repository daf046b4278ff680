"""Finding the nodes nearest to a target: S/Kademlia's disjoint paths, as a state machine without time.

Theory of operation
-------------------
A lookup keeps, per path, the contacts that path has heard of, nearest first. A path has up to ``alpha``
questions open; whenever one is settled it asks the nearest contact not yet asked: there are no rounds,
so nobody waits for the slowest of a batch. A contact is asked once in the whole lookup, by the path that
claims it, and its answer feeds that path only. A liar can thus lead one path astray, not all of them.

A path looks at the ``width`` nearest contacts that are not known to be dead. It is done when all of them
have been asked and have answered, or, looking for values, when enough of those it asked had some.
A contact that is late gives its slot away at once; later still it no longer holds up the end. Its
answer counts whenever it comes.

A peer never met is asked on the word of those who named it. Each of them has a small credit, which grows
with every contact of theirs that answers and is used up by every one that does not: a liar who names
twenty strangers' addresses makes us dial four of them, an honest peer among whose contacts a third is
dead is hardly held up. Some peers are not believed at all (`neighbours` has them: visitors). What
is beyond a credit waits, and is passed over like the dead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from p2p.dht.messages import Contact
from p2p.identity import PeerId

MAX_ASKED: Final = 120
"""Contacts that one lookup asks. An honest one at 10,000 nodes asks 20 to 50; liars that name ever
nearer contacts are cut off here."""
MAX_HEARD: Final = 1000
"""Contacts that one lookup remembers: twenty from each of fifty answers."""
CREDIT: Final = 4
"""Contacts never met that one peer may name, and that we ask, before one of them has answered."""
MAX_NAMED_BY: Final = 4
"""Peers remembered as having named one contact: with half of them liars, one contact in 16 is held up."""


class State(Enum):
    """What has become of one contact."""

    NEW = auto()
    ASKED = auto()
    LATE = auto()
    """Asked, and its slot given to another; the end still waits for it."""
    LOST = auto()
    """Asked, and no longer waited for."""
    ANSWERED = auto()
    FAILED = auto()


_OPEN: Final = (State.NEW, State.ASKED, State.LATE)
_GONE: Final = (State.LOST, State.FAILED)
_UNLIKELY: Final = (State.LATE, *_GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupShape:
    """How hard a lookup tries."""

    alpha: int
    """Questions open at a time, per path."""
    paths: int
    """Disjoint paths."""
    width: int
    """How many of the nearest contacts must have answered at the end."""
    quorum: int = 0
    """Answers with values that end a path early; 0 if none does."""


class _Path:
    """What one path has heard. Contacts are named by their distance to the target, which is unique."""

    __slots__ = ("found", "heard", "in_flight", "known")

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.known: dict[int, None] = {}
        self.in_flight = 0
        self.found = 0

    def hear(self, distance: int) -> None:
        """Note a contact once."""
        if distance not in self.known:
            self.known[distance] = None
            insort(self.heard, distance)


class Lookup:
    """One lookup. `ask` says whom to ask now; `answered`, `late`, `lost` and `failed` report on them."""

    def __init__(
        self,
        target: bytes,
        seeds: Sequence[Contact],
        shape: LookupShape,
        is_met: Callable[[PeerId], bool] = lambda _: False,
        is_believed: Callable[[PeerId], bool] = lambda _: True,
    ) -> None:
        self.target = target
        self._number = int.from_bytes(target, "big")
        self._shape = shape
        self._is_met = is_met
        self._is_believed = is_believed
        self._contacts: dict[int, Contact] = {}
        self._states: dict[int, State] = {}
        self._owner: dict[int, _Path] = {}
        self._paths = [_Path() for _ in range(shape.paths)]
        self._asked = 0
        self._named_by: dict[int, list[PeerId]] = {}
        """Who has named a contact that we have never met."""
        self._asked_for: dict[int, PeerId] = {}
        """On whose credit such a contact was asked."""
        self._credit: dict[PeerId, int] = {}
        self.offer(sorted(seeds, key=lambda contact: contact.number ^ self._number))

    def _hear(self, path: _Path, contacts: Iterable[Contact], source: PeerId | None) -> None:
        for contact in contacts:
            distance = contact.number ^ self._number
            if distance not in self._states:
                if len(self._states) >= MAX_HEARD:
                    return
                self._states[distance] = State.NEW
                self._contacts[distance] = contact
                if source is not None and not self._is_met(contact.peer):
                    self._named_by[distance] = []
                    self._second(distance, source)
            elif distance in self._named_by:
                self._second(distance, source)
            path.hear(distance)

    def _second(self, distance: int, source: PeerId | None) -> None:
        """Who has named a contact, not met yet, when it is named (again)."""
        sources = self._named_by[distance]
        if source is None:
            del self._named_by[distance]
        elif len(sources) < MAX_NAMED_BY and source not in sources and self._is_believed(source):
            sources.append(source)

    def offer(self, contacts: Sequence[Contact], source: PeerId | None = None) -> None:
        """More places to start from: of our own knowledge, or named by ``source``."""
        for index, contact in enumerate(contacts):
            self._hear(self._paths[index % len(self._paths)], (contact,), source)

    def _backer(self, distance: int) -> PeerId | None:
        """One of those who named a contact and have credit left."""
        named_by = self._named_by[distance]
        return next((source for source in named_by if self._credit.get(source, CREDIT) > 0), None)

    def _is_held(self, distance: int) -> bool:
        """Whether a contact must not be asked now, since all who named it have used up their credit."""
        if distance not in self._named_by or self._states[distance] is not State.NEW:
            return False
        return self._backer(distance) is None

    def _nearest(self, path: _Path, passed_over: tuple[State, ...]) -> Iterator[int]:
        """The ``width`` nearest contacts of a path, less those held up or in a state of ``passed_over``."""
        states, held = self._states, self._is_held
        alive = (
            distance for distance in path.heard if states[distance] not in passed_over and not held(distance)
        )
        return islice(alive, self._shape.width)

    def _is_done(self, path: _Path) -> bool:
        if self._is_found(path):
            return True
        if self._asked >= MAX_ASKED:
            return path.in_flight == 0
        return not any(self._states[distance] in _OPEN for distance in self._nearest(path, _GONE))

    def _is_found(self, path: _Path) -> bool:
        """Enough holders on this path; or one, if the others, who claim them first, have found the rest."""
        quorum = self._shape.quorum
        if not quorum or not path.found:
            return False
        return path.found >= quorum or sum(each.found for each in self._paths) >= quorum * len(self._paths)

    @property
    def found_everywhere(self) -> bool:
        """Whether every path has found values somewhere."""
        return all(path.found for path in self._paths)

    @property
    def done(self) -> bool:
        """Whether no path has anything left to ask or to wait for."""
        return all(self._is_done(path) for path in self._paths)

    def ask(self) -> list[Contact]:
        """Claim the contacts to ask now, each for one path, the paths taking turns."""
        claimed: list[Contact] = []
        turns = [path for path in self._paths if not self._is_done(path)]
        while turns:
            turns = [path for path in turns if self._claim(path, claimed)]
        return claimed

    def _claim(self, path: _Path, claimed: list[Contact]) -> bool:
        if path.in_flight >= self._shape.alpha or self._asked >= MAX_ASKED:
            return False
        for distance in self._nearest(path, _UNLIKELY):
            if self._states[distance] is State.NEW:
                self._states[distance] = State.ASKED
                self._owner[distance] = path
                path.in_flight += 1
                self._asked += 1
                if distance in self._named_by:
                    self._take_credit(distance)
                claimed.append(self._contacts[distance])
                return True
        return False

    def _take_credit(self, distance: int) -> None:
        backer = self._backer(distance)
        assert backer is not None  # else it would be held
        self._asked_for[distance] = backer
        self._credit[backer] = self._credit.get(backer, CREDIT) - 1

    def _settle(self, contact: Contact, state: State) -> _Path | None:
        """Move an asked contact on; return its path, or None if it is not waited for any more."""
        distance = contact.number ^ self._number
        was = self._states.get(distance, State.NEW)
        if was in (State.NEW, State.ANSWERED, State.FAILED):
            return None
        path = self._owner[distance]
        if was is State.ASKED:
            path.in_flight -= 1
        self._states[distance] = state
        return path

    def answered(self, contact: Contact, closer: Iterable[Contact], *, found: bool = False) -> None:
        """``contact`` named ``closer``; ``found`` if it had values, too."""
        path = self._settle(contact, State.ANSWERED)
        if path is not None:
            path.found += found
            backer = self._asked_for.pop(contact.number ^ self._number, None)
            if backer is not None:
                self._credit[backer] += 2  # what it had cost, and one for the good word
            self._hear(path, closer, contact.peer)

    def late(self, contact: Contact) -> None:
        """``contact`` has not answered in the usual time: ask somebody else as well."""
        self._settle(contact, State.LATE)

    def lost(self, contact: Contact) -> None:
        """``contact`` has not answered for so long that the end need not wait for it."""
        self._settle(contact, State.LOST)

    def failed(self, contact: Contact) -> None:
        """``contact`` is dead, or a liar."""
        self._settle(contact, State.FAILED)

    def closest(self, count: int) -> list[Contact]:
        """The nearest contacts that have answered, nearest first."""
        answered = (distance for distance, state in self._states.items() if state is State.ANSWERED)
        return [self._contacts[distance] for distance in sorted(answered)[:count]]
