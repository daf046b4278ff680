"""The border between Shoal and an environment: what it raises, or pays, ends no node.

An environment is foreign code that is called once for every task and every completion of every
stranger. A mistake in it must cost no more than the submission that it was found by: no role,
no node.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from p2p.errors import ShoalError
from roles.envs.base import Environment, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SAID: Final = 160
"""Characters of an environment's own words that are repeated: a sentence. It may quote a
stranger's completion."""
MAX_TOLD: Final = 32
"""Failures that are told apart; an environment that fails in more ways has been heard."""
MAX_EVALUATION: Final = 8192
"""Tasks of an evaluation. The standard error of a share of this many is at most 0.006; each is
answered twice, by the trainer alone."""


class EnvironmentFailed(ShoalError):
    """The run's environment raised, or paid what is no reward; the message says where. Its
    author must mend it: nothing that a node can do helps."""


def task_of(environment: Environment, seed: bytes) -> Task:
    """The task of a seed. Raises `EnvironmentFailed`."""

    def make() -> Task:
        return _checked(environment.task(seed))

    return _call(environment, "task", make)


def evaluation_of(environment: Environment) -> list[Task]:
    """The held-out tasks. Raises `EnvironmentFailed`."""

    def make() -> list[Task]:
        tasks = environment.evaluation()
        if not 0 < len(tasks) <= MAX_EVALUATION:
            raise ValueError(
                f"an evaluation has 1 to {MAX_EVALUATION:,} tasks, not {len(tasks):,}"
            )
        return [_checked(task) for task in tasks]

    return _call(environment, "evaluation", make)


def _checked(task: Task) -> Task:
    if not all(type(token) is int and token >= 0 for token in (*task.prompt, *task.answer)):
        raise ValueError("a task's prompt and answer are tuples of token ids")
    return task


def reward_of(environment: Environment, task: Task, tokens: Sequence[int]) -> float:
    """What a completion earns, from 0 to 1. Raises `EnvironmentFailed`."""

    def pay() -> float:
        reward = float(environment.reward(task, tokens))
        if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
            raise ValueError(f"a reward is a number from 0 to 1, not {reward!r}")
        return reward

    return _call(environment, "reward", pay)


def _call(environment: Environment, what: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        home = type(environment)
        place = (
            f"{home.__module__}.{home.__qualname__}"
            if where is None
            else f"{where.filename}:{where.lineno}"
        )
        said = f"{type(error).__name__}: {error!s:.{MAX_SAID}} ({place})"
        raise EnvironmentFailed(
            f"{what}() of the environment {environment.name!r}: {said}"
        ) from error


class Failures:
    """Says each failure of an environment to the operator once, however many submissions meet
    it."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}

    def tell(self, error: EnvironmentFailed, consequence: str) -> None:
        """Log it, with what becomes of the work that it was met by."""
        if str(error) not in self._told and len(self._told) < MAX_TOLD:
            self._told[str(error)] = None
            logger.error("%s: %s", error, consequence)
