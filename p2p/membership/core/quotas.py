"""A rate limit for each peer or network; one for all is a `p2p.bounded.RateLimit`."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

QUOTA_UNIT: Final = 256
"""Bytes, about a heartbeat (180 to 250): what the quota of a connection counts in, so that a
long message costs as much as the short ones in it."""
QUOTA_RATE: Final = 200.0
"""Units per second. A neighbour in a storm sends up to 160; verifying 200 takes about 1.5 % of
a core."""
QUOTA_BURST: Final = 2000.0
"""Units at once: the death of 1,000 peers in one zone, told from both sides of it."""
MIN_QUOTAS: Final = 16
"""Peers counted before a look which are idle: each look doubles the number at which the next
one comes, so looks cost a constant for each peer counted."""
MAX_QUOTAS: Final = 8192
"""Peers counted; beyond it the one counted longest ago starts afresh. Eight times the
connections that a host may have."""
_ROUNDING: Final = -1e-3
"""Tokens that may be lacking. The time at which a bucket was empty is a float of seconds: after
a year the difference of two is good to 4e-9 s, less than a millionth of a token at
`QUOTA_RATE`."""


class KeyedQuotas:
    """The law of `p2p.bounded.RateLimit`, for each peer.

    Of each only one number is kept, the time at which it was empty, from which follows how many
    tokens it holds: a node counts seven things for each of its peers, and a bucket for each
    took 4 KiB of a node.
    """

    __slots__ = ("_burst", "_emptied", "_rate", "_sweep_at")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._emptied: BoundedDict[PeerId | bytes, float] = BoundedDict(MAX_QUOTAS)
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
        if emptied is None:
            self._emptied[peer] = now - left / self._rate
        else:  # the table does not grow: past the check of its limit
            dict.__setitem__(self._emptied, peer, now - left / self._rate)
        return True

    def has(self, peer: PeerId | bytes, now: float) -> bool:
        """Whether ``peer`` has a token left."""
        emptied = self._emptied.get(peer)
        return emptied is None or (now - emptied) * self._rate >= 1 + _ROUNDING

    def charge(self, peer: PeerId | bytes, now: float) -> None:
        """Take one token of ``peer``, on credit if need be, but no deeper than as much as it
        may have."""
        if not self.take(peer, now):
            owed = (now - self._emptied.get(peer, now)) * self._rate - 1
            self._emptied[peer] = now - max(owed, -self._burst) / self._rate

    def _sweep(self, now: float) -> None:
        """Drop buckets that are full, as new ones are."""
        full_since = now - self._burst / self._rate
        self._emptied.keep(lambda when: when > full_since)
        self._sweep_at = max(MIN_QUOTAS, 2 * len(self._emptied))
