"""The border between Shoal and an environment, whose errors and rewards end no node.

An environment is foreign code that is called once for every task and every completion of every
stranger. A mistake in it must cost no more than the submission that it was found by: no role,
no node.

Whose fault it is decides what becomes of the work. A task is made of a seed that no node
chooses: what an environment raises on it is its own fault, and the work is nobody's. A
completion is a stranger's, perhaps of a hostile model: what a scorer raises on it costs that
completion its reward, and no other. The operator is told how often, since a scorer that raises
on everything is broken, and looks as if the model knew nothing.

Nodes must pay the same. What raises the same everywhere does; what is short of memory or of
Python's recursion depends on the machine, as does what takes too long (`roles.envs.ration`): a
worker that finds such an answer can make a trainer and an honest validator disagree about its
own submission, which then is not learnt from. No scorer that comes with Shoal can be brought
near its limits.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from p2p.errors import ShoalError
from p2p.naming import printable
from roles.envs.base import Environment, ReadableEnvironment, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SAID: Final = 300
"""Characters of an environment's own words that are repeated: a long sentence. It may quote a
stranger's completion."""
MAX_TOLD: Final = 32
"""Failures that are told apart; an environment that fails in more ways has been heard."""
MAX_READ: Final = 300
"""Characters of a question and of an answer for people: the last, where what was asked
stands."""
MAX_EVALUATION: Final = 8192
"""Tasks of an evaluation. The standard error of a share of this many is at most 0.006; each is
answered twice, by the trainer alone."""


SUSPECT: Final = 256
"""Answers in a row that an environment raised on before the operator is told that it may be
broken: four submissions."""


class EnvironmentFailed(ShoalError):
    """The run's environment failed, and no answer is to blame. The message says where. Its
    author must mend it: nothing that a node can do helps."""


class EnvironmentDied(EnvironmentFailed):
    """The process of the run's environment ended at a call: too much CPU, too much memory, or a
    crash."""


class AnswerFailed(ShoalError):
    """The run's environment raised on an answer, or paid an invalid reward. The answer earns
    nothing."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place
        """Type and place of the error, without a stranger's words."""


def task_of(environment: Environment, seed: bytes) -> Task:
    """Return the task of a seed.

    Raises:
        EnvironmentFailed: The environment gave none.
    """

    def make() -> Task:
        return _checked(environment.task(seed))

    return call_contained(environment, "task", make)


def evaluation_of(environment: Environment) -> list[Task]:
    """Return the held-out tasks.

    Raises:
        EnvironmentFailed: The environment gave none.
    """

    def make() -> list[Task]:
        tasks = environment.evaluation()
        if not 0 < len(tasks) <= MAX_EVALUATION:
            raise ValueError(
                f"an evaluation has 1 to {MAX_EVALUATION:,} tasks, not {len(tasks):,}"
            )
        return [_checked(task) for task in tasks]

    return call_contained(environment, "evaluation", make)


def _checked(task: Task) -> Task:
    if not all(type(token) is int and token >= 0 for token in (*task.prompt, *task.answer)):
        raise ValueError("a task's prompt and answer are tuples of token ids")
    return task


def reward_of(environment: Environment, task: Task, tokens: Sequence[int]) -> float:
    """Return the reward of a completion, from 0 to 1.

    Raises:
        AnswerFailed: The environment raised an error, or its reward is not a number from 0
            to 1.
        EnvironmentFailed: The environment raised this itself: the answer is not to blame.
    """

    def pay() -> float:
        reward = float(environment.reward(task, tokens))
        if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
            raise ValueError(f"a reward is a number from 0 to 1, not {reward!r}")
        return reward

    return call_contained(environment, "reward", pay)


def texts_of(environment: Environment, task: Task, tokens: Sequence[int]) -> tuple[str, str]:
    """Return question and answer as people read them, cut to their ends.

    A text is empty if the tokens have no text.

    Raises:
        EnvironmentFailed: The environment raised.
    """

    def write() -> tuple[str, str]:
        if not isinstance(environment, ReadableEnvironment):
            return "", ""
        question, answer = (environment.text(task, one) for one in (task.prompt, tokens))
        return question[-MAX_READ:], answer[-MAX_READ:]

    return call_contained(environment, "text", write)


@dataclass(slots=True)
class Payment:
    """Rewards of completions, and the completions on which the environment raised."""

    rewards: list[float] = field(default_factory=list)
    """Rewards from 0 to 1, in order."""

    failed: list[bool] = field(default_factory=list)
    """Which completions earn nothing because the environment raised, or its time or memory
    ended, on them: on another machine they may earn something."""

    place: str = ""
    """Type and place of the first error."""

    said: str = ""
    """The first error in the environment's words."""

    @property
    def failures(self) -> int:
        """Number of completions that failed."""
        return sum(self.failed)

    def pay(self, environment: Environment, task: Task, tokens: Sequence[int]) -> None:
        """Add the reward of one more completion; a failed answer earns nothing.

        Raises:
            EnvironmentFailed: The environment failed in another way.
        """
        try:
            self.rewards.append(reward_of(environment, task, tokens))
            self.failed.append(False)
        except AnswerFailed as error:
            self.fail(str(error), error.place)

    def fail(self, said: str, place: str) -> None:
        """Add one more completion, which earns nothing."""
        if not self.failures:
            self.said, self.place = said, place
        self.rewards.append(0.0)
        self.failed.append(True)

    def add(self, more: Payment) -> None:
        """Append another payment to this one."""
        if not self.failures:
            self.said, self.place = more.said, more.place
        self.rewards += more.rewards
        self.failed += more.failed


def call_contained(environment: Any, what: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which carries out the call ``what`` of an environment.

    Raises:
        AnswerFailed: It raised, and the call is about what a stranger's model said.
        EnvironmentFailed: It raised in any other call, or says itself that it failed.
    """
    try:
        return work()
    except EnvironmentFailed:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        home = type(environment)
        place = (
            f"{home.__module__}.{home.__qualname__}"
            if where is None
            else f"{where.filename}:{where.lineno}"
        )
        kind = type(error).__name__
        said = (
            f"{what}() of the environment {environment.name!r}:"
            f" {kind}: {error!s:.{MAX_SAID}} ({place})"
        )
        if what in ("reward", "respond"):
            raise AnswerFailed(said, f"{kind} ({place})") from error
        raise EnvironmentFailed(said) from error


class Tally:
    """Tells the operator of answers on which an environment raises: once for each place in the
    code, and once when it has raised on all answers for a while."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self._in_vain = 0
        """Answers in a row that it raised on."""

    def count(self, payment: Payment) -> None:
        """Count the rewards of one call."""
        if not payment.failures:
            self._in_vain = 0
            return
        if payment.place not in self._told and len(self._told) < MAX_TOLD:
            self._told[payment.place] = None
            logger.warning("%s: such an answer earns nothing", payment.said)
        if payment.failures < len(payment.rewards):
            self._in_vain = 0
            return
        before, self._in_vain = self._in_vain, self._in_vain + payment.failures
        if before < SUSPECT <= self._in_vain:
            logger.error(
                "each of the last %d answers earned nothing because the environment raised on"
                " it; if that goes on its author must mend it: %s",
                self._in_vain,
                payment.said,
            )


class Failures:
    """Says each failure of an environment to the operator once, however many submissions meet
    it, and keeps the last for its role's screen."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self.latest = ""
        """The last one, for people; empty once the environment has done the same again."""

    def tell(self, error: ShoalError, consequence: str) -> None:
        """Log the failure, and the consequence for the work at hand."""
        self.latest = printable(str(error))
        if str(error) not in self._told and len(self._told) < MAX_TOLD:
            self._told[str(error)] = None
            logger.error("%s: %s", error, consequence)

    def recover(self) -> None:
        """Forget the latest failure, since the same call has succeeded now."""
        self.latest = ""
