"""What must be told to everybody: accusations, refutations, good-byes; and quotas against telling too much.

A rumour about a peer has a rank: ``2 * seqno`` for "it lives", one more for "nothing came after that" and
"it left". It is passed on only when its rank is higher than any heard before, so each flood ends, a
refutation outruns its accusation, and no accusation can be repeated without new signed words of the accused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from p2p.identity import PeerId
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.messages import MAX_HEARTBEATS

FLUSH_DELAY: Final = 0.2
"""Seconds that rumours are gathered for. A flood crosses 1,000 nodes in five hops."""
NEWS_DELAY: Final = 0.5
"""Seconds that news of newcomers are gathered for: they are many at once, and nobody waits for them."""
MAX_NEWS: Final = 64
"""Newcomers told of at once, as many as may be asked for at once."""
MAX_RUMOURS: Final = 4096
"""Peers whose last rumour is remembered: a drop of 4,000 nodes at once still floods each only once."""
QUOTA_UNIT: Final = 256
"""Bytes, about a heartbeat: what the quota of a connection counts in."""
QUOTA_RATE: Final = 200.0
"""Units per second. A neighbour in a storm sends up to 160; verifying 200 takes about 1.5 % of a core."""
QUOTA_BURST: Final = 2000.0
"""Units at once: the death of 1,000 peers in one zone, told from both sides of it."""
MAX_QUOTAS: Final = 8192
"""Connections counted; beyond it the oldest starts afresh."""


@dataclass(slots=True)
class Rumour:
    """Something to pass on to all neighbours that do not know it yet."""

    signed: SignedHeartbeat
    accused: bool
    """Whether it is an accusation; else it is a sign of life, or a good-bye."""
    known_by: dict[PeerId, None] = field(default_factory=dict)


class Rumours:
    """Which rumours were heard, and which wait to be passed on."""

    def __init__(self) -> None:
        self._rumours_at = math.inf
        self._news_at = math.inf
        self._ranks: dict[PeerId, int] = {}
        self._queue: dict[PeerId, Rumour] = {}
        self._news: dict[PeerId, PeerId] = {}

    @property
    def flush_at(self) -> float:
        """When to pass on what waits."""
        return min(self._rumours_at, self._news_at)

    def newest(self, peer: PeerId) -> int:
        """The highest sequence number in a rumour about ``peer``; -1 if there was none."""
        return self._ranks.get(peer, -1) >> 1

    def is_accused(self, peer: PeerId) -> bool:
        """Whether the last rumour about ``peer`` was no sign of life."""
        return bool(self._ranks.get(peer, 0) & 1)

    def is_old(self, peer: PeerId, seqno: int, *, accused: bool, source: PeerId) -> bool:
        """Whether this was heard before; if it still waits here, ``source`` need not be told."""
        if 2 * seqno + accused > self._ranks.get(peer, -1):
            return False
        waiting = self._queue.get(peer)
        if waiting is not None and waiting.signed.seqno == seqno and waiting.accused == accused:
            waiting.known_by[source] = None
        return True

    def spread(self, signed: SignedHeartbeat, *, accused: bool, source: PeerId, now: float) -> None:
        """Pass it on with the next flush, unless something as good was passed on before."""
        rank = 2 * signed.seqno + (accused or signed.heartbeat.leaving)
        if rank <= self._ranks.get(signed.peer, -1):
            return
        self._ranks.pop(signed.peer, None)
        if len(self._ranks) >= MAX_RUMOURS:
            del self._ranks[next(iter(self._ranks))]
        self._ranks[signed.peer] = rank
        self._queue[signed.peer] = Rumour(signed, accused, {source: None})
        self._rumours_at = min(self._rumours_at, now + FLUSH_DELAY)

    def announce(self, peer: PeerId, source: PeerId, now: float) -> None:
        """Tell the neighbours, by digest, that ``peer`` is new; all but ``source``, who told us."""
        self._news[peer] = source
        self._news_at = min(self._news_at, now + NEWS_DELAY)

    def take(self, now: float) -> list[Rumour]:
        """The rumours to pass on now, oldest first, at most `MAX_HEARTBEATS`."""
        if self._rumours_at > now:
            return []
        rumours = [self._queue.pop(peer) for peer in list(self._queue)[:MAX_HEARTBEATS]]
        self._rumours_at = now + FLUSH_DELAY if self._queue else math.inf
        return rumours

    def take_news(self, now: float) -> list[tuple[PeerId, PeerId]]:
        """The new peers to tell of now, each with who told us, oldest first, at most `MAX_NEWS`."""
        if self._news_at > now:
            return []
        news = list(self._news.items())[:MAX_NEWS]
        for peer, _ in news:
            del self._news[peer]
        self._news_at = now + NEWS_DELAY if self._news else math.inf
        return news


@dataclass(slots=True)
class TokenBucket:
    """So many at once, so many per second."""

    rate: float
    burst: float
    tokens: float
    updated: float

    def take(self, count: float, now: float) -> bool:
        """Take ``count`` tokens, if they are there."""
        if self.available(now) < count:
            return False
        self.tokens -= count
        return True

    def available(self, now: float) -> float:
        """Tokens there are now."""
        self.tokens = min(self.burst, self.tokens + (now - self.updated) * self.rate)
        self.updated = now
        return self.tokens


class Quotas:
    """A token bucket for each connection."""

    def __init__(self) -> None:
        self._buckets: dict[PeerId, TokenBucket] = {}

    def allow(self, peer: PeerId, size: int, now: float) -> bool:
        """Whether ``peer`` may send a message of ``size`` bytes now."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            if len(self._buckets) >= MAX_QUOTAS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[peer] = TokenBucket(QUOTA_RATE, QUOTA_BURST, QUOTA_BURST, now)
        return bucket.take(1 + size / QUOTA_UNIT, now)
