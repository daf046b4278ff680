"""Pauses between attempts that grow."""

from __future__ import annotations

from typing import Final

from p2p.world import World, dawdle

FIRST_PAUSE: Final = 0.1
"""Seconds. A peer that restarts is back within a few of them, and the pause doubles."""
LONGEST_PAUSE: Final = 5.0
"""Seconds. Longer would leave a recovered peer idle; shorter would hammer a dead one."""


class Backoff:
    """Pauses of 0.1 s doubling to 5 s, each spread by a quarter either way."""

    def __init__(
        self,
        world: World,
        purpose: str,
        *,
        first: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ) -> None:
        self._world = world
        self._rng = world.rng(purpose)
        self._pause = first
        self._longest = longest

    async def wait(self) -> None:
        """Return after the next pause."""
        pause = self._pause * self._rng.uniform(0.75, 1.25)
        self._pause = min(2 * self._pause, self._longest)
        await self._world.sleep(pause)
        await dawdle(self._world, "backoff/long pause")
