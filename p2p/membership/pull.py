"""Which heartbeats to ask for, of all that digests offer: a budget, spent on the unknown first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from p2p.membership.events import MembershipConfig
from p2p.membership.messages import MAX_KEYS, Digest
from p2p.membership.rumours import TokenBucket
from p2p.membership.view import Stage, View

BURST_INTERVALS: Final = 16
"""A newcomer may spend the budget of so many intervals at once: it has a whole view to fill."""
REFRESH_AGE: Final = 4.0
"""Intervals after which a member's heartbeat is fetched again though nothing in its digest changed."""
UNKNOWN_AT_CAPACITY: Final = 2
"""Unknown peers taken in per interval when the view is full: it is renewed within a hundred intervals."""
MAX_ASKED: Final = 1024
"""Keys asked for, remembered for an interval so that nobody else is asked for them too."""


class Pull:
    """Decides what to ask for, and remembers what was asked."""

    def __init__(self, view: View, config: MembershipConfig) -> None:
        self._view = view
        self._interval = config.interval
        burst = BURST_INTERVALS * config.refresh
        self._budget = TokenBucket(config.refresh / config.interval, burst, burst, -math.inf)
        self._asked: dict[bytes, float] = {}
        self._unknown = TokenBucket(
            UNKNOWN_AT_CAPACITY / config.interval, UNKNOWN_AT_CAPACITY, UNKNOWN_AT_CAPACITY, -math.inf
        )

    def was_asked(self, key: bytes) -> bool:
        """Whether the heartbeat behind ``key`` was asked for and has not come."""
        return key in self._asked

    def arrived(self, key: bytes) -> None:
        """It came."""
        self._asked.pop(key, None)

    def wanted(self, digests: Iterable[Digest], now: float) -> tuple[bytes, ...]:
        """The keys to ask the sender of ``digests`` for."""
        for key in [key for key, since in self._asked.items() if since <= now - self._interval]:
            del self._asked[key]
        keys: dict[bytes, None] = {}
        for digest in digests:
            if len(keys) == MAX_KEYS or len(self._asked) == MAX_ASKED:
                break
            if digest.key not in self._asked and self._is_wanted(digest, now) and self._budget.take(1, now):
                keys[digest.key] = None
                self._asked[digest.key] = now
        return tuple(keys)

    def _is_wanted(self, digest: Digest, now: float) -> bool:
        entry = self._view.named(digest.key)
        if entry is None:
            if self._view.is_old(digest.key, digest.seqno):
                return False
            return self._view.has_room() or self._unknown.take(1, now)
        if digest.seqno <= entry.signed.heartbeat.seqno:
            return False
        if entry.stage is not Stage.FRESH:
            return True
        changed = digest.policy != entry.signed.heartbeat.profile.policy
        old = now - entry.seen > REFRESH_AGE * entry.interval
        return (changed or old) and self._budget.available(now) > self._budget.burst / 2
