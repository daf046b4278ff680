"""How the learning goes, for people: rewards on the held-out tasks, by step, kept on disk.

None of it decides anything: a disk that refuses the file, or an evaluation that fails, stops no
learning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from p2p.errors import StorageError
from p2p.world import Disk
from roles.engines.base import Engine, EngineError, Evaluation, TrainingGroup
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.envs.mix import kind_of
from roles.rl.evaluation import evaluation_of_rewards
from roles.rl.recipe import Recipe
from roles.shared.checked_json import DamagedFile, keep, recall
from roles.trainer.metrics import Metrics

logger = logging.getLogger(__name__)

PROGRESS: Final = "trainer/progress.json"
PAID_TOGETHER: Final = 64
"""Answers of an evaluation in one call of the environment: half of the 128 completions for
which it has its time (`roles.envs.base.Ration.patience`)."""


@dataclass(slots=True)
class Learnt:
    """What people want to know of a run, kept beside the checkpoint."""

    step: int = 0
    greedy_start: float | None = None
    reward_start: float | None = None
    greedy: float | None = None
    reward: float | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, greedy, sampled) at each evaluation."""
    kinds_start: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(greedy, sampled) by environment and kind of task, at the first evaluation."""
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same at the newest."""
    staleness_max: int = 0
    groups_used: int = 0
    train_reward: float = 0.0
    """Mean reward of the last step's groups, which are those with spread."""


class LearningCurve:
    """What was learnt by now, and when to look again."""

    def __init__(
        self, disk: Disk, recipe: Recipe, environment: ContainedEnvironment, every: int
    ) -> None:
        """``every`` so many steps there is an evaluation."""
        self._disk = disk
        self._recipe = recipe
        self._environment = environment
        self._every = every
        self._tasks: list[Task] = []
        """Of an evaluation; asked for once."""
        self.learnt = Learnt()
        self.metrics = Metrics(disk)

    async def restore(self, step: int) -> None:
        """Read what an earlier life kept; the checkpoint says which ``step`` it has come to."""
        try:
            self.learnt = Learnt(**(await recall(self._disk, PROGRESS) or {}))
        except DamagedFile as error:
            logger.warning("%s; the curve begins anew, the policy is not touched", error)
        self.learnt.step = step

    async def keep(self) -> None:
        """Put it on disk, if the disk takes it."""
        try:
            await keep(self._disk, PROGRESS, asdict(self.learnt))
        except StorageError as error:
            logger.info("progress_not_kept step=%d: %s", self.learnt.step, error)

    def note_step(self, step: int, groups: Sequence[TrainingGroup], staleness_max: int) -> None:
        """The engine has learnt from ``groups`` and is at ``step`` now."""
        learnt = self.learnt
        rewards = [reward for group in groups for reward in group.rewards]
        learnt.step = step
        learnt.train_reward = sum(rewards) / len(rewards)
        learnt.groups_used += len(groups)
        learnt.staleness_max = max(learnt.staleness_max, staleness_max)

    async def evaluate(self, engine: Engine, step: int) -> None:
        """Look at the held-out tasks, if it is time for it: at the start, now and then, at the
        end."""
        learnt, every = self.learnt, self._every
        known = bool(learnt.curve) and learnt.curve[-1][0] == step
        if known or (0 < step < self._recipe.steps and (every == 0 or step % every)):
            return
        try:
            result = await self._evaluation(engine)
        except (
            EngineError,
            EnvironmentFailed,
        ) as error:  # what it fails on need not stop the learning
            logger.error("evaluation_failed step=%d: %s", step, error)
            return
        learnt.curve.append((step, result.greedy, result.sampled))
        learnt.greedy, learnt.reward = result.greedy, result.sampled
        learnt.kinds = dict(result.kinds)
        if learnt.greedy_start is None:
            learnt.greedy_start, learnt.reward_start = result.greedy, result.sampled
            learnt.kinds_start = dict(result.kinds)
        await self.keep()

    async def _evaluation(self, engine: Engine) -> Evaluation:
        """Raises `EngineError` and `EnvironmentFailed`."""
        tasks = self._tasks = self._tasks or await self._environment.evaluation()
        greedy, sampled = [
            await self._rewards(engine, tasks, temperature)
            for temperature in (0.0, self._recipe.temperature)
        ]
        return evaluation_of_rewards([kind_of(task) for task in tasks], greedy, sampled)

    async def _rewards(
        self, engine: Engine, tasks: Sequence[Task], temperature: float
    ) -> list[float]:
        """Some tasks at a time: an environment's patience is for a submission."""
        drawn = await engine.answer([task.prompt for task in tasks], temperature)
        answers = [(task, [tokens]) for task, tokens in zip(tasks, drawn, strict=True)]
        rewards = list[float]()
        for start in range(0, len(answers), PAID_TOGETHER):
            part = answers[start : start + PAID_TOGETHER]
            rewards += await self._environment.rewards(part)
        return rewards
