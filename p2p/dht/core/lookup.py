"""`Lookup`: finds the nodes nearest to a target by S/Kademlia's disjoint paths, without time.

Theory of operation
-------------------
A lookup keeps a *shortlist* per path: the contacts that path was told of, nearest first. A path
has up to ``alpha`` requests open; when one is settled it asks the nearest contact not yet
asked. There are no rounds, so a path never waits for the slowest of a batch. A contact is asked
once in the whole lookup, by the path that claims it, and its reply feeds that path only. A liar
can thus lead one path astray, not all of them.

A path looks at the ``width`` nearest contacts that are not known to be dead. It is done when
all of them have been asked and have answered, or, looking for values, when enough of the
``holders`` nearest had some. Values from farther away are taken but end nothing: a peer that
stores its own records on every node would otherwise end the lookups of others before they come
to the nodes that hold everything. A contact that is late gives its slot away at once; later
still it no longer holds up the end. Its reply counts whenever it comes.

Dialling on a third party's word
---------------------------------
A contact never met (`is_met`) is asked on the credit of the peers that named it. Each of them
has a small credit in this lookup (`CREDIT`). Asking one of its contacts takes 1; if that
contact answers, 2 come back. A liar that names twenty strangers' addresses makes us dial four
of them. An honest peer a third of whose contacts is dead is hardly held up: after three were
asked its credit is 4 - 3 + 2 x 2 = 5. Some peers are not believed at all
(`is_believed`: inbound ones, see `neighbours`). A contact beyond all credit waits, and is
passed over like the dead.
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
"""Maximum number of contacts that one lookup asks. An honest lookup at 10,000 nodes asks 20 to
50; the limit cuts off liars that name ever nearer contacts."""
CREDIT: Final = 4
"""Number of unknown contacts that are asked because one peer named them, before one of them has
answered."""


class ContactState(Enum):
    """State of one contact in a lookup."""

    NEW = auto()
    ASKED = auto()
    LATE = auto()
    """The contact was asked, and its slot given to another; the lookup still waits for it at
    the end."""
    LOST = auto()
    """The contact was asked, but the lookup no longer waits for it."""
    ANSWERED = auto()
    FAILED = auto()


_GONE: Final = (ContactState.LOST, ContactState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupShape:
    """Parameters that determine the effort of a lookup."""

    alpha: int
    """Number of open requests per path."""
    paths: int
    """Number of disjoint paths."""
    width: int
    """Number of nearest contacts that must have answered at the end."""
    quorum: int = 0
    """Number of replies with values that end a path early; 0 if none does."""
    holders: int = 0
    """Number of nearest contacts among which such replies count."""


class _Path:
    """One disjoint path. Contacts are identified by their distance to the target, which is
    unique."""

    __slots__ = ("_listed", "found", "in_flight", "shortlist")

    def __init__(self) -> None:
        self.shortlist: list[int] = []
        """Distances of the contacts, nearest first."""
        self.in_flight = 0
        """Number of open requests."""
        self.found: set[int] = set()
        """Distances of contacts that had values."""
        self._listed: dict[int, None] = {}

    def add(self, distance: int) -> None:
        """Add a contact to the shortlist unless it is there."""
        if distance not in self._listed:
            self._listed[distance] = None
            insort(self.shortlist, distance)


class Lookup:
    """State of a lookup. `ask` returns the contacts to ask now; `answered` and `settle` report
    what became of them."""

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
        self._states: dict[int, ContactState] = {}
        self._owner: dict[int, _Path] = {}
        self._paths = [_Path() for _ in range(shape.paths)]
        self._asked = 0
        self._named_by: dict[int, list[PeerId]] = {}
        """Maps the distance of each unknown contact to the peers that named it."""
        self._asked_for: dict[int, PeerId] = {}
        """Maps the distance of each unknown contact that was asked to the peer whose credit was
        used."""
        self._credit: dict[PeerId, int] = {}
        self.offer(sorted(seeds, key=lambda contact: contact.number ^ self._number))

    def _add(self, path: _Path, contacts: Iterable[Contact], source: PeerId | None) -> None:
        for contact in contacts:
            distance = contact.number ^ self._number
            if distance not in self._states:
                # Contacts that one lookup remembers: twenty from each of fifty replies, as many
                # as an honest lookup hears. Liars that name more are forgotten from the far
                # end.
                if len(self._states) >= 1000:
                    return
                self._states[distance] = ContactState.NEW
                self._contacts[distance] = contact
                if source is not None and not self._is_met(contact.peer):
                    self._named_by[distance] = []
            path.add(distance)
            sources = self._named_by.get(distance)
            if sources is None:
                continue
            if source is None:
                del self._named_by[distance]  # it is known: our own table has it
            # Peers remembered as having named one contact: with half of them liars, one contact
            # in 16 is held up.
            elif len(sources) < 4 and source not in sources and self._is_believed(source):
                sources.append(source)

    def offer(self, contacts: Sequence[Contact], source: PeerId | None = None) -> None:
        """Add contacts from our own table, or from ``source``, and distribute them over the
        paths."""
        for index, contact in enumerate(contacts):
            self._add(self._paths[index % len(self._paths)], (contact,), source)

    def _backer(self, distance: int) -> PeerId | None:
        """Return a peer that named the contact and has credit left, or None."""
        named_by = self._named_by[distance]
        creditable = (peer for peer in named_by if self._credit.get(peer, CREDIT) > 0)
        return next(creditable, None)

    def _is_held(self, distance: int) -> bool:
        """Return True if a contact must wait because all peers that named it have used up their
        credit."""
        if distance not in self._named_by or self._states[distance] is not ContactState.NEW:
            return False
        return self._backer(distance) is None

    def _nearest(self, path: _Path, passed_over: tuple[ContactState, ...]) -> Iterator[int]:
        """Return the ``width`` nearest contacts of a path, without those that must wait or are
        in a state of ``passed_over``."""
        states, held = self._states, self._is_held
        alive = (
            distance
            for distance in path.shortlist
            if states[distance] not in passed_over and not held(distance)
        )
        return islice(alive, self._shape.width)

    def _is_done(self, path: _Path) -> bool:
        if self._is_found(path):
            return True
        if self._asked >= MAX_ASKED:
            return path.in_flight == 0
        nearest = self._nearest(path, _GONE)
        return all(self._states[distance] is ContactState.ANSWERED for distance in nearest)

    def _is_found(self, path: _Path) -> bool:
        """Return True if this path has found enough values. Any value suffices if all paths
        together have found enough, since other paths may have claimed the remaining holders."""
        quorum = self._shape.quorum
        if not quorum or not (found := self._holders_found(path)):
            return False
        everywhere = sum(self._holders_found(each) for each in self._paths)
        return found >= quorum or everywhere >= quorum * len(self._paths)

    def _holders_found(self, path: _Path) -> int:
        """Return how many of the nearest contacts, which should hold the key, had values on
        this path."""
        holders = islice(self._nearest(path, _GONE), self._shape.holders)
        return len(path.found.intersection(holders))

    @property
    def found_by(self) -> int:
        """Number of paths that have found values at nodes near the key."""
        return sum(1 for path in self._paths if self._holders_found(path))

    @property
    def found_everywhere(self) -> bool:
        """True if every path has found values at nodes near the key."""
        return self.found_by == len(self._paths)

    @property
    def done(self) -> bool:
        """True if no path has anything left to ask or to wait for."""
        return all(self._is_done(path) for path in self._paths)

    def ask(self) -> list[Contact]:
        """Return the contacts to ask now. Each is assigned to one path, and the paths take
        turns."""
        claimed: list[Contact] = []
        turns = [path for path in self._paths if not self._is_done(path)]
        while turns:
            turns = [path for path in turns if self._claim(path, claimed)]
        return claimed

    def _claim(self, path: _Path, claimed: list[Contact]) -> bool:
        if path.in_flight >= self._shape.alpha or self._asked >= MAX_ASKED:
            return False
        for distance in self._nearest(path, (ContactState.LATE, *_GONE)):
            if self._states[distance] is ContactState.NEW:
                self._states[distance] = ContactState.ASKED
                self._owner[distance] = path
                path.in_flight += 1
                self._asked += 1
                if distance in self._named_by:
                    backer = self._backer(distance)
                    assert backer is not None  # else `_is_held` had passed it over
                    self._asked_for[distance] = backer
                    self._credit[backer] = self._credit.get(backer, CREDIT) - 1
                claimed.append(self._contacts[distance])
                return True
        return False

    def settle(self, contact: Contact, state: ContactState) -> _Path | None:
        """Set the state of an asked contact and return its path. Return None if the contact was
        not asked or is settled already."""
        distance = contact.number ^ self._number
        was = self._states.get(distance, ContactState.NEW)
        if was in (ContactState.NEW, ContactState.ANSWERED, ContactState.FAILED):
            return None
        path = self._owner[distance]
        if was is ContactState.ASKED:
            path.in_flight -= 1
        self._states[distance] = state
        return path

    def answered(
        self, contact: Contact, closer: Iterable[Contact], *, found: bool = False
    ) -> None:
        """Add the contacts ``closer`` that ``contact`` named. ``found`` tells whether it also
        had values."""
        path = self.settle(contact, ContactState.ANSWERED)
        if path is not None:
            if found:
                path.found.add(contact.number ^ self._number)
            backer = self._asked_for.pop(contact.number ^ self._number, None)
            if backer is not None:
                self._credit[backer] += 2  # what it had cost, and one more
            self._add(path, closer, contact.peer)

    def closest(self, count: int) -> list[Contact]:
        """Return up to ``count`` of the nearest contacts that have answered, nearest first."""
        states = self._states.items()
        answered = (distance for distance, state in states if state is ContactState.ANSWERED)
        return [self._contacts[distance] for distance in sorted(answered)[:count]]
