"""Which heartbeats to ask for, of all that digests offer: a budget, spent on the unknown first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from p2p.membership.events import MembershipConfig
from p2p.membership.messages import MAX_KEYS, Digest
from p2p.membership.rumours import TokenBucket
from p2p.membership.view import Entry, Stage, View

BURST_INTERVALS: Final = 16
"""A newcomer may spend the budget of so many intervals at once: it has a whole view to fill."""
REFRESH_AGE: Final = 4.0
"""Intervals after which a member's heartbeat is fetched again though nothing in its digest changed."""
LEISURE: Final = 1 / 3
"""Intervals between two requests that can wait, so that one message asks for several heartbeats."""
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
        self._asked: dict[bytes, float] = {}  # longest first
        self._leisure_at = -math.inf
        self._leisurely = False
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
        asked, named = self._asked, self._view.named
        self._leisurely = False
        while asked and asked[oldest := next(iter(asked))] <= now - self._interval:
            del asked[oldest]
        keys: list[bytes] = []
        for digest in digests:
            entry = named(digest.key)
            if entry is not None and digest.seqno <= entry.signed.heartbeat.seqno:
                continue
            if len(keys) == MAX_KEYS or len(asked) == MAX_ASKED:
                break
            wanted = digest.key not in asked and self._is_wanted(digest, entry, now)
            if wanted and self._budget.take(1, now):
                keys.append(digest.key)
                asked[digest.key] = now
        if keys and self._leisurely:
            self._leisure_at = now + LEISURE * self._interval
        return tuple(keys)

    def _is_wanted(self, digest: Digest, entry: Entry | None, now: float) -> bool:
        """Whether to ask for what ``digest`` says is newer than ``entry``."""
        if entry is None:
            if self._view.is_old(digest.key, digest.seqno):
                return False
            return self._view.has_room() or (self._is_leisure(now) and self._unknown.take(1, now))
        if entry.stage is not Stage.FRESH:
            return True
        if digest.policy == entry.signed.heartbeat.profile.policy:
            old = now - entry.seen > REFRESH_AGE * entry.interval
            if not old or not self._is_leisure(now):
                return False
        return self._budget.available(now) > self._budget.burst / 2

    def _is_leisure(self, now: float) -> bool:
        """Whether it is time to ask for what can wait; if so, it is so for one message."""
        self._leisurely = now >= self._leisure_at
        return self._leisurely
