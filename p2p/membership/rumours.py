"""What must be told to everybody: accusations, refutations, good-byes; and quotas against telling too much.

A rumour about a peer has a rank: ``2 * seqno`` for "it lives", one more for "nothing came after that" and
"it left". It is passed on only when its rank is higher than any heard before, so each flood ends, a
refutation outruns its accusation, and no accusation can be repeated without new signed words of the accused.

A flood would cross most links both ways, since both ends hear of it at about the same time. So one end of
each link passes it on at once, and the other only after `SECOND_WAVE`, if it has not heard it from there.
News of newcomers take turns in the same way: what a neighbour has named meanwhile, it is not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Final, TypeVar

from p2p.identity import PeerId
from p2p.membership.heartbeat import MAX_INTERVAL, SignedHeartbeat, key_of
from p2p.membership.messages import MAX_HEARTBEATS, Digest

T = TypeVar("T")

FLUSH_DELAY: Final = 0.2
"""Seconds between two messages of rumours: the first goes out at once, those of a disaster are gathered."""
SECOND_WAVE: Final = 0.2
"""Seconds that one end of each link waits whether the other knows already; more than a message takes."""
NEWS_DELAY: Final = 0.75
"""Seconds that news of newcomers are gathered for: they are many at once, and no node waits for them. The end
of a link that does not go first waits once more, and then nearly always has nothing left to tell: with both
ends telling each other, three of ten messages of a swarm under churn were news, and most of them stale."""
MEMORY: Final = 1200.0
"""Seconds for which a rumour is remembered at least, so that it cannot be told again. No flood lasts for
one; but somebody whom it missed may hold the dead for `MembershipConfig.stale`, tell a newcomer who holds it
as long again, and must not find anybody by then who has forgotten."""
MAX_NEWS: Final = 64
"""Newcomers told of at once, as many as may be asked for at once."""
MAX_RUMOURS: Final = 4096
"""Peers whose last rumour is remembered, in each of two generations: a drop of 4,000 nodes at once still
floods each only once."""
QUOTA_UNIT: Final = 256
"""Bytes, about a heartbeat: what the quota of a connection counts in."""
QUOTA_RATE: Final = 200.0
"""Units per second. A neighbour in a storm sends up to 160; verifying 200 takes about 1.5 % of a core."""
QUOTA_BURST: Final = 2000.0
"""Units at once: the death of 1,000 peers in one zone, told from both sides of it."""
MIN_QUOTAS: Final = 16
"""Connections counted before anybody looks which are idle."""
MAX_QUOTAS: Final = 8192
"""Connections counted; beyond it the oldest starts afresh."""


_ROUNDING: Final = -1e-3
"""Tokens that may be lacking. The time at which a bucket was empty is a float of seconds: after a year the
difference of two is good to 4e-9 s, less than a millionth of a token at `QUOTA_RATE`."""
_NEVER: Final = -1 << 1
"""The rank of a peer of whom nothing was told."""
_ACCUSED_LATELY: Final = 2 * MAX_INTERVAL
"""Seconds for which it is remembered when somebody was accused: two intervals, as long as there are."""


@dataclass(slots=True)
class Rumour:
    """Something to pass on to all neighbours that do not know it yet."""

    signed: SignedHeartbeat
    accused: bool
    """Whether it is an accusation; else it is a sign of life, or a good-bye."""
    known_by: dict[PeerId, None] = field(default_factory=dict)


class Rumours:
    """Which rumours were heard, and which wait to be passed on."""

    __slots__ = (
        "_first", "_first_at", "_late_news", "_local", "_news", "_news_at", "_passed_at", "_ranks", "_second",
        "_second_at", "accused", "flush_at", "has_news",
    )  # fmt: skip

    def __init__(self, local: PeerId) -> None:
        self._local = local
        self._passed_at = -math.inf
        self._first_at = self._second_at = self._news_at = math.inf
        self.flush_at = math.inf
        """When to pass on what waits."""
        self._ranks = _Ranks()
        self.accused: Final = self._ranks.accused
        """Of whom the last rumour was no sign of life, lately."""
        self._first: dict[PeerId, Rumour] = {}
        self._second: dict[PeerId, Rumour] = {}
        self._news: dict[bytes, tuple[PeerId, ...]] = {}
        """Newcomers, by the keys of their digests, and which neighbours know of each."""
        self._late_news: dict[bytes, tuple[PeerId, ...]] = {}
        """Those of whom the neighbours that are to tell us first have not told us yet."""
        self.has_news = False
        """Whether newcomers wait to be named."""

    def is_accused(self, peer: PeerId, since: float) -> bool:
        """Whether the last rumour about ``peer`` was no sign of life, and came after ``since``."""
        return self._ranks.accused_at(peer) > since

    def was_suspected(self, peer: PeerId, since: float) -> bool:
        """Whether an accusation or a good-bye of ``peer`` was passed on after ``since``, refuted or not."""
        return self._ranks.suspected_at(peer) > since

    def last_words(self, peer: PeerId) -> int:
        """The sequence number after which, they say, nothing came from ``peer``; -1 if nobody says so."""
        rank = self._ranks.of(peer)
        return rank >> 1 if rank & 1 else -1

    def is_old(self, peer: PeerId, seqno: int, *, accused: bool, source: PeerId) -> bool:
        """Whether this was heard before; if it still waits here, ``source`` need not be told."""
        if 2 * seqno + accused > self._ranks.of(peer):
            return False
        waiting = self._first.get(peer) or self._second.get(peer)
        if waiting is not None and waiting.signed.seqno == seqno and waiting.accused == accused:
            waiting.known_by[source] = None
        return True

    def spread(self, signed: SignedHeartbeat, *, accused: bool, source: PeerId, now: float) -> None:
        """Pass it on, as soon as may be, unless something as good was passed on before."""
        peer, rank = signed.peer, 2 * signed.seqno + (accused or signed.heartbeat.leaving)
        if rank <= self._ranks.of(peer):
            return
        self._ranks.put(peer, rank, now)
        self._second.pop(peer, None)
        if len(self._first) >= MAX_RUMOURS and peer not in self._first:
            return  # they go out at 160 a second; so many do not come by honest means
        self._first[peer] = Rumour(signed, accused, {source: None})
        self._first_at = max(now, self._passed_at + FLUSH_DELAY)
        self._arm()

    def announce(self, peer: PeerId, source: PeerId, now: float) -> None:
        """Tell the neighbours, by digest, that ``peer`` is new; all but ``source``, who told us."""
        if len(self._news) < MAX_RUMOURS:
            self._news[key_of(peer)] = (source,)
            self.has_news = True
        self._news_at = min(self._news_at, now + NEWS_DELAY)
        self._arm()

    def heard_of(self, digests: Iterable[Digest], source: PeerId) -> None:
        """``source`` knows of these: those that wait here it need not be told."""
        for digest in digests:
            key = digest[0]
            for news in (self._news, self._late_news):
                if key in news and source not in news[key]:
                    news[key] = (*news[key], source)

    def take(self, now: float, neighbours: Iterable[PeerId]) -> list[tuple[list[PeerId], list[Rumour]]]:
        """What to pass on now, and to which of ``neighbours``: at most `MAX_HEARTBEATS` rumours a wave."""
        taken: list[tuple[list[PeerId], list[Rumour]]] = []
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
            for rumour in first:
                rumour.known_by.update(dict.fromkeys(at_once))
                if not all(map(rumour.known_by.__contains__, neighbours)):
                    self._second[rumour.signed.peer] = rumour
                    self._second_at = min(self._second_at, now + SECOND_WAVE)
        self._arm()
        return taken

    def _goes_first(self, neighbours: Iterable[PeerId]) -> list[PeerId]:
        """Those for whom ours is the end of the link that does not wait: it is drawn, once for each pair."""
        local, parity = self._local, self._local[-1] & 1
        return [peer for peer in neighbours if (local < peer) is (peer[-1] & 1 == parity)]

    def take_news(self, now: float, neighbours: Iterable[PeerId]) -> list[tuple[list[PeerId], list[bytes]]]:
        """The keys of the new peers to tell of now and to whom, oldest first, at most `MAX_NEWS` a wave."""
        if self._news_at > now:
            return []
        late, waiting = self._late_news, list(self._news.items())
        at_once = tuple(self._goes_first(neighbours))
        self._news = dict(waiting[MAX_NEWS:])  # a new one: an emptied dict keeps its size
        self._late_news = {
            key: (*known_by, *at_once)
            for key, known_by in waiting[:MAX_NEWS]
            if not all([peer in at_once or peer in known_by for peer in neighbours])
        }
        self.has_news = bool(self._news or self._late_news)
        self._news_at = now + NEWS_DELAY if self.has_news else math.inf
        self._arm()
        groups: dict[tuple[bytes, ...], list[PeerId]] = {}
        for peer in neighbours:
            keys = [key for key, known_by in late.items() if peer not in known_by]
            if peer in at_once:
                keys += [key for key, known_by in waiting[:MAX_NEWS] if peer not in known_by]
            if keys:
                groups.setdefault(tuple(keys), []).append(peer)
        return [(peers, list(keys)) for keys, peers in groups.items()]

    def _arm(self) -> None:
        self.flush_at = min(self._first_at, self._second_at, self._news_at)


class _Ranks:
    """The rank of the last rumour about each peer, remembered for one to two times `MEMORY`.

    In two generations: with a time for each, a thousand ranks took three times as much memory.
    """

    __slots__ = ("_old", "_suspected", "_turned_at", "_young", "accused")

    def __init__(self) -> None:
        self._young: dict[PeerId, int] = {}
        self._old: dict[PeerId, int] = {}
        self._turned_at = -math.inf
        self.accused: dict[PeerId, None] = {}
        """Those of `_suspected` of whom no sign of life came since."""
        self._suspected: dict[PeerId, float] = {}
        """When a flood ran that asked for a peer, or said good-bye for it, longest ago first."""

    def of(self, peer: PeerId) -> int:
        """The rank of the last rumour about ``peer``."""
        rank = self._young.get(peer)
        return self._old.get(peer, _NEVER) if rank is None else rank

    def accused_at(self, peer: PeerId) -> float:
        """When ``peer`` was accused; minus infinity if that is long ago, or a sign of life came since."""
        return self._suspected.get(peer, -math.inf) if peer in self.accused else -math.inf

    def suspected_at(self, peer: PeerId) -> float:
        """When ``peer`` was accused or said good-bye, though a sign of life may have come since."""
        return self._suspected.get(peer, -math.inf)

    def put(self, peer: PeerId, rank: int, now: float) -> None:
        """A rumour has come."""
        if now - self._turned_at > MEMORY or len(self._young) >= MAX_RUMOURS:
            self._young, self._old, self._turned_at = {}, self._young, now
        self._young[peer] = rank
        suspected = self._suspected
        while suspected:
            oldest = next(iter(suspected))
            if suspected[oldest] >= now - _ACCUSED_LATELY and len(suspected) < MAX_RUMOURS:
                break
            del suspected[oldest]
            self.accused.pop(oldest, None)
        if rank & 1:
            suspected.pop(peer, None)
            suspected[peer] = now
            self.accused[peer] = None
        else:
            self.accused.pop(peer, None)


def _told(neighbours: Iterable[PeerId], rumours: list[Rumour]) -> list[tuple[list[PeerId], list[Rumour]]]:
    """Those of ``neighbours`` who do not know them yet, grouped by what they do not know."""
    if len(rumours) == 1:  # nearly always
        peers = list(filterfalse(rumours[0].known_by.__contains__, neighbours))
        return [(peers, rumours)] if peers else []
    return _grouped(neighbours, rumours, lambda rumour, peer: peer not in rumour.known_by)


def _split(waiting: dict[PeerId, Rumour]) -> tuple[list[Rumour], dict[PeerId, Rumour]]:
    """The oldest, as many as fit a message, and the rest."""
    rumours = list(waiting.values())
    if len(rumours) <= MAX_HEARTBEATS:
        return rumours, {}
    rest = rumours[MAX_HEARTBEATS:]
    return rumours[:MAX_HEARTBEATS], {rumour.signed.peer: rumour for rumour in rest}


def _grouped(
    neighbours: Iterable[PeerId], items: list[T], is_for: Callable[[T, PeerId], bool]
) -> list[tuple[list[PeerId], list[T]]]:
    """Neighbours for whom the same ``items`` are meant, and these: what is sent is encoded once."""
    groups: dict[tuple[int, ...], list[PeerId]] = {}
    for peer in neighbours if items else ():
        meant = tuple([number for number, item in enumerate(items) if is_for(item, peer)])
        if meant:
            groups.setdefault(meant, []).append(peer)
    return [(peers, [items[number] for number in meant]) for meant, peers in groups.items()]


@dataclass(slots=True)
class TokenBucket:
    """So many at once, so many per second."""

    rate: float
    burst: float
    tokens: float
    updated: float

    def take(self, count: float, now: float) -> bool:
        """Take ``count`` tokens, if they are there."""
        tokens = self.tokens + (now - self.updated) * self.rate  # as `available`, without a call each time
        if tokens > self.burst:
            tokens = self.burst
        self.updated = now
        is_there = tokens >= count
        self.tokens = tokens - count if is_there else tokens
        return is_there

    def available(self, now: float) -> float:
        """Tokens there are now."""
        self.tokens = min(self.burst, self.tokens + (now - self.updated) * self.rate)
        self.updated = now
        return self.tokens


class Quotas:
    """A token bucket for each peer, or for each network.

    Of each only one number is kept, the time at which it was empty, from which follows how many tokens it
    holds: a node counts seven things for each of its peers, and a bucket for each took 4 KiB of a node.
    """

    __slots__ = ("_burst", "_emptied", "_rate", "_sweep_at")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._emptied: dict[PeerId | bytes, float] = {}
        self._sweep_at = MIN_QUOTAS

    def __len__(self) -> int:
        return len(self._emptied)

    def take(self, peer: PeerId | bytes, now: float, count: float = 1.0) -> bool:
        """Take ``count`` tokens of those of ``peer``, if it has them."""
        emptied = self._emptied.get(peer)
        if emptied is None:
            if len(self._emptied) >= self._sweep_at:
                self._sweep(now)
            left = self._burst - count
        else:
            left = (now - emptied) * self._rate
            left = (left if left < self._burst else self._burst) - count
        if left < _ROUNDING:
            return False
        self._emptied[peer] = now - left / self._rate
        return True

    def has(self, peer: PeerId | bytes, now: float) -> bool:
        """Whether ``peer`` has a token left."""
        emptied = self._emptied.get(peer)
        return emptied is None or (now - emptied) * self._rate >= 1 + _ROUNDING

    def charge(self, peer: PeerId | bytes, now: float) -> None:
        """Take one token of ``peer``, on credit if need be, but no deeper than as much as it may have."""
        if not self.take(peer, now):
            owed = (now - self._emptied.get(peer, now)) * self._rate - 1
            self._emptied[peer] = now - max(owed, -self._burst) / self._rate

    def _sweep(self, now: float) -> None:
        """Drop buckets that are full, as new ones are; and the oldest, if there are too many still."""
        full_since, emptied = now - self._burst / self._rate, self._emptied
        for peer in [peer for peer, when in emptied.items() if when <= full_since]:
            del emptied[peer]
        if len(emptied) >= MAX_QUOTAS:
            del emptied[next(iter(emptied))]
        self._sweep_at = min(MAX_QUOTAS, max(MIN_QUOTAS, 2 * len(emptied)))
