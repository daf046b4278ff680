"""The members that a node knows, with their newest heartbeats, and tombstones of the dead.

Theory of operation
-------------------
The list holds HyParView's passive view, the neighbours, and peers that send us heartbeats
because they are interested in us. It is bounded, and peers are cheap to invent, so the rules of
`evictee` say which member goes when it is full: the young displace each other, and of a few
drawn at random one goes whose network is the most frequent among them.

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
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core.dissemination import MEMORY
from p2p.membership.core.events import Member
from p2p.membership.heartbeat import KEY, Digest, SignedHeartbeat, key_of
from p2p.multiaddr import Multiaddr


# Number of address lists remembered: those of as many peers as profiles are (`heartbeat`); 1
# MiB at most.
@functools.lru_cache(4096)
def prefix_of(addrs: tuple[Multiaddr, ...]) -> bytes | None:
    """Return the network of the first public address among ``addrs``; None if there is none.

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
"""Intervals after which a silent peer is asked for a sign of life, like SWIM's ping. A
heartbeat that is half an interval late costs no message."""


class Liveness(Enum):
    """Stage of suspicion of a peer."""

    ALIVE = "alive"
    PROBED = "probed"
    SUSPECTED = "suspected"


@dataclass(slots=True)
class Watch:
    """State for judging the silence of a peer that sends us heartbeats or is suspected."""

    due: float = math.inf
    """Time at which the peer's liveness must be judged next."""
    waits_until: float = math.inf
    """Time of the peer's valid entry on the heap of `MemberList`; infinity if there is none."""
    direct_at: float = -math.inf
    """Time of the last heartbeat that the peer itself sent us; minus infinity if it sends
    none."""
    direct_since: float = -math.inf
    """Time from which we expect heartbeats from the peer itself. Earlier silence means
    nothing."""
    liveness: Liveness = Liveness.ALIVE
    suspected_at: float = math.inf
    was_asked: bool = False
    """True if the suspected peer did not answer when we asked it ourselves."""


@dataclass(slots=True)
class MemberState:
    """State of a living peer. A view holds hundreds, of which few have a `watch`."""

    signed: SignedHeartbeat
    seen: float
    """Time at which its newest heartbeat was first seen."""
    interval: float
    """Seconds between its heartbeats by its own claim, within `MembershipConfig.paced`."""
    since: float
    """Time at which the peer was first seen, at most an interval early. Many members share one
    number, which saves memory."""
    prefix: bytes | None = field(init=False)
    """Network of its addresses (`prefix_of`)."""
    peer: PeerId = field(init=False)
    seqno: int = field(init=False)
    """Sequence number of its newest heartbeat. It is compared thousands of times a second."""
    policy: int = field(init=False)
    """Policy of its newest heartbeat."""
    avoid_until: float = -math.inf
    """Time until which the peer is not asked to be a neighbour, because it refused or could not
    be reached."""
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.peer = self.signed.heartbeat.peer
        self.prefix = prefix_of(self.signed.heartbeat.profile.addrs)
        self.record_heartbeat(self.signed, self.seen)

    def record_heartbeat(self, signed: SignedHeartbeat, now: float) -> None:
        """Store the newest heartbeat of this peer and clear any suspicion."""
        heartbeat = signed.heartbeat
        self.signed, self.seen = signed, now
        self.seqno, self.policy = heartbeat.seqno, heartbeat.profile.policy
        watch = self.watch
        if watch is not None:
            watch.liveness, watch.suspected_at = Liveness.ALIVE, math.inf
            watch.was_asked = False

    @property
    def liveness(self) -> Liveness:
        """Stage of suspicion of this peer."""
        return Liveness.ALIVE if self.watch is None else self.watch.liveness

    @property
    def direct_at(self) -> float:
        """Time of the last heartbeat that the peer itself sent us; minus infinity if it sends
        none."""
        return -math.inf if self.watch is None else self.watch.direct_at

    @property
    def direct(self) -> bool:
        """True if it sends us heartbeats itself."""
        return self.direct_at > -math.inf

    @property
    def is_watched(self) -> bool:
        """True if the peer sends us heartbeats or is suspected, so that its silence is judged
        on time."""
        return self.direct or self.liveness is Liveness.SUSPECTED

    def watched(self) -> Watch:
        """Return the peer's watch, creating it if there is none."""
        if self.watch is None:
            self.watch = Watch()
        return self.watch

    def is_heard(self, now: float) -> bool:
        """Return True if the peer itself sent us a heartbeat within `PROBE` intervals.
        Suspicions of such a peer are checked first."""
        return now - self.direct_at < PROBE * self.interval


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Record of a peer that died or left."""

    signed: SignedHeartbeat
    when: float
    may_be_partitioned: bool
    """True if the peer may live beyond a partition, because it did not say good-bye."""


class MemberList:
    """Bounded list of living members and tombstones.

    The few that send us heartbeats, or are suspected, wait on a heap for their judgement; a
    newer heartbeat leaves them where they are until they come to its top. The many known
    through others are looked through together, at most once in twelve intervals.
    """

    def __init__(self, local: PeerId, config: MembershipConfig, rng: Random) -> None:
        self._local = key_of(local)
        self._config = config
        self._capacity: Final = config.capacity
        self._youth: Final = 120.0 * config.interval
        """Seconds for which a member counts as young: as long as a peer of which nothing is
        heard stays listed (`stale`). An older member has been heard of since it was added."""
        # Share of its capacity up to which a view announces new peers to neighbours at once. In
        # a fuller view the digests of heartbeats suffice.
        self._sparse: Final = (7 / 8) * config.capacity
        self._rng = rng
        self._members: dict[bytes, MemberState] = {}
        """Living members by the keys that name them in digests."""
        self.by_key: Final = self._members.get
        """Returns the living member that a digest's key names, or None. It is called thousands
        of times a second."""
        self._tombstones: dict[bytes, Tombstone] = {}
        """Tombstones by key, oldest first."""
        self._prefixes: Counter[bytes | None] = Counter()
        """Number of living members in each network, and in none."""
        self.has_audience = False
        """True if peers that are no neighbours send us heartbeats because of this node's role
        in the run. They are kept beside the passive members."""
        self._era = -math.inf
        """Start of the last interval in which a newcomer was met. Its newcomers share this as
        first sight."""
        self._turns: list[MemberState] = []
        """Members that `sample` returns before it starts again."""
        self._directs = 0
        self._watched: list[tuple[float, int, MemberState]] = []
        self._pushes = count()
        """Orders peers with the same due time by when they were scheduled."""
        self._stale_check_at = math.inf
        self._is_settled = False
        """True if nothing that `settle` reads has changed since its last call."""
        self._settled_at = math.inf

    def settle(self) -> float:
        """Return the time at which `overdue` may next return a member.

        This may tidy the heap, so it is a method: reading a property must not change the
        outcome.
        """
        if not self._is_settled:
            self._settled_at, self._is_settled = self._tidy(), True
        return self._settled_at

    def _tidy(self) -> float:
        """Remove outdated entries from the top of the heap and return when the next member is
        due."""
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
                heapreplace(watched, (due, next(self._pushes), member))
            else:
                return min(when, self._stale_check_at)
        return self._stale_check_at

    def __contains__(self, peer: PeerId) -> bool:
        return self.get(peer) is not None

    def unadmitted(self, may: Callable[[PeerId], bool]) -> list[PeerId]:
        """Return the living members that ``may`` refuses."""
        return [member.peer for member in self._members.values() if not may(member.peer)]

    def get(self, peer: PeerId) -> MemberState | None:
        """Return the state of a living peer, or None."""
        member = self._members.get(peer[KEY])
        return member if member is not None and member.peer == peer else None

    def tombstone(self, peer: PeerId) -> Tombstone | None:
        """Return the tombstone of a dead peer, or None."""
        tombstone = self._tombstones.get(peer[KEY])
        return tombstone if tombstone is not None and tombstone.signed.peer == peer else None

    def has_key_of_another(self, peer: PeerId) -> bool:
        """Return True if another peer, living or dead, has the same key as this one."""
        other = self._members.get(peer[KEY]) or self._tombstones.get(peer[KEY])
        return other is not None and other.signed.peer != peer

    def is_outdated(self, key: bytes, seqno: int) -> bool:
        """Return True if a digest names ourselves, or an old heartbeat of a dead peer."""
        tombstone = self._tombstones.get(key)
        return key == self._local or (tombstone is not None and seqno <= tombstone.signed.seqno)

    def seqno_of_dead(self, peer: PeerId) -> int:
        """Return the last sequence number of a dead peer; -1 if there is no tombstone of it."""
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

    def admit(self, signed: SignedHeartbeat, now: float) -> MemberState:
        """Add a peer that is not listed as living."""
        key = key_of(signed.heartbeat.peer)
        self._tombstones.pop(key, None)
        interval = self._config.paced(signed.heartbeat.interval)
        if now - self._era >= self._config.interval:
            self._era = now
        member = MemberState(signed, now, interval, self._era)
        self._members[key] = member
        self._prefixes[member.prefix] += 1
        self._schedule(member)
        return member

    def record_heartbeat(
        self, member: MemberState, signed: SignedHeartbeat, now: float
    ) -> None:
        """Store the newest heartbeat of a living peer."""
        before, heartbeat = member.signed.heartbeat, signed.heartbeat
        member.record_heartbeat(signed, now)
        if heartbeat.interval != before.interval:
            member.interval = self._config.paced(heartbeat.interval)
        profile, known = heartbeat.profile, before.profile
        if profile is not known and profile.addrs != known.addrs:
            self._leave_prefix(member)
            member.prefix = prefix_of(heartbeat.profile.addrs)
            self._prefixes[member.prefix] += 1

    def prefix(self, peer: PeerId) -> bytes | None:
        """Return the network of a living peer; None if the peer is unknown or has none."""
        member = self.get(peer)
        return None if member is None else member.prefix

    def is_one_of_many(self, prefix: bytes | None) -> bool:
        """Return True if there are so many members outside this network that its share is
        limited."""
        return prefix is not None and len(self._members) - self._prefixes[prefix] >= 16

    def expect(self, peer: PeerId, now: float) -> bool:
        """Expect heartbeats from a living peer itself from now on. Return False if it is
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
        """Mark a living peer as suspected. It is declared dead unless it refutes in time."""
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
            # Intervals between two checks for stale members among those known through others.
            # In a large swarm some member always is stale, and a check each interval took an
            # eighth of a node's time.
            self._stale_check_at = max(later, now + 12.0 * self._config.interval)
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
        """Move a peer to the dead. Return the lost member as it last spoke; None if it was not
        held."""
        member = self.drop(signed.peer)
        if member is not None:
            member = replace(member, profile=signed.heartbeat.profile)
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
        """Number of free places for passive members; negative if the view is overfull."""
        return self._capacity - len(self._members)

    def is_sparse(self) -> bool:
        """Return True if the view is far from full, so that it may hold the whole swarm."""
        return len(self._members) < self._sparse

    def is_crowded(self) -> bool:
        """Return True if the view is nearly full, so that it is only a sample of the swarm."""
        # Share of its capacity from which a view is crowded: 202 of 205, so that a death or two
        # do not make it look for more.
        return len(self._members) > (63 / 64) * self._capacity

    def evictee(
        self, neighbours: Mapping[PeerId, float], keep: PeerId, now: float
    ) -> PeerId | None:
        """Return the member to evict for the newcomer ``keep``, or None if there is room.

        A member of the newcomer's own network is evicted if that network exceeds its share.
        From a full view a young member is evicted if the young exceed their share, else any
        member. Of a few members drawn at random, one is chosen whose network is the most
        frequent among them. So who has many identities in a few networks gets few places.
        """
        pool = self._of_crowded_prefix(keep)
        if not pool:
            if self.room > 0:
                return None
            config, passive = self._config, len(self._members) - self._directs
            is_full_house = passive > config.passive or self._directs > config.direct
            if self.has_audience and not is_full_house:
                return None
            pool = list(self._members.values())
            since = now - self._youth  # members are in the order in which they came
            young = len(pool) - bisect_right(pool, since, key=attrgetter("since"))
            # Share of a full view that young members may take from older ones. Beyond it they
            # displace each other. Inventing names costs a stranger nothing, so without this
            # share names pushed at random would fill the view.
            if young > (1 / 8) * config.capacity:
                pool = pool[-young:]
        if self.has_audience and self._directs <= self._config.direct:
            pool = [member for member in pool if not member.direct]
        spared = {keep, *neighbours}
        drawn = self._rng.sample(pool, min(24, len(pool)))
        drawn = [member for member in drawn if member.peer not in spared]
        crowds = Counter([member.prefix for member in drawn])
        crowds[None] = 1
        return max(drawn, key=lambda member: crowds[member.prefix]).peer if drawn else keep

    def _of_crowded_prefix(self, peer: PeerId) -> list[MemberState]:
        """Return the members in the network of ``peer`` if they exceed its share; else none."""
        prefix = self.prefix(peer)
        # Share of a view that one network may have, where many are known outside it.
        if prefix is None or self._prefixes[prefix] <= (1 / 4) * self._config.capacity:
            return []
        if not self.is_one_of_many(prefix):
            return []
        return [member for member in self._members.values() if member.prefix == prefix]

    def is_young(self, peer: PeerId, now: float) -> bool:
        """Return True if a living peer was added a short time ago."""
        member = self.get(peer)
        return member is not None and member.since > now - self._youth

    def _leave_prefix(self, member: MemberState) -> None:
        self._prefixes[member.prefix] -= 1
        if not self._prefixes[member.prefix]:
            del self._prefixes[member.prefix]

    def sample(self, count: int, first: Iterable[PeerId]) -> tuple[Digest, ...]:
        """Return the digests of ``first`` and of ``count`` other members, without suspected
        ones.

        Members that are new or have a new policy come first. The others come in random order,
        and none comes twice before all had a turn. With an independent draw each time, the last
        of 200 would be named a minute later.
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
        digests = [
            member.signed.digest
            for member in chosen.values()
            if (watch := member.watch) is None or watch.liveness is not Liveness.SUSPECTED
        ]
        return tuple(digests)

    def name_next(self, member: MemberState) -> None:
        """Put a member that is new or has a new policy at the front of the turns of
        `sample`."""
        if len(self._turns) <= 2 * len(self._members):
            self._turns.append(member)

    def candidates(self, neighbours: Mapping[PeerId, float], now: float) -> Iterator[PeerId]:
        """Yield members that could become neighbours in random order, those in the neighbours'
        networks last.

        They are drawn one by one, since one is nearly always enough. Shuffling all of them took
        4 % of a node's time.
        """
        near = {self.prefix(peer) for peer in neighbours} - {None}
        members, later = list(self._members.values()), []
        while members:
            number = self._rng.randrange(len(members))
            members[number], member = members[-1], members[number]
            members.pop()
            is_avoided = member.avoid_until > now or member.liveness is not Liveness.ALIVE
            if member.peer in neighbours or is_avoided:
                continue
            if member.prefix in near:
                later.append(member.peer)
            else:
                yield member.peer
        yield from later

    def maybe_partitioned(self, since: float) -> list[PeerId]:
        """Return the peers that died since ``since`` and may live beyond a partition."""
        return [
            dead.signed.peer
            for dead in self._tombstones.values()
            if dead.may_be_partitioned and dead.when >= since
        ]

    def _schedule(self, member: MemberState) -> None:
        """Schedule the next judgement of ``member`` unless an earlier one is scheduled."""
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
            heappush(self._watched, (due, next(self._pushes), member))

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
                # Intervals after which a suspicion is flooded: the second missing heartbeat is
                # due now, and the peer has had half an interval to answer the probe.
                return since + 2.0 * interval
            end = since + self._config.expiry * interval
        else:
            end = member.seen + self._config.stale * interval
        if watch.liveness is Liveness.SUSPECTED:
            # Intervals that a suspected peer has to refute. With the two until it is suspected
            # this makes 2.8: at 5 s, a death is known 14 s after the last heartbeat plus the
            # time of the flood, which is within 15 s of the death.
            end = min(end, watch.suspected_at + 0.8 * interval)
        return end
