"""A dictionary that evicts its oldest entry, and token buckets.

`BoundedDict` is for what peers make a node remember, `TokenBucket` for work that is charged
after it was done, `RateLimit` for work that is refused before it is begun. A table of many rate
limits that are mostly full is `KeyedQuotas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """A dictionary of at most ``limit`` entries; a new key evicts the oldest one.

    Entries enter in two ways. ``table[key] = value`` leaves a known key where it stands, so age
    counts from the first assignment. `renew` makes the entry the newest, so age counts from the
    last use. With a limit of 2, after a, b, and a again, a third key evicts a in the first case
    and b in the second. `update` and `setdefault`, which would get around the limit, raise
    `TypeError`. Lookups are those of `dict`, at their full speed.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        dict.__setitem__(self, key, value)
        if len(self) > self.limit:
            del self[next(iter(self))]

    def renew(self, key: K, value: V) -> None:
        """Set ``key`` and make it the newest entry."""
        self.pop(key, None)
        dict.__setitem__(self, key, value)
        if len(self) > self.limit:
            del self[next(iter(self))]

    def keep(self, wanted: Callable[[V], bool]) -> None:
        """Drop every entry for whose value ``wanted`` returns False. The others keep their
        order."""
        for key in [key for key, value in self.items() if not wanted(value)]:
            del self[key]

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `TypeError`, since it would not evict."""
        raise TypeError("a BoundedDict takes one entry at a time")

    def setdefault(self, *args: object) -> NoReturn:
        """Raise `TypeError`, since it would not evict."""
        raise TypeError("a BoundedDict takes one entry at a time")


class TokenBucket:
    """An allowance that time refills: up to ``capacity`` at once, the caller's rate for long.

    The rate is an argument of `refill`, not a field, since a caller may lower it while many
    share it. A bucket may go into debt: `take` never refuses, and the caller asks for the
    ``level`` before it works and charges afterwards what the work did cost. With a capacity of
    200 and a rate of 20 a second, a peer that takes 230 at once waits 1.5 s for a positive
    level.
    """

    __slots__ = ("_filled_at", "capacity", "level")

    def __init__(self, capacity: float, now: float, level: float | None = None) -> None:
        """Start with a full bucket, or with ``level``."""
        self.capacity = capacity
        self._filled_at = now
        self.level = capacity if level is None else level

    def refill(self, now: float, rate: float) -> float:
        """Add what ``rate`` brought since the last call; returns that amount before the cap.

        A clock that stands still or runs backwards adds nothing.
        """
        elapsed = now - self._filled_at
        self._filled_at = now
        if elapsed <= 0:
            return 0.0
        gain = elapsed * rate
        level = self.level + gain
        self.level = level if level < self.capacity else self.capacity
        return gain

    def take(self, amount: float) -> None:
        """Charge ``amount``, even if the bucket goes into debt."""
        self.level -= amount


class RateLimit(TokenBucket):
    """A token bucket that refuses: a burst at once, then a steady rate.

    With a rate of 20 and a burst of 200, the 201st of a moment is refused, and the next allowed
    50 ms later. What is refused is not charged, so that asking costs nothing.
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float, burst: float, now: float = -math.inf) -> None:
        super().__init__(burst, now)
        self._rate = rate

    def available(self, now: float) -> float:
        """Return the tokens available at ``now``."""
        self.refill(now, self._rate)
        return self.level

    def allows(self, amount: float, now: float) -> bool:
        """Take ``amount`` and return True if the bucket holds it; otherwise leave the bucket
        unchanged."""
        self.refill(now, self._rate)
        if self.level < amount:
            return False
        self.level -= amount
        return True


class KeyedQuotas:
    """Token bucket for each peer, with the rules of `RateLimit`.

    Each bucket is one number, the time at which it was empty, from which its tokens follow. A
    node counts seven things for each of its peers, and full bucket objects took 4 KiB of a
    node. As times are floats of seconds, a thousandth of a token may be lacking: after a year,
    the difference of two of them is good to 4e-9 s.
    """

    __slots__ = ("_burst", "_emptied", "_rate", "_sweep_at")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        # Eight times the connections that a host may have. Beyond it, the peer counted longest
        # ago starts afresh.
        self._emptied: BoundedDict[bytes, float] = BoundedDict(8192)
        self._sweep_at = 16

    def __len__(self) -> int:
        return len(self._emptied)

    def take(self, peer: bytes, now: float, count: float = 1.0) -> bool:
        """Take ``count`` tokens of ``peer`` and return True if it has them."""
        emptied = self._emptied.get(peer)
        if emptied is None:
            if len(self._emptied) >= self._sweep_at:
                self._sweep(now)
            left = self._burst - count
        else:
            left = (now - emptied) * self._rate
            left = (left if left < self._burst else self._burst) - count
        if left < -1e-3:
            return False
        if emptied is None:
            self._emptied[peer] = now - left / self._rate
        else:  # the table does not grow: past the check of its limit
            dict.__setitem__(self._emptied, peer, now - left / self._rate)
        return True

    def has(self, peer: bytes, now: float) -> bool:
        """Return True if ``peer`` has a token left."""
        emptied = self._emptied.get(peer)
        return emptied is None or (now - emptied) * self._rate >= 1 - 1e-3

    def level(self, peer: bytes, now: float) -> float:
        """Return the tokens that ``peer`` has; less than 0 if it owes some."""
        emptied = self._emptied.get(peer)
        left = self._burst if emptied is None else (now - emptied) * self._rate
        return min(left, self._burst)

    def charge(self, peer: bytes, now: float, count: float = 1.0) -> None:
        """Take tokens of ``peer``, on credit if it has too few; the debt is limited to the
        burst."""
        if not self.take(peer, now, count):
            left = max(self.level(peer, now) - count, -self._burst)
            self._emptied[peer] = now - left / self._rate

    def _sweep(self, now: float) -> None:
        """Drop full buckets, which equal new ones. The next sweep comes at twice as many peers,
        so that sweeps have a constant cost for each peer counted."""
        full_since = now - self._burst / self._rate
        self._emptied.keep(lambda when: when > full_since)
        self._sweep_at = max(16, 2 * len(self._emptied))
