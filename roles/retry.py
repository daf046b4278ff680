"""Trying again: the pauses between attempts, growing, spread, and bounded."""

from __future__ import annotations

from typing import Final

from p2p.world import World

FIRST_PAUSE: Final = 0.1
"""Seconds. A peer that restarts is back within a few of them."""
LONGEST_PAUSE: Final = 5.0
"""Seconds. Longer would leave a recovered peer idle; shorter would hammer a dead one."""


class Backoff:
    """Pauses of 0.1 s doubling to 5 s, each spread by a quarter either way."""

    def __init__(self, world: World, purpose: str) -> None:
        self._world = world
        self._rng = world.rng(purpose)
        self._pause = FIRST_PAUSE

    async def wait(self) -> None:
        """Return after the next pause."""
        pause = self._pause * self._rng.uniform(0.75, 1.25)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        await self._world.sleep(pause)
