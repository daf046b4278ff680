"""Whom a node knows: the living with their newest heartbeats, and the dead, so that they stay dead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from itertools import takewhile
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.membership.entry import ACCUSE, CONFIRM, PROBE, Entry, Grave, Stage
from p2p.membership.events import Member, MembershipConfig
from p2p.membership.heartbeat import KEY, SignedHeartbeat, key_of
from p2p.membership.prefix import prefix_of
from p2p.membership.rumours import MEMORY

LOOK_THROUGH: Final = 12.0
"""Intervals between two looks for the stale among all those known through others: in a large swarm somebody
always is, and a look each interval took an eighth of a node's time."""
SPARSE: Final = 7 / 8
"""Share of its capacity up to which a view tells the neighbours whom it has met. A fuller one is a random
sample, in which every death makes room for one more: no news, and the digests with the beats suffice."""
CROWDED: Final = 63 / 64
"""Share of its capacity from which a view is crowded."""
YOUNG: Final = 120.0
"""Intervals for which a member is young: as long as one that nobody hears of stays listed (`stale`). What has
outlived them was named again meanwhile."""
YOUNG_SHARE: Final = 1 / 8
"""Share of a full view that the young may take from the old. Beyond it a newcomer takes the seat of another
young one. Names cost a stranger nothing to tell, and pushed at random he fills a view of 205 in the time of a
thousand; so he gets 26 seats in ten minutes. In a swarm of 1,000 an honest view takes in 30 in that time."""
PREFIX_SHARE: Final = 1 / 4
"""Share of a view that one network may have (`prefix`), where `OTHERS` are known outside it."""
OTHERS: Final = 16
"""Members outside a network from which on it is not the only one there is."""
SURPLUS_TRIES: Final = 8
"""Random members of which the one goes whose network, or whose introducer, has most of those that may go."""
MAX_GRAVES: Final = 4096
"""Dead peers remembered, 2 MiB at most."""


class View:
    """The living and the dead. Bounded: passive and direct members, graves.

    The few that beat to us, or are accused, wait on a heap for their judgement; a newer heartbeat leaves
    them where they are until they come to its top. The many known through others are looked through
    together, at most once in `LOOK_THROUGH` intervals.
    """

    __slots__ = (
        "_capacity", "_config", "_directs", "_entries", "_era", "_graves", "_is_settled", "_local",
        "_look_through_at", "_prefixes", "_pushes", "_rng", "_settled_at", "_sparse", "_turns", "_watched",
        "has_audience", "named",
    )  # fmt: skip

    def __init__(self, local: PeerId, config: MembershipConfig, rng: Random) -> None:
        self._local = key_of(local)
        self._config = config
        self._capacity: Final = config.capacity
        self._sparse: Final = SPARSE * config.capacity
        self._rng = rng
        self._entries: dict[bytes, Entry] = {}
        """The living, by the keys that name them in digests."""
        self.named: Final = self._entries.get
        """The living peer that the key of a digest means; asked thousands of times a second."""
        self._graves: dict[bytes, Grave] = {}
        """The dead, by key, longest dead first."""
        self._prefixes: Counter[bytes] = Counter()
        """How many of the living are in each network."""
        self.has_audience = False
        """Whether peers beat to us that are no neighbours, because we are an officer of the run: they are
        kept beside the passive members."""
        self._era = -math.inf
        """When the last interval began in which a newcomer was met: what is noted as its first sight."""
        self._turns: list[Entry] = []
        """Whom `sample` is yet to name, before all have their turn again."""
        self._directs = 0
        self._watched: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self._look_through_at = math.inf
        self._is_settled = False
        """Whether nothing that `settle` looks at has changed since it looked."""
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
        """Let the heap begin with somebody who is due when it says; return when that is."""
        watched = self._watched
        while watched:
            when, _, entry = watched[0]
            watch = entry.watch
            if watch is None or watch.waits_until != when:
                heappop(watched)
            elif not entry.is_watched:
                heappop(watched)
                entry.watch = None
                self._look_through_at = min(self._look_through_at, self._due(entry))
            elif (due := watch.due) > when:
                watch.waits_until = due
                heapreplace(watched, (due, self._count_push(), entry))
            else:
                return min(when, self._look_through_at)
        return self._look_through_at

    def __contains__(self, peer: PeerId) -> bool:
        return self.get(peer) is not None

    def without(self, may: Callable[[PeerId], bool]) -> list[PeerId]:
        """The living that ``may`` refuses."""
        return [entry.peer for entry in self._entries.values() if not may(entry.peer)]

    def get(self, peer: PeerId) -> Entry | None:
        """The entry of a living peer."""
        entry = self._entries.get(peer[KEY])
        return entry if entry is not None and entry.peer == peer else None

    def grave(self, peer: PeerId) -> Grave | None:
        """The grave of a dead one."""
        grave = self._graves.get(peer[KEY])
        return grave if grave is not None and grave.signed.peer == peer else None

    def is_taken(self, peer: PeerId) -> bool:
        """Whether another peer, living or dead, has the key that would name this one."""
        other = self._entries.get(peer[KEY]) or self._graves.get(peer[KEY])
        return other is not None and other.signed.peer != peer

    def is_old(self, key: bytes, seqno: int) -> bool:
        """Whether a digest means ourselves, or words that the dead said."""
        grave = self._graves.get(key)
        return key == self._local or (grave is not None and seqno <= grave.signed.seqno)

    def newest(self, peer: PeerId) -> int:
        """The newest sequence number known of a living or dead peer; -1 if none is."""
        known = self.get(peer) or self.grave(peer)
        return known.signed.seqno if known else -1

    def members(self) -> list[Member]:
        """All the living."""
        return [
            Member(entry.peer, entry.signed.heartbeat.profile, entry.seen) for entry in self._entries.values()
        ]

    def update(self, signed: SignedHeartbeat, source: PeerId, now: float) -> SignedHeartbeat | None:
        """Take in a newer heartbeat that ``source`` sent; return the one before it, None for a newcomer."""
        entry = self._entries.get(signed.heartbeat.peer[KEY])
        if entry is None:
            self.admit(signed, source, now)
            return None
        before = entry.signed
        self.renew(entry, signed, now)
        return before

    def renew(self, entry: Entry, signed: SignedHeartbeat, now: float) -> None:
        """A newer heartbeat of a member has come."""
        policy = entry.policy
        self.hear(entry, signed, now)
        self._schedule(entry)
        if entry.policy != policy:
            self._name_next(entry)

    def admit(self, signed: SignedHeartbeat, source: PeerId, now: float) -> None:
        """Take in a peer that is not known to live; ``source`` named it."""
        peer = signed.heartbeat.peer
        key = key_of(peer)
        self._graves.pop(key, None)
        interval = self._config.paced(signed.heartbeat.interval)
        if now - self._era >= self._config.interval:
            self._era = now
        entry = Entry(signed, now, None if source == peer else source, interval, self._era)
        self._entries[key] = entry
        if entry.prefix is not None:
            self._prefixes[entry.prefix] += 1
        self._schedule(entry)
        self._name_next(entry)

    def hear(self, entry: Entry, signed: SignedHeartbeat, now: float) -> None:
        """A living peer's newest heartbeat has come."""
        before, heartbeat = entry.signed.heartbeat, signed.heartbeat
        entry.hear(signed, now)
        if heartbeat.interval != before.interval:
            entry.interval = self._config.paced(heartbeat.interval)
        if heartbeat.profile is not before.profile and heartbeat.profile.addrs != before.profile.addrs:
            self._leave_prefix(entry)
            entry.prefix = prefix_of(heartbeat.profile.addrs)
            if entry.prefix is not None:
                self._prefixes[entry.prefix] += 1

    def prefix(self, peer: PeerId) -> bytes | None:
        """The network of a living peer; None if it is in none, or not known."""
        entry = self.get(peer)
        return None if entry is None else entry.prefix

    def is_one_of_many(self, prefix: bytes | None) -> bool:
        """Whether there are enough members outside this network to choose from."""
        return prefix is not None and len(self._entries) - self._prefixes[prefix] >= OTHERS

    def expect(self, peer: PeerId, now: float) -> bool:
        """A living peer beats to us itself, from now on; False if we do not know it."""
        entry = self.get(peer)
        if entry is None:
            return False
        watch = entry.watched()
        was_direct, watch.direct_at = watch.direct_at > -math.inf, now
        if not was_direct:
            self._directs += 1
            watch.direct_since = now
            self._schedule(entry)
        return True

    def lose_touch(self, peer: PeerId) -> None:
        """A living peer does not beat to us itself any more."""
        entry = self.get(peer)
        if entry is not None and entry.direct:
            self._directs -= 1
            entry.watched().direct_at = -math.inf
            self._schedule(entry)

    def accuse(self, entry: Entry, now: float) -> None:
        """A living peer must speak up, or it is dead."""
        watch = entry.watched()
        watch.stage, watch.accused_at = Stage.ACCUSED, now
        self._schedule(entry)

    def overdue(self, now: float) -> list[Entry]:
        """The living whose silence must be judged now."""
        entries = []
        self._is_settled = False
        while self._tidy() <= now and self._watched and self._watched[0][0] <= now:
            entry = heappop(self._watched)[2]
            entry.watched().waits_until = math.inf
            entries.append(entry)
        if self._look_through_at <= now:
            others = [(self._due(entry), entry) for entry in self._entries.values() if not entry.is_watched]
            entries += [entry for due, entry in others if due <= now]
            later = min((due for due, _ in others if due > now), default=math.inf)
            self._look_through_at = max(later, now + LOOK_THROUGH * self._config.interval)
        return entries

    def judged(self, entry: Entry) -> None:
        """The judgement of a peer has gone a step further; if it lives, there will be another."""
        if self._entries.get(entry.peer[KEY]) is entry:
            self._schedule(entry)

    def drop(self, peer: PeerId) -> Member | None:
        """Forget a living peer altogether."""
        entry = self.get(peer)
        if entry is None:
            return None
        del self._entries[peer[KEY]]
        self._leave_prefix(entry)
        self._directs -= entry.direct
        entry.watch = None
        self._is_settled = False
        return Member(entry.peer, entry.signed.heartbeat.profile, entry.seen)

    def bury(self, signed: SignedHeartbeat, now: float, *, healable: bool) -> Member | None:
        """Move a peer to the dead; returns whom we lost, None if we did not hold it."""
        member = self.drop(signed.peer)
        key, graves = key_of(signed.peer), self._graves
        graves.pop(key, None)
        while graves and (len(graves) >= MAX_GRAVES or graves[next(iter(graves))].when < now - MEMORY):
            del graves[next(iter(graves))]
        graves[key] = Grave(signed, now, healable)
        return member

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def room(self) -> int:
        """How many more passive members fit without pushing one out; negative if it is overfull."""
        return self._capacity - len(self._entries)

    def has_room(self) -> bool:
        """Whether another passive member fits without pushing one out."""
        return len(self._entries) < self._capacity

    def is_sparse(self) -> bool:
        """Whether the view holds so few that we may know all there are."""
        return len(self._entries) < self._sparse

    def is_crowded(self) -> bool:
        """Whether the view holds about as many as it may: it is a sample, and so are others'."""
        return len(self._entries) > CROWDED * self._capacity

    def surplus(self, active: Mapping[PeerId, float], keep: PeerId, now: float) -> PeerId | None:
        """Who must go for the newcomer ``keep`` to stay, if the view, or its network's share, is too full.

        A network beyond its share changes only among itself. Of a full view a young member goes if the
        young have their share, else any; and among a few drawn at random the one whose network or whose
        introducer has most of those that might go: so that neither one neighbour nor one address range,
        whatever it names, has more than it would by chance.
        """
        pool = self._of_crowded_prefix(keep) if self._prefixes else []
        if not pool:
            passive = len(self._entries) - self._directs
            is_full_house = passive > self._config.passive or self._directs > self._config.direct
            if self.has_room() or (self.has_audience and not is_full_house):
                return None
            young = self._young(now)
            all_of_them = self._entries.values()
            pool = young if len(young) > YOUNG_SHARE * self._config.capacity else list(all_of_them)
        spares_direct = self.has_audience and self._directs <= self._config.direct
        pool = [
            entry
            for entry in pool
            if entry.peer not in active and entry.peer != keep and not (spares_direct and entry.direct)
        ]
        if not pool:
            return keep
        return self._most_crowded(pool).peer

    def _most_crowded(self, pool: list[Entry]) -> Entry:
        """Of a few of ``pool`` the one whose network or introducer has most of it."""
        prefixes = Counter([entry.prefix for entry in pool if entry.prefix is not None])
        introducers = Counter([entry.introducer for entry in pool])
        drawn = self._rng.sample(pool, min(SURPLUS_TRIES, len(pool)))
        return max(drawn, key=lambda entry: max(prefixes[entry.prefix or b""], introducers[entry.introducer]))

    def _of_crowded_prefix(self, peer: PeerId) -> list[Entry]:
        """The members in the network of ``peer``, if they are more than its share; else none."""
        prefix = self.prefix(peer)
        if prefix is None or self._prefixes[prefix] <= PREFIX_SHARE * self._config.capacity:
            return []
        if not self.is_one_of_many(prefix):
            return []
        return [entry for entry in self._entries.values() if entry.prefix == prefix]

    def _young(self, now: float) -> list[Entry]:
        """The members that were met last; a dict keeps them in the order in which they came."""
        since = now - YOUNG * self._config.interval
        return list(takewhile(lambda entry: entry.since > since, reversed(self._entries.values())))

    def _leave_prefix(self, entry: Entry) -> None:
        if entry.prefix is not None:
            self._prefixes[entry.prefix] -= 1
            if not self._prefixes[entry.prefix]:
                del self._prefixes[entry.prefix]

    def sample(self, count: int, first: Iterable[PeerId]) -> list[SignedHeartbeat]:
        """Heartbeats of ``first`` and of ``count`` others, none of them accused.

        Of the others those come first that were met last, or have a new policy, then all in random order,
        and nobody twice before everybody had a turn: drawn anew each time, the last of 200 would be named a
        minute later.
        """
        known, turns = self._entries, self._turns
        chosen = {peer: entry for peer in first if (entry := self.get(peer)) is not None}
        left = min(count, len(known))
        while left:
            if not turns:
                turns.extend(known.values())
                self._rng.shuffle(turns)
            entry = turns.pop()
            if known.get(entry.peer[KEY]) is entry:
                chosen[entry.peer] = entry
                left -= 1
        return [
            entry.signed
            for entry in chosen.values()
            if (watch := entry.watch) is None or watch.stage is not Stage.ACCUSED
        ]

    def candidates(self, active: Mapping[PeerId, float], now: float) -> Iterator[PeerId]:
        """Members that could become neighbours, in random order, those of the neighbours' networks last.

        Drawn one by one, for one is nearly always enough: to shuffle all of them took 4 % of a node's time.
        """
        if self._prefixes:
            yield from self._by_network(active, now)
            return
        entries = list(self._entries.values())
        while entries:
            number = self._rng.randrange(len(entries))
            entries[number], entry = entries[-1], entries[number]
            entries.pop()
            if entry.peer not in active and entry.stage is Stage.FRESH and entry.avoid_until <= now:
                yield entry.peer

    def _by_network(self, active: Mapping[PeerId, float], now: float) -> list[PeerId]:
        peers = [
            entry.peer
            for entry in self._entries.values()
            if entry.peer not in active and entry.stage is Stage.FRESH and entry.avoid_until <= now
        ]
        self._rng.shuffle(peers)
        near = Counter([self.prefix(peer) for peer in active])
        del near[None]
        peers.sort(key=lambda peer: near[self.prefix(peer)])
        return peers

    def lost(self, since: float) -> list[PeerId]:
        """The dead, no older than ``since``, that may live beyond a partition."""
        graves = self._graves.values()
        return [grave.signed.peer for grave in graves if grave.healable and grave.when >= since]

    def _schedule(self, entry: Entry) -> None:
        """Look at ``entry`` when it is due, or earlier."""
        due, watch = self._due(entry), entry.watch
        if watch is not None and watch.waits_until == self._settled_at:
            self._is_settled = False
        if watch is None or not (watch.direct_at > -math.inf or watch.stage is Stage.ACCUSED):
            if due < self._look_through_at:
                self._look_through_at = due
                self._is_settled = False
            return
        watch.due = due
        if due < watch.waits_until:
            self._is_settled = False
            watch.waits_until = due
            heappush(self._watched, (due, self._count_push(), entry))

    def _name_next(self, entry: Entry) -> None:
        if len(self._turns) <= 2 * len(self._entries):
            self._turns.append(entry)

    def _count_push(self) -> int:
        """Among those due at once, who was scheduled first comes first."""
        self._pushes += 1
        return self._pushes

    def _due(self, entry: Entry) -> float:
        """When the judgement of a living peer goes on."""
        interval, watch = entry.interval, entry.watch
        if watch is None:
            return entry.seen + self._config.stale * interval
        if watch.direct_at > -math.inf:
            since = max(entry.seen, watch.direct_since)
            if watch.stage is Stage.FRESH:
                return since + PROBE * interval
            if watch.stage is Stage.PROBED:
                return since + ACCUSE * interval
            end = since + self._config.expiry * interval
        else:
            end = entry.seen + self._config.stale * interval
        if watch.stage is Stage.ACCUSED:
            end = min(end, watch.accused_at + CONFIRM * interval)
        return end
