"""What each peer can upload, as its children say: no peer's word about itself is believed.

Theory of operation
-------------------
A peer that has a whole version sends its origin a *receipt*: how long it took, and how many
chunks each stripe brought it. The origin knows who stands above whom, so receipts of a peer's
children say what this peer delivered. Its capacity is the median over the last of them, so that
a minority of liars moves nothing.

A peer that delivered what its own parent did is limited by what it is given: its measurement is
a lower bound, and its claim is believed up to `_CREDULITY` times the median of what is known. A
peer whose children got less than half of what its siblings' children got is *overloaded*: its
capacity is what it delivered, and it is tried with a little more each version after that. One
that delivered next to nothing has no children to speak of it afterwards: it is tried anew once
none has for `_PROBATION` versions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.demotion import QUORUM
from p2p.shardcast.forest import RosterEntry
from p2p.shardcast.manifest import MAX_ROSTER

_CREDULITY: Final = 4
"""A claim counts for at most this multiple of the median of what is known. Twice would leave
the strong lines of an honest swarm idle: its strongest tenth has four to five times the
median."""
_RECEIPTS: Final = 16
"""Receipts per peer of which the median counts: two versions of eight children, so that an hour
ago is forgotten and no child's word moves the median far."""
_RECOVERY: Final = 1.25
"""Growth, in each version in which it keeps up, of what an overloaded peer is believed to
carry: a line that was busy with something else has twice its share after four versions."""
_PROBATION: Final = 8
"""Versions for which a demoted root, or a peer of which no child says anything more, is a leaf.
Two liars demote one honest root a version, so they keep at most eight relays idle."""


class _Standing:
    """What is known of one peer."""

    __slots__ = ("_carried", "_ceiling", "_unheard")

    def __init__(self) -> None:
        self._carried: deque[float] = deque(maxlen=_RECEIPTS)
        self._ceiling = math.inf
        self._unheard = 0
        """Versions since a child spoke of it."""

    @property
    def measured(self) -> float:
        """Bytes per second that it has carried, in the median; 0 if nothing is known."""
        return median(self._carried) if self._carried else 0.0

    def note_carried(self, rates: Sequence[float], limit: float | None) -> None:
        """Its children say what it carried in one version; ``limit`` is what it can carry, if
        they got too little of it."""
        self._unheard = 0
        self._carried.extend(rates)
        self._ceiling = _RECOVERY * self._ceiling if limit is None else limit

    def note_version(self) -> None:
        """A new version is handed out."""
        self._unheard += 1
        if self._unheard > _PROBATION:
            self._ceiling = math.inf

    def believe(self, claim: float, most: float) -> float:
        """What to take ``claim`` for."""
        return min(claim, self._ceiling, max(most, self.measured))


class Capacities:
    """What an origin believes that its peers can upload."""

    def __init__(self) -> None:
        self._standings: BoundedDict[PeerId, _Standing] = BoundedDict(MAX_ROSTER)
        self._demoted: BoundedDict[PeerId, int] = BoundedDict(MAX_ROSTER)
        """Peers that were replaced as roots, and for how many more versions they relay
        nothing."""

    def note_demoted(self, peer: PeerId) -> None:
        """``peer`` was replaced as a root: for `_PROBATION` versions it is a leaf."""
        self._demoted[peer] = _PROBATION

    def note_version(self) -> None:
        """A new version is handed out."""
        for peer, left in list(self._demoted.items()):
            if left > 1:
                self._demoted[peer] = left - 1
            else:
                del self._demoted[peer]
        for standing in self._standings.values():
            standing.note_version()

    def note_carried(self, peer: PeerId, rates: Sequence[float], limit: float | None) -> None:
        """Children of ``peer`` say what it carried, each as it saw it; see `Carried`."""
        self._standing(peer).note_carried(rates, limit)

    def _standing(self, peer: PeerId) -> _Standing:
        standing = self._standings.get(peer)
        if standing is None:
            standing = self._standings[peer] = _Standing()
        return standing

    def believe(self, entries: Iterable[RosterEntry]) -> list[RosterEntry]:
        """The same peers, with what is believed of their claims."""
        claims = list(entries)
        most = _CREDULITY * self._median(claims)
        return [replace(entry, upload=self._belief(entry, most)) for entry in claims]

    def _median(self, claims: Sequence[RosterEntry]) -> float:
        known = [
            standing.measured
            for entry in claims
            if (standing := self._standings.get(entry.peer)) is not None and standing.measured
        ]
        if len(known) <= QUORUM:  # so few could be friends
            known = [entry.upload for entry in claims if entry.upload]
        return median(known) if known else 0.0

    def _belief(self, entry: RosterEntry, most: float) -> float:
        if entry.peer in self._demoted:
            return 0.0
        standing = self._standings.get(entry.peer)
        return (
            min(entry.upload, most)
            if standing is None
            else standing.believe(entry.upload, most)
        )
