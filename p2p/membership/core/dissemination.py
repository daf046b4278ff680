"""Floods of suspicions, refutations, good-byes and newcomers, each of which ends.

Each statement about a peer has a rank: ``2 * seqno`` for "it lives", one more for "nothing came
after that" and "it left". A node passes a statement on only when its rank is higher than any it
has heard about that peer. So each flood ends, a refutation overtakes its suspicion, and no
suspicion can be repeated without a newer heartbeat of the suspected peer. For example, with the
newest heartbeat at 7: a suspicion (15) beats the heartbeat (14), the refutation is heartbeat 8
(16), and the suspicion of 7 that a slow neighbour still brings (15) is dropped.

Both ends of a link hear of a flood at about the same time, so it would cross most links twice.
Therefore one end of each link passes it on at once, and the other only after `FLUSH_DELAY`, and
only if it has not had it from there by then: 3.6 copies a node at 6.2 neighbours (200 nodes).
Newcomers are announced in the same way, by digest: what a neighbour has named meanwhile, it is
not told.

SWIM piggybacks such updates on its probes instead. Here a death must be known within 15 s at an
interval of 5 s, and digests do travel with the heartbeats; only these four do not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.membership.heartbeat import Digest, SignedHeartbeat, key_of
from p2p.membership.messages import MAX_HEARTBEATS, MAX_KEYS

FLUSH_DELAY: Final = 0.2
"""Seconds between two messages of floods, for which those of a disaster are collected. So long
one end of each link waits in case the other end knows already: longer than a message takes."""
NEWCOMER_DELAY: Final = 0.75
"""Seconds for which newcomers are collected before they are announced. The end of a link that
goes second waits twice as long and then has little left to send."""
MEMORY: Final = 1200.0
"""Minimum number of seconds for which a flood is remembered. A peer that missed a death may
list the dead peer for `MembershipConfig.stale`, and a newcomer that it told for as long
again."""
MAX_FLOODS: Final = 4096
"""Peers whose last flood is remembered, in each of two generations. When 4,000 nodes drop at
once, each is still flooded only once."""


@dataclass(slots=True)
class Flood:
    """Statement to pass on to all neighbours that do not know it yet."""

    signed: SignedHeartbeat
    suspected: bool
    """True for a suspicion; False for a sign of life or a good-bye."""
    known_by: dict[PeerId, None] = field(default_factory=dict)


class Dissemination:
    """Remembers the floods that were heard and queues those to pass on."""

    def __init__(self, local: PeerId) -> None:
        self._local = local
        self._passed_at = -math.inf
        self._first_at = self._second_at = self._newcomers_at = math.inf
        self.flush_at = math.inf
        """Time of the next flush of the queues."""
        # The rank of the last flood about each peer, remembered for one to two times `MEMORY`,
        # in two generations: with a time for each, a thousand ranks took three times as much
        # memory.
        self._young: dict[PeerId, int] = {}
        self._old: dict[PeerId, int] = {}
        self._turned_at = -math.inf
        self._suspected: BoundedDict[PeerId, float] = BoundedDict(MAX_FLOODS)
        """Maps each peer to the time of the last suspicion or good-bye about it, oldest
        first."""
        self._first: dict[PeerId, Flood] = {}
        self._second: dict[PeerId, Flood] = {}
        self._newcomers: dict[bytes, tuple[PeerId, ...]] = {}
        """Maps the key of each newcomer to the neighbours that know of it."""
        self._late_newcomers: dict[bytes, tuple[PeerId, ...]] = {}
        """Maps the key of each newcomer in the second wave to the neighbours that know of
        it."""

    @property
    def has_newcomers(self) -> bool:
        """True if newcomers wait to be announced."""
        return bool(self._newcomers or self._late_newcomers)

    def _rank_of(self, peer: PeerId) -> int:
        """Return the rank of the last flood about `peer`, or the lowest rank."""
        rank = self._young.get(peer)
        return self._old.get(peer, -1 << 1) if rank is None else rank

    def was_suspected(self, peer: PeerId, since: float) -> bool:
        """Return True if a suspicion or good-bye of ``peer`` was noted after ``since``, refuted
        or not."""
        return self._suspected.get(peer, -math.inf) > since

    def suspected_seqno(self, peer: PeerId) -> int:
        """Return the last sequence number of ``peer`` before its reported silence; -1 if no
        silence was reported."""
        rank = self._rank_of(peer)
        return rank >> 1 if rank & 1 else -1

    def is_known(self, peer: PeerId, seqno: int, *, suspected: bool, source: PeerId) -> bool:
        """Return True if this flood is known. If it still waits here, note that `source` has
        it."""
        if 2 * seqno + suspected > self._rank_of(peer):
            return False
        waiting = self._first.get(peer) or self._second.get(peer)
        said = seqno, suspected
        if waiting is not None and (waiting.signed.seqno, waiting.suspected) == said:
            waiting.known_by[source] = None
        return True

    def neighbour_heard(self, peer: PeerId, seqno: int, source: PeerId) -> None:
        """Note that ``source`` has heartbeat ``seqno`` of ``peer``, so that no waiting copy is
        sent to it. Without this, both ends of most links send the heartbeat to each other,
        since `is_known` marks only the sender of a suspicion."""
        waiting = self._first.get(peer) or self._second.get(peer)
        if waiting is not None and not waiting.suspected and waiting.signed.seqno <= seqno:
            waiting.known_by[source] = None

    def flood(
        self, signed: SignedHeartbeat, *, suspected: bool, source: PeerId, now: float
    ) -> None:
        """Queue a statement for all neighbours unless one of at least its rank was passed on
        before."""
        peer, rank = signed.peer, 2 * signed.seqno + (suspected or signed.heartbeat.leaving)
        if rank <= self._rank_of(peer):
            return
        if now - self._turned_at > MEMORY or len(self._young) >= MAX_FLOODS:
            self._young, self._old, self._turned_at = {}, self._young, now
        self._young[peer] = rank
        if rank & 1:
            self._suspected.renew(peer, now)
        self._second.pop(peer, None)
        if len(self._first) >= MAX_FLOODS and peer not in self._first:
            return  # they go out at 160 a second; so many do not come by honest means
        self._first[peer] = Flood(signed, suspected, {source: None})
        self._first_at = max(now, self._passed_at + FLUSH_DELAY)
        self._arm()

    def announce(self, peer: PeerId, source: PeerId, now: float) -> None:
        """Announce a new `peer` by digest to all neighbours but `source`, who told us."""
        if len(self._newcomers) < MAX_FLOODS:
            self._newcomers[key_of(peer)] = (source,)
        self._newcomers_at = min(self._newcomers_at, now + NEWCOMER_DELAY)
        self._arm()

    def neighbour_knows(self, digests: Iterable[Digest], source: PeerId) -> None:
        """Note that ``source`` knows these newcomers, so that they are not announced to it."""
        for digest in digests:
            key = digest[0]
            for newcomers in (self._newcomers, self._late_newcomers):
                if key in newcomers and source not in newcomers[key]:
                    newcomers[key] = (*newcomers[key], source)

    def take_floods(
        self, now: float, neighbours: Iterable[PeerId]
    ) -> list[tuple[list[PeerId], list[Flood]]]:
        """Return the floods to pass on now, each with the ``neighbours`` that lack them: at
        most `MAX_HEARTBEATS` a wave."""
        taken: list[tuple[list[PeerId], list[Flood]]] = []
        if self._first_at > now and self._second_at > now:
            return taken  # there are news only
        if self._second_at <= now:
            later, self._second = _split(self._second)
            self._second_at = now + FLUSH_DELAY if self._second else math.inf
            taken += _told(neighbours, later)
        if self._first_at <= now:
            first, self._first = _split(self._first)
            self._passed_at = now
            self._first_at = now + FLUSH_DELAY if self._first else math.inf
            at_once = self._goes_first(neighbours)
            taken += _told(at_once, first)
            for flood in first:
                flood.known_by.update(dict.fromkeys(at_once))
                if not all(map(flood.known_by.__contains__, neighbours)):
                    self._second[flood.signed.peer] = flood
                    self._second_at = min(self._second_at, now + FLUSH_DELAY)
        self._arm()
        return taken

    def _goes_first(self, neighbours: Iterable[PeerId]) -> list[PeerId]:
        """Return the neighbours to which our end of the link sends first. The order is fixed
        for each pair."""
        local, parity = self._local, self._local[-1] & 1
        return [peer for peer in neighbours if (local < peer) is (peer[-1] & 1 == parity)]

    def take_newcomers(
        self, now: float, neighbours: Iterable[PeerId]
    ) -> list[tuple[list[PeerId], list[bytes]]]:
        """Return the keys of newcomers to announce now, with the neighbours to tell, oldest
        first and at most as many as may be asked for."""
        if self._newcomers_at > now:
            return []
        late, waiting = self._late_newcomers, list(self._newcomers.items())
        at_once = tuple(self._goes_first(neighbours))
        # A new dict: an emptied one keeps its size.
        self._newcomers = dict(waiting[MAX_KEYS:])
        self._late_newcomers = {
            key: (*known_by, *at_once)
            for key, known_by in waiting[:MAX_KEYS]
            if not all([peer in at_once or peer in known_by for peer in neighbours])
        }
        self._newcomers_at = now + NEWCOMER_DELAY if self.has_newcomers else math.inf
        self._arm()
        groups: dict[tuple[bytes, ...], list[PeerId]] = {}
        for peer in neighbours:
            keys = [key for key, known_by in late.items() if peer not in known_by]
            if peer in at_once:
                keys += [key for key, known in waiting[:MAX_KEYS] if peer not in known]
            if keys:
                groups.setdefault(tuple(keys), []).append(peer)
        return [(peers, list(keys)) for keys, peers in groups.items()]

    def _arm(self) -> None:
        self.flush_at = min(self._first_at, self._second_at, self._newcomers_at)


def _told(
    neighbours: Iterable[PeerId], floods: list[Flood]
) -> list[tuple[list[PeerId], list[Flood]]]:
    """Return the ``neighbours`` that lack some of the floods, grouped by the floods that they
    lack, so that each group's message is encoded once."""
    if len(floods) == 1:  # nearly always
        peers = list(filterfalse(floods[0].known_by.__contains__, neighbours))
        return [(peers, floods)] if peers else []
    groups: dict[tuple[int, ...], list[PeerId]] = {}
    for peer in neighbours if floods else ():
        lacking = [number for number, flood in enumerate(floods) if peer not in flood.known_by]
        if lacking:
            groups.setdefault(tuple(lacking), []).append(peer)
    return [
        (peers, [floods[number] for number in lacking]) for lacking, peers in groups.items()
    ]


def _split(waiting: dict[PeerId, Flood]) -> tuple[list[Flood], dict[PeerId, Flood]]:
    """Split the oldest floods that fit a message from the rest."""
    floods = list(waiting.values())
    if len(floods) <= MAX_HEARTBEATS:
        return floods, {}
    rest = floods[MAX_HEARTBEATS:]
    return floods[:MAX_HEARTBEATS], {flood.signed.peer: flood for flood in rest}
