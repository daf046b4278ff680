"""The members that a node knows, with their newest heartbeats, and tombstones of the dead.

Theory of operation
-------------------
The list holds HyParView's passive view, the neighbours, and peers that send us heartbeats
because they are interested in us. It is bounded, and peers are cheap to invent, so the rules of
`evictee` say which member goes when it is full: the young displace each other, and of a few
drawn at random one goes whose network or introducer is the most frequent among them.

A tombstone keeps a dead peer dead: without it an old heartbeat that another node still passes
on would bring the peer back.

One member, alive or dead, as a node remembers it, and the times that its silence may last.

The times, in the peer's own intervals since we first saw its newest heartbeat:

| peer | 1.5 | 2 | 2.8 | `expiry` (3) | `stale` (120) |
|---|---|---|---|---|---|
| sends us heartbeats | probed | suspected | dead, unless refuted | dead | |
| known through others | | | | | forgotten |
| suspected by another | dead after 0.8 more without a newer heartbeat | | | | |

A newer heartbeat makes a peer alive again, whichever node it came from. Two lost heartbeats in
a row are normal on a home connection: a suspicion is not yet a death, it asks all members, the
suspected one included, for a sign of life.
"""

from __future__ import annotations

import functools
import ipaddress
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core.dissemination import MEMORY
from p2p.membership.core.events import Member
from p2p.membership.heartbeat import KEY, SignedHeartbeat, key_of
from p2p.multiaddr import Multiaddr

_MEMO: Final = 4096
"""Address lists remembered: those of as many peers as profiles are (`heartbeat`); 1 MiB at
most."""


@functools.lru_cache(_MEMO)
def prefix_of(addrs: tuple[Multiaddr, ...]) -> bytes | None:
    """The network of the first public address among ``addrs``; None if there is none.

    Loopback, private and memory addresses name no network: a laboratory, a home and a
    simulation are one place each, and a peer that is in them was let in. Names are not resolved
    for strangers, and do not count.
    """
    for addr in addrs:
        kind, value = addr.parts[0]
        if kind in ("ip4", "ip6") and addr.relay is None:  # else it is the relay's network
            ip = ipaddress.ip_address(value)
            if ip.is_global:
                # A /24: the least that is routed on its own.
                # A /48: what one site gets, however many addresses it fills it with.
                return ip.packed[: 3 if kind == "ip4" else 6]
    return None


PROBE: Final = 1.5
"""Intervals after which a silent peer is asked itself: SWIM's ping. A heartbeat that comes half
an interval late costs no message."""
SUSPECT: Final = 2.0
"""Intervals after which a suspicion is flooded: the second missing heartbeat is due now, and
the peer has had half an interval to answer the probe."""
CONFIRM: Final = 0.8
"""Intervals that a suspected peer has to speak up. With `SUSPECT` this makes 2.8: at 5 s a
death is known 14 s after the last heartbeat plus the time of the flood, within 15 s of the
death."""


class Liveness(Enum):
    """How far the suspicion of a silent peer has gone."""

    ALIVE = "alive"
    PROBED = "probed"
    SUSPECTED = "suspected"


@dataclass(slots=True)
class Watch:
    """State for judging the silence of a peer: one that sends us heartbeats, or a suspected
    one."""

    due: float = math.inf
    """Time at which the liveness of the peer must be judged next."""
    waits_until: float = math.inf
    """Latest time at which the view looks at the peer again."""
    direct_at: float = -math.inf
    """When it last sent us a heartbeat itself; minus infinity if it does not."""
    direct_since: float = -math.inf
    """Time from which on we may expect heartbeats from the peer itself; earlier silence means
    nothing."""
    liveness: Liveness = Liveness.ALIVE
    suspected_at: float = math.inf
    was_asked: bool = False
    """True if we asked it ourselves since it was suspected, in vain."""


@dataclass(slots=True)
class MemberState:
    """A living peer. There are hundreds in each view, of which few have a `watch`."""

    signed: SignedHeartbeat
    seen: float
    """First sight of its newest heartbeat."""
    introducer: PeerId | None
    """The peer that named it to us; None if it came itself."""
    interval: float
    """Seconds between its heartbeats, as it says, within `MembershipConfig.pace`."""
    since: float
    """First sight of the peer, at most an interval early: a number that many members share."""
    prefix: bytes | None = field(init=False)
    """The network that its addresses are in (`prefix.prefix_of`)."""
    peer: PeerId = field(init=False)
    seqno: int = field(init=False)
    """Sequence number of its newest heartbeat, compared thousands of times a second."""
    policy: int = field(init=False)
    """Policy of its newest heartbeat."""
    avoid_until: float = -math.inf
    """Time until which it is not asked to be a neighbour, since it refused or could not be
    reached."""
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.peer = self.signed.heartbeat.peer
        self.prefix = prefix_of(self.signed.heartbeat.profile.addrs)
        self.record_heartbeat(self.signed, self.seen)

    def record_heartbeat(self, signed: SignedHeartbeat, now: float) -> None:
        """Note the newest heartbeat of this peer."""
        heartbeat = signed.heartbeat
        self.signed, self.seen = signed, now
        self.seqno, self.policy = heartbeat.seqno, heartbeat.profile.policy
        watch = self.watch
        if watch is not None:
            watch.liveness, watch.suspected_at, watch.was_asked = (
                Liveness.ALIVE,
                math.inf,
                False,
            )

    @property
    def liveness(self) -> Liveness:
        """How far the suspicion of this peer has gone."""
        return Liveness.ALIVE if self.watch is None else self.watch.liveness

    @property
    def direct_at(self) -> float:
        """When it last sent us a heartbeat itself; minus infinity if it does not."""
        return -math.inf if self.watch is None else self.watch.direct_at

    @property
    def direct(self) -> bool:
        """True if it sends us heartbeats itself."""
        return self.direct_at > -math.inf

    @property
    def is_watched(self) -> bool:
        """True if its silence must be judged to the second."""
        watch = self.watch
        if watch is None:
            return False
        return watch.direct_at > -math.inf or watch.liveness is Liveness.SUSPECTED

    def watched(self) -> Watch:
        """Start or return the watch of a peer."""
        if self.watch is None:
            self.watch = Watch()
        return self.watch

    def is_candidate(self, now: float) -> bool:
        """Return True if it may be asked to be a neighbour."""
        return self.liveness is Liveness.ALIVE and self.avoid_until <= now

    def is_heard(self, now: float) -> bool:
        """Return True if it sent us a heartbeat itself a moment ago: no suspicion can impress
        us."""
        return now - self.direct_at < PROBE * self.interval


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A peer that died or left."""

    signed: SignedHeartbeat
    when: float
    may_be_partitioned: bool
    """True if it may live on the other side of a partition: it did not say good-bye."""


STALE_CHECK: Final = 12.0
"""Intervals between two looks for the stale among all those known through others: in a large
swarm a peer always is, and a look each interval took an eighth of a node's time."""
SPARSE: Final = 7 / 8
"""Share of its capacity up to which a view announces new peers to neighbours at once. In a
fuller view the digests of heartbeats suffice."""
YOUNG: Final = 120.0
"""Intervals for which a member is young: as long as one that no peer hears of stays listed
(`stale`). What has outlived them was named again meanwhile."""
YOUNG_SHARE: Final = 1 / 8
"""Share of a full view that newcomers may take from the old; beyond it they displace each
other. Names cost a stranger nothing, so without it names pushed at random would fill the
view."""
OTHERS: Final = 16
"""Members outside a network from which on it is not the only one there is."""


class MemberList:
    """The living and the dead. Bounded: passive and direct members, tombstones.

    The few that send us heartbeats, or are suspected, wait on a heap for their judgement; a
    newer heartbeat leaves them where they are until they come to its top. The many known
    through others are looked through together, at most once in `STALE_CHECK` intervals.
    """

    def __init__(self, local: PeerId, config: MembershipConfig, rng: Random) -> None:
        self._local = key_of(local)
        self._config = config
        self._capacity: Final = config.capacity
        self._sparse: Final = SPARSE * config.capacity
        self._rng = rng
        self._members: dict[bytes, MemberState] = {}
        """The living, by the keys that name them in digests."""
        self.by_key: Final = self._members.get
        """The living peer that the key of a digest means; asked thousands of times a second."""
        self._tombstones: dict[bytes, Tombstone] = {}
        """The dead, by key, longest dead first."""
        self._prefixes: Counter[bytes] = Counter()
        """Living members in each network."""
        self.has_audience = False
        """True if peers send us heartbeats that are no neighbours, because we are an officer of
        the run: they are kept beside the passive members."""
        self._era = -math.inf
        """When the last interval began in which a newcomer was met: what is noted as its first
        sight."""
        self._turns: list[MemberState] = []
        """Members that `sample` has yet to return before it starts again."""
        self._directs = 0
        self._watched: list[tuple[float, int, MemberState]] = []
        self._pushes = 0
        self._stale_check_at = math.inf
        self._is_settled = False
        """True if nothing that `settle` looks at has changed since it looked."""
        self._settled_at = math.inf

    def settle(self) -> float:
        """When `overdue` may have something to say.

        It may tidy the heap, so it is no property: who looks must not change what happens.
        """
        if self._is_settled:
            return self._settled_at
        self._settled_at = self._tidy()
        self._is_settled = True
        return self._settled_at

    def _tidy(self) -> float:
        """Let the heap begin with a peer who is due when it says; return when that is."""
        watched = self._watched
        while watched:
            when, _, member = watched[0]
            watch = member.watch
            if watch is None or watch.waits_until != when:
                heappop(watched)
            elif not member.is_watched:
                heappop(watched)
                member.watch = None
                self._stale_check_at = min(self._stale_check_at, self._due(member))
            elif (due := watch.due) > when:
                watch.waits_until = due
                heapreplace(watched, (due, self._count_push(), member))
            else:
                return min(when, self._stale_check_at)
        return self._stale_check_at

    def __contains__(self, peer: PeerId) -> bool:
        return self.get(peer) is not None

    def unadmitted(self, may: Callable[[PeerId], bool]) -> list[PeerId]:
        """The living that ``may`` refuses."""
        return [member.peer for member in self._members.values() if not may(member.peer)]

    def get(self, peer: PeerId) -> MemberState | None:
        """Return the state of a living peer."""
        member = self._members.get(peer[KEY])
        return member if member is not None and member.peer == peer else None

    def tombstone(self, peer: PeerId) -> Tombstone | None:
        """Return the tombstone of a dead peer."""
        tombstone = self._tombstones.get(peer[KEY])
        return tombstone if tombstone is not None and tombstone.signed.peer == peer else None

    def has_key_of_another(self, peer: PeerId) -> bool:
        """Return True if another peer, living or dead, has the key that would name this one."""
        other = self._members.get(peer[KEY]) or self._tombstones.get(peer[KEY])
        return other is not None and other.signed.peer != peer

    def is_outdated(self, key: bytes, seqno: int) -> bool:
        """Return True if a digest means ourselves, or a heartbeat that a dead peer sent
        before."""
        tombstone = self._tombstones.get(key)
        return key == self._local or (tombstone is not None and seqno <= tombstone.signed.seqno)

    def seqno_of_dead(self, peer: PeerId) -> int:
        """Return the last sequence number of a dead peer; -1 if its death is unknown."""
        tombstone = self.tombstone(peer)
        return -1 if tombstone is None else tombstone.signed.seqno

    def members(self) -> list[Member]:
        """Return all living members."""
        return [
            Member(member.peer, member.signed.heartbeat.profile, member.seen)
            for member in self._members.values()
        ]

    def renew(self, member: MemberState, signed: SignedHeartbeat, now: float) -> None:
        """Replace a member's heartbeat with a newer one."""
        policy = member.policy
        self.record_heartbeat(member, signed, now)
        self._schedule(member)
        if member.policy != policy:
            self.name_next(member)

    def admit(self, signed: SignedHeartbeat, source: PeerId, now: float) -> MemberState:
        """Take in a peer that is not known to live; ``source`` named it."""
        peer = signed.heartbeat.peer
        key = key_of(peer)
        self._tombstones.pop(key, None)
        interval = self._config.paced(signed.heartbeat.interval)
        if now - self._era >= self._config.interval:
            self._era = now
        member = MemberState(
            signed, now, None if source == peer else source, interval, self._era
        )
        self._members[key] = member
        if member.prefix is not None:
            self._prefixes[member.prefix] += 1
        self._schedule(member)
        return member

    def record_heartbeat(
        self, member: MemberState, signed: SignedHeartbeat, now: float
    ) -> None:
        """Note the newest heartbeat of a living peer."""
        before, heartbeat = member.signed.heartbeat, signed.heartbeat
        member.record_heartbeat(signed, now)
        if heartbeat.interval != before.interval:
            member.interval = self._config.paced(heartbeat.interval)
        profile, known = heartbeat.profile, before.profile
        if profile is not known and profile.addrs != known.addrs:
            self._leave_prefix(member)
            member.prefix = prefix_of(heartbeat.profile.addrs)
            if member.prefix is not None:
                self._prefixes[member.prefix] += 1

    def prefix(self, peer: PeerId) -> bytes | None:
        """Return the network of a living peer; None if the peer is unknown or in none."""
        member = self.get(peer)
        return None if member is None else member.prefix

    def is_one_of_many(self, prefix: bytes | None) -> bool:
        """Return True if there are enough members outside this network to choose from."""
        return prefix is not None and len(self._members) - self._prefixes[prefix] >= OTHERS

    def expect(self, peer: PeerId, now: float) -> bool:
        """Expect heartbeats from a living peer itself from now on. Return False if the peer is
        unknown."""
        member = self.get(peer)
        if member is None:
            return False
        watch = member.watched()
        was_direct, watch.direct_at = watch.direct_at > -math.inf, now
        if not was_direct:
            self._directs += 1
            watch.direct_since = now
            self._schedule(member)
        return True

    def stop_expecting(self, peer: PeerId) -> None:
        """Stop expecting heartbeats from a living peer itself."""
        member = self.get(peer)
        if member is not None and member.direct:
            self._directs -= 1
            member.watched().direct_at = -math.inf
            self._schedule(member)

    def suspect(self, member: MemberState, now: float) -> None:
        """Suspect a living peer: unless it speaks up in time, it is dead."""
        watch = member.watched()
        watch.liveness, watch.suspected_at = Liveness.SUSPECTED, now
        self._schedule(member)

    def overdue(self, now: float) -> list[MemberState]:
        """Return the living peers whose silence must be judged now."""
        members = []
        self._is_settled = False
        while self._tidy() <= now and self._watched and self._watched[0][0] <= now:
            member = heappop(self._watched)[2]
            member.watched().waits_until = math.inf
            members.append(member)
        if self._stale_check_at <= now:
            unwatched = [member for member in self._members.values() if not member.is_watched]
            others = [(self._due(member), member) for member in unwatched]
            members += [member for due, member in others if due <= now]
            later = min((due for due, _ in others if due > now), default=math.inf)
            self._stale_check_at = max(later, now + STALE_CHECK * self._config.interval)
        return members

    def reschedule(self, member: MemberState) -> None:
        """Schedule the next judgement of a peer, if the peer still lives."""
        if self._members.get(member.peer[KEY]) is member:
            self._schedule(member)

    def drop(self, peer: PeerId) -> Member | None:
        """Forget a living peer altogether."""
        member = self.get(peer)
        if member is None:
            return None
        del self._members[peer[KEY]]
        self._leave_prefix(member)
        self._directs -= member.direct
        member.watch = None
        self._is_settled = False
        return Member(member.peer, member.signed.heartbeat.profile, member.seen)

    def add_tombstone(
        self, signed: SignedHeartbeat, now: float, *, may_be_partitioned: bool
    ) -> Member | None:
        """Move a peer to the dead. Return the lost member; None if it was not held."""
        member = self.drop(signed.peer)
        key, tombstones = key_of(signed.peer), self._tombstones
        tombstones.pop(key, None)
        while tombstones:
            oldest = next(iter(tombstones))
            # Dead peers remembered, 2 MiB at most. A swarm of 1,000 in which half die at once
            # needs 500; one more is forgotten, oldest first, and may be taken in again by an
            # old heartbeat.
            if len(tombstones) < 4096 and tombstones[oldest].when >= now - MEMORY:
                break
            del tombstones[oldest]
        tombstones[key] = Tombstone(signed, now, may_be_partitioned)
        return member

    def __len__(self) -> int:
        return len(self._members)

    @property
    def room(self) -> int:
        """Free places for passive members; negative if the view is overfull."""
        return self._capacity - len(self._members)

    def has_room(self) -> bool:
        """Return True if another passive member fits without pushing one out."""
        return len(self._members) < self._capacity

    def is_sparse(self) -> bool:
        """Return True if the view holds so few that we may know all there are."""
        return len(self._members) < self._sparse

    def is_crowded(self) -> bool:
        """Return True if the view holds about as many as it may: it is a sample, and so are
        others'."""
        # Share of its capacity from which a view is crowded: 202 of 205, so that a death or two
        # do not make it look for more.
        return len(self._members) > (63 / 64) * self._capacity

    def evictee(
        self, neighbours: Mapping[PeerId, float], keep: PeerId, now: float
    ) -> PeerId | None:
        """Return the member that must go for the newcomer ``keep``, if the view or its
        network's share is too full.

        A network beyond its share changes only among itself. Of a full view a young member goes
        if the young have their share, else any; and of a few drawn at random one whose network
        or whose introducer is the most frequent among them: so that neither one neighbour nor
        one address range, whatever it names, has more than it would by chance.
        """
        pool = self._of_crowded_prefix(keep) if self._prefixes else []
        if not pool:
            passive = len(self._members) - self._directs
            config = self._config
            is_full_house = passive > config.passive or self._directs > config.direct
            if self.has_room() or (self.has_audience and not is_full_house):
                return None
            pool = list(self._members.values())
            since = now - YOUNG * config.interval  # members are in the order in which they came
            young = len(pool) - bisect_right(pool, since, key=attrgetter("since"))
            if young > YOUNG_SHARE * config.capacity:
                pool = pool[-young:]
        if self.has_audience and self._directs <= self._config.direct:
            pool = [member for member in pool if not member.direct]
        spared = {keep, *neighbours}
        # Members drawn at random when one must go: it is of the network, or the introducer,
        # that is the most frequent among them. Who named a third of the members is that nearly
        # always.
        drawn = self._rng.choices(pool, k=24) if pool else []
        return _most_crowded([one for one in drawn if one.peer not in spared], keep)

    def _of_crowded_prefix(self, peer: PeerId) -> list[MemberState]:
        """The members in the network of ``peer``, if they are more than its share; else
        none."""
        prefix = self.prefix(peer)
        # Share of a view that one network may have (`prefix`), where `OTHERS` are known outside
        # it.
        if prefix is None or self._prefixes[prefix] <= (1 / 4) * self._config.capacity:
            return []
        if not self.is_one_of_many(prefix):
            return []
        return [member for member in self._members.values() if member.prefix == prefix]

    def is_young(self, peer: PeerId, now: float) -> bool:
        """Return True if a living peer was met lately (`YOUNG`)."""
        member = self.get(peer)
        return member is not None and member.since > now - YOUNG * self._config.interval

    def _leave_prefix(self, member: MemberState) -> None:
        if member.prefix is not None:
            self._prefixes[member.prefix] -= 1
            if not self._prefixes[member.prefix]:
                del self._prefixes[member.prefix]

    def sample(self, count: int, first: Iterable[PeerId]) -> list[SignedHeartbeat]:
        """Heartbeats of ``first`` and of ``count`` others, none of them suspected.

        Of the others those come first that were met last, or have a new policy, then all in
        random order, and no peer twice before all had a turn: drawn anew each time, the last of
        200 would be named a minute later.
        """
        known, turns = self._members, self._turns
        chosen = {peer: member for peer in first if (member := self.get(peer)) is not None}
        left = min(count, len(known))
        while left:
            if not turns:
                turns.extend(known.values())
                self._rng.shuffle(turns)
            member = turns.pop()
            if known.get(member.peer[KEY]) is member:
                chosen[member.peer] = member
                left -= 1
        return [
            member.signed
            for member in chosen.values()
            if (watch := member.watch) is None or watch.liveness is not Liveness.SUSPECTED
        ]

    def name_next(self, member: MemberState) -> None:
        """Let `sample` name a member before all others: it is new, or has a new policy."""
        if len(self._turns) <= 2 * len(self._members):
            self._turns.append(member)

    def candidates(self, neighbours: Mapping[PeerId, float], now: float) -> Iterator[PeerId]:
        """Members that could become neighbours, in random order, those of the neighbours'
        networks last.

        Drawn one by one, for one is nearly always enough: to shuffle all of them took 4 % of a
        node's time.
        """
        if self._prefixes:
            yield from self._by_network(neighbours, now)
            return
        members = list(self._members.values())
        while members:
            number = self._rng.randrange(len(members))
            members[number], member = members[-1], members[number]
            members.pop()
            if member.peer not in neighbours and member.is_candidate(now):
                yield member.peer

    def _by_network(self, neighbours: Mapping[PeerId, float], now: float) -> list[PeerId]:
        peers = [
            member.peer
            for member in self._members.values()
            if member.peer not in neighbours and member.is_candidate(now)
        ]
        self._rng.shuffle(peers)
        near = Counter([self.prefix(peer) for peer in neighbours])
        del near[None]
        peers.sort(key=lambda peer: near[self.prefix(peer)])
        return peers

    def maybe_partitioned(self, since: float) -> list[PeerId]:
        """The dead, no older than ``since``, that may live beyond a partition."""
        return [
            dead.signed.peer
            for dead in self._tombstones.values()
            if dead.may_be_partitioned and dead.when >= since
        ]

    def _schedule(self, member: MemberState) -> None:
        """Schedule the next look at ``member``, if it is due before the one that is
        scheduled."""
        due, watch = self._due(member), member.watch
        if watch is not None and watch.waits_until == self._settled_at:
            self._is_settled = False
        if watch is None or not member.is_watched:
            if due < self._stale_check_at:
                self._stale_check_at = due
                self._is_settled = False
            return
        watch.due = due
        if due < watch.waits_until:
            self._is_settled = False
            watch.waits_until = due
            heappush(self._watched, (due, self._count_push(), member))

    def _count_push(self) -> int:
        """Return a number that orders peers due at the same time by when they were
        scheduled."""
        self._pushes += 1
        return self._pushes

    def _due(self, member: MemberState) -> float:
        """Return the time at which the liveness of a living peer must be judged next."""
        interval, watch = member.interval, member.watch
        if watch is None:
            return member.seen + self._config.stale * interval
        if watch.direct_at > -math.inf:
            since = max(member.seen, watch.direct_since)
            if watch.liveness is Liveness.ALIVE:
                return since + PROBE * interval
            if watch.liveness is Liveness.PROBED:
                return since + SUSPECT * interval
            end = since + self._config.expiry * interval
        else:
            end = member.seen + self._config.stale * interval
        if watch.liveness is Liveness.SUSPECTED:
            end = min(end, watch.suspected_at + CONFIRM * interval)
        return end


def _most_crowded(drawn: list[MemberState], otherwise: PeerId) -> PeerId:
    """Return a member of ``drawn`` whose network or introducer is the most frequent there."""
    introducers: dict[PeerId | None, int] = {}
    prefixes: dict[bytes, int] = {}
    for member in drawn:
        introducers[member.introducer] = introducers.get(member.introducer, 0) + 1
        if member.prefix is not None:
            prefixes[member.prefix] = prefixes.get(member.prefix, 0) + 1
    most, evictee = 0, otherwise
    for member in drawn:
        crowd = introducers[member.introducer]
        if member.prefix is not None:
            crowd = max(crowd, prefixes[member.prefix])
        if crowd > most:
            most, evictee = crowd, member.peer
    return evictee
