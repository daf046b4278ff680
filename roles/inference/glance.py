"""A sample of this node's answers, for people who want to see what their machine does.

No work depends on it: an environment that fails here is not asked again by this process.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from p2p.world import World
from roles.envs.client import ContainedEnvironment, Sample, read_along
from roles.envs.contained import EnvironmentFailed
from roles.inference.places import OpenPlace

KEPT: Final = 10
"""Number of answers that are kept, as many as somebody reads."""
EVERY: Final = 5.0
"""Seconds between samples. Each costs its environment one more task and reward, of which a
submission has dozens."""


class Glance:
    """The newest sampled answers."""

    def __init__(self, world: World, environment: ContainedEnvironment) -> None:
        self._world = world
        self._environment = environment
        self._due = -math.inf
        self._seen: deque[Sample] = deque(maxlen=KEPT)

    @property
    def samples(self) -> list[Sample]:
        """The sampled answers, newest first."""
        return list(reversed(self._seen))

    async def look(self, place: OpenPlace) -> None:
        """Sample the first answer of a full place, if a sample is due."""
        if self._world.now() < self._due:
            return
        self._due = self._world.now() + EVERY
        tokens = place.groups()[0].completions[0].tokens
        try:
            (task,) = await self._environment.tasks(place.order.task_seeds(place.index)[:1])
            answers = [(task, [tokens])]
            rewards = await self._environment.rewards(answers)
        except EnvironmentFailed:
            self._due = math.inf
            return
        self._seen.extend(await read_along(self._environment, answers, rewards))
