"""Whom a node knows: the living with their newest heartbeats, and the dead, so that they stay dead.

How the silence of a peer is judged, in its own intervals since we first saw its newest heartbeat:

| peer | 1.5 | 2 | 2.8 | `expiry` (3) | `stale` (36) |
|---|---|---|---|---|---|
| beats to us | asked itself | accused to all | dead, unless refuted | dead | |
| known through others | | | | | forgotten |
| accused by another | dead after 0.8 more without a newer heartbeat | | | | |

A newer heartbeat, from whomever, makes a peer fresh again. Two lost heartbeats in a row are normal on a
home connection: an accusation only asks everybody, the accused included, for a sign of life.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush, heapreplace
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.membership.events import Member, MembershipConfig
from p2p.membership.heartbeat import SignedHeartbeat, key_of

PROBE: Final = 1.5
"""Intervals after which a silent peer is asked itself. One heartbeat may come half an interval late."""
ACCUSE: Final = 2.0
"""Intervals after which everybody is asked: a second heartbeat is due now."""
CONFIRM: Final = 0.8
"""Intervals an accused peer has to speak up. With `ACCUSE` this makes 2.8: at 5 s a death is known 14 s
after the last heartbeat plus the time of the flood, within 15 s of the death."""
LOOK_THROUGH: Final = 4.0
"""Intervals between two looks for the stale among all those known through others: in a large swarm somebody
always is, and a look each interval took an eighth of a node's time."""
SPARSE: Final = 7 / 8
"""Share of its capacity up to which a view tells the neighbours whom it has met. A fuller one is a random
sample, in which every death makes room for one more: no news, and the digests with the beats suffice."""
SURPLUS_TRIES: Final = 8
"""Random members looked at for one that may go, before all are: most may."""
MAX_GRAVES: Final = 4096
"""Dead peers remembered, 2 MiB at most: at 1,000 nodes that live for half an hour each, two hours."""


class Stage(Enum):
    """How far the judgement of a silent peer has come."""

    FRESH = "fresh"
    PROBED = "probed"
    ACCUSED = "accused"


@dataclass(slots=True)
class Entry:
    """A living peer."""

    signed: SignedHeartbeat
    seen: float
    """First sight of its newest heartbeat."""
    seqno: int = field(init=False)
    """Of its newest heartbeat: what digests are compared with, thousands of times a second."""
    policy: int = field(init=False)
    """As its newest heartbeat says."""
    due: float = math.inf
    """When its judgement goes on, while it is watched."""
    direct_at: float = -math.inf
    """When it last beat to us itself; minus infinity if it does not."""
    direct_since: float = -math.inf
    """Since when we may expect that; its silence before that means nothing."""
    stage: Stage = Stage.FRESH
    accused_at: float = math.inf
    avoid_until: float = -math.inf
    """Until then it is not asked to be a neighbour: it refused, or could not be reached."""
    waits_until: float = math.inf
    """When the view looks at it again, at the latest; infinite if only with all the others."""

    def __post_init__(self) -> None:
        self.hear(self.signed, self.seen)

    def hear(self, signed: SignedHeartbeat, now: float) -> None:
        """Its newest heartbeat has come."""
        heartbeat = signed.heartbeat
        self.signed, self.seen = signed, now
        self.seqno, self.policy = heartbeat.seqno, heartbeat.profile.policy
        self.stage, self.accused_at = Stage.FRESH, math.inf

    @property
    def interval(self) -> float:
        """Seconds between its heartbeats, as it says."""
        return self.signed.heartbeat.interval

    @property
    def direct(self) -> bool:
        """Whether it beats to us itself."""
        return self.direct_at > -math.inf

    @property
    def is_watched(self) -> bool:
        """Whether its silence must be judged to the second."""
        return self.direct_at > -math.inf or self.stage is Stage.ACCUSED

    def is_heard(self, now: float) -> bool:
        """Whether it beat to us itself a moment ago: no accusation can impress us."""
        return now - self.direct_at < PROBE * self.interval


@dataclass(frozen=True, slots=True)
class Grave:
    """A peer that died or left."""

    signed: SignedHeartbeat
    when: float
    healable: bool
    """Whether it may live on the other side of a partition: it did not say good-bye."""


class View:
    """The living and the dead. Bounded: passive and direct members, graves.

    The few that beat to us, or are accused, wait on a heap for their judgement; a newer heartbeat leaves
    them where they are until they come to its top. The many known through others are looked through
    together, at most once in `LOOK_THROUGH` intervals.
    """

    def __init__(self, local: PeerId, config: MembershipConfig, rng: Random) -> None:
        self._local = key_of(local)
        self._config = config
        self._rng = rng
        self._entries: dict[PeerId, Entry] = {}
        self._graves: dict[PeerId, Grave] = {}
        self._living: dict[bytes, Entry] = {}
        self.named: Final = self._living.get
        """The living peer that the key of a digest means; asked thousands of times a second."""
        self._dead: dict[bytes, Grave] = {}
        self._turns: list[PeerId] = []
        """Whom `sample` is yet to name, before all have their turn again."""
        self._directs = 0
        self._watched: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self._look_through_at = math.inf

    def settle(self) -> float:
        """When `overdue` may have something to say.

        Tidies the heap on the way, so it is no property: who looks must not change what happens.
        """
        watched = self._watched
        while watched:
            when, _, entry = watched[0]
            if entry.waits_until != when:
                heappop(watched)
                continue
            if not entry.is_watched:
                heappop(watched)
                entry.due = entry.waits_until = math.inf
                self._look_through_at = min(self._look_through_at, self._due(entry))
            elif (due := entry.due) > when:
                entry.waits_until = due
                heapreplace(watched, (due, self._count_push(), entry))
            else:
                return min(when, self._look_through_at)
        return self._look_through_at

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._entries

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._entries)

    def get(self, peer: PeerId) -> Entry | None:
        """The entry of a living peer."""
        return self._entries.get(peer)

    def grave(self, peer: PeerId) -> Grave | None:
        """The grave of a dead one."""
        return self._graves.get(peer)

    def is_old(self, key: bytes, seqno: int) -> bool:
        """Whether a digest means ourselves, or words that the dead said."""
        grave = self._dead.get(key)
        return key == self._local or (grave is not None and seqno <= grave.signed.seqno)

    def newest(self, peer: PeerId) -> int:
        """The newest sequence number known of a living or dead peer; -1 if none is."""
        known = self._entries.get(peer) or self._graves.get(peer)
        return known.signed.seqno if known else -1

    def members(self) -> list[Member]:
        """All the living."""
        return [Member.of(entry.signed, entry.seen) for entry in self._entries.values()]

    def update(self, signed: SignedHeartbeat, now: float) -> SignedHeartbeat | None:
        """Take in a newer heartbeat; return the one before it, None for a newcomer."""
        entry = self._entries.get(signed.peer)
        if entry is not None:
            before = entry.signed
            entry.hear(signed, now)
            self._schedule(entry)
            return before
        self._exhume(signed.peer)
        entry = self._entries[signed.peer] = self._living[key_of(signed.peer)] = Entry(signed, now)
        self._schedule(entry)
        if len(self._turns) <= 2 * len(self._entries):
            self._turns.append(signed.peer)
        return None

    def expect(self, peer: PeerId, now: float) -> bool:
        """A living peer beats to us itself, from now on; False if we do not know it."""
        entry = self._entries.get(peer)
        if entry is None:
            return False
        was_direct, entry.direct_at = entry.direct, now
        if not was_direct:
            self._directs += 1
            entry.direct_since = now
            self._schedule(entry)
        return True

    def lose_touch(self, peer: PeerId) -> None:
        """A living peer does not beat to us itself any more."""
        entry = self._entries.get(peer)
        if entry is not None and entry.direct:
            self._directs -= 1
            entry.direct_at = -math.inf
            self._schedule(entry)

    def accuse(self, peer: PeerId, now: float) -> None:
        """A living peer must speak up, or it is dead."""
        entry = self._entries[peer]
        entry.stage, entry.accused_at = Stage.ACCUSED, now
        self._schedule(entry)

    def overdue(self, now: float) -> list[PeerId]:
        """The living whose silence must be judged now."""
        peers = []
        while self.settle() <= now and self._watched and self._watched[0][0] <= now:
            entry = heappop(self._watched)[2]
            entry.waits_until = math.inf
            peers.append(entry.signed.peer)
        if self._look_through_at <= now:
            others = {
                peer: entry.seen + self._config.stale * entry.interval
                for peer, entry in self._entries.items()
                if not entry.is_watched
            }
            peers += [peer for peer, due in others.items() if due <= now]
            later = min((due for due in others.values() if due > now), default=math.inf)
            self._look_through_at = max(later, now + LOOK_THROUGH * self._config.interval)
        return peers

    def judged(self, peer: PeerId) -> None:
        """The judgement of a peer has gone a step further; if it lives, there will be another."""
        entry = self._entries.get(peer)
        if entry is not None:
            self._schedule(entry)

    def drop(self, peer: PeerId) -> Member | None:
        """Forget a living peer altogether."""
        entry = self._entries.pop(peer, None)
        if entry is None:
            return None
        del self._living[key_of(peer)]
        self._directs -= entry.direct
        entry.waits_until = math.inf
        return Member.of(entry.signed, entry.seen)

    def bury(self, signed: SignedHeartbeat, now: float, *, healable: bool) -> Member | None:
        """Move a peer to the dead; returns whom we lost, None if we did not hold it."""
        member = self.drop(signed.peer)
        self._exhume(signed.peer)
        if len(self._graves) >= MAX_GRAVES:
            self._exhume(next(iter(self._graves)))
        self._graves[signed.peer] = self._dead[key_of(signed.peer)] = Grave(signed, now, healable)
        return member

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def room(self) -> int:
        """How many more passive members fit without pushing one out; negative if it is overfull."""
        return self._config.passive + self._config.active - len(self._entries)

    def has_room(self) -> bool:
        """Whether another passive member fits without pushing one out."""
        return self.room > 0

    def is_sparse(self) -> bool:
        """Whether the view holds so few that we may know all there are."""
        return len(self._entries) < SPARSE * (self._config.passive + self._config.active)

    def surplus(self, active: dict[PeerId, None], keep: PeerId) -> PeerId | None:
        """A random passive member that must go for ``keep`` to stay, if the view is too full."""
        passive = len(self._entries) - self._directs
        if self.has_room() or (passive <= self._config.passive and self._directs <= self._config.direct):
            return None
        peers = list(self._entries)
        for _ in range(SURPLUS_TRIES):
            peer = self._rng.choice(peers)
            if not self._entries[peer].direct and peer not in active and peer != keep:
                return peer
        others = [peer for peer, entry in self._entries.items() if not entry.direct and peer not in active]
        return self._rng.choice([peer for peer in others if peer != keep] or [keep])

    def sample(self, count: int, first: Iterable[PeerId]) -> list[SignedHeartbeat]:
        """Heartbeats of ``first`` and of ``count`` others, none of them accused.

        Of the others those met last come first, then all in random order, and nobody twice before everybody
        had a turn: drawn anew each time, the last of 200 would be named a minute later.
        """
        known, turns = self._entries, self._turns
        chosen = dict.fromkeys(peer for peer in first if peer in known)
        left = min(count, len(known))
        while left:
            if not turns:
                turns.extend(known)
                self._rng.shuffle(turns)
            peer = turns.pop()
            if peer in known:
                chosen[peer] = None
                left -= 1
        entries = [known[peer] for peer in chosen]
        return [entry.signed for entry in entries if entry.stage is not Stage.ACCUSED]

    def candidates(self, active: dict[PeerId, None], now: float) -> list[PeerId]:
        """Members that could become neighbours, in random order."""
        peers = [
            peer
            for peer, entry in self._entries.items()
            if peer not in active and entry.stage is Stage.FRESH and entry.avoid_until <= now
        ]
        self._rng.shuffle(peers)
        return peers

    def lost(self, since: float) -> list[PeerId]:
        """The dead, no older than ``since``, that may live beyond a partition."""
        return [peer for peer, grave in self._graves.items() if grave.healable and grave.when >= since]

    def _exhume(self, peer: PeerId) -> None:
        if self._graves.pop(peer, None) is not None:
            del self._dead[key_of(peer)]

    def _schedule(self, entry: Entry) -> None:
        """Look at ``entry`` when it is due, or earlier."""
        due = self._due(entry)
        if not entry.is_watched:
            if due < self._look_through_at:
                self._look_through_at = due
            return
        entry.due = due
        if due < entry.waits_until:
            entry.waits_until = due
            heappush(self._watched, (due, self._count_push(), entry))

    def _count_push(self) -> int:
        """Among those due at once, who was scheduled first comes first."""
        self._pushes += 1
        return self._pushes

    def _due(self, entry: Entry) -> float:
        """When the judgement of a living peer goes on."""
        interval = entry.signed.heartbeat.interval
        if not entry.direct:
            end = entry.seen + self._config.stale * interval
        else:
            since = max(entry.seen, entry.direct_since)
            if entry.stage is Stage.FRESH:
                return since + PROBE * interval
            if entry.stage is Stage.PROBED:
                return since + ACCUSE * interval
            end = since + self._config.expiry * interval
        if entry.stage is Stage.ACCUSED:
            end = min(end, entry.accused_at + CONFIRM * interval)
        return end
