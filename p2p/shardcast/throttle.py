"""A rate for all peers together, in one direction: what an owner lends of the line.

Each chunk is charged before it leaves, or after it came, and whoever has moved it waits until
the rate has paid for it. Several that move at once queue up in this order. Chunks, long indexes
and answers to strangers (`p2p.meter`) are charged: heartbeats, requests and work are a few
kilobytes a second, and a node that held them back would count as gone.
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import TokenBucket
from p2p.world import World

BURST: Final = 1.0
"""Seconds of the rate that may move at once after a pause."""


class Throttle:
    """Waits so long that no more than ``rate`` bytes a second move; 0 is no limit."""

    def __init__(self, world: World, rate: float) -> None:
        self._world = world
        self._rate = rate
        self._bucket = TokenBucket(BURST * rate, world.now())

    def take(self, size: int) -> None:
        """Charge ``size`` bytes that have left already: chunks wait for them."""
        self._bucket.refill(self._world.now(), self._rate)
        self._bucket.take(size if self._rate else 0)

    async def charge(self, size: int) -> None:
        """Return when ``size`` bytes are paid for."""
        if not self._rate:
            return
        now = self._world.now()
        self._bucket.refill(now, self._rate)
        self._bucket.take(size)
        if self._bucket.level < 0:
            await self._world.sleep_until(now - self._bucket.level / self._rate)
