"""The learning curve for people: rewards on the held-out tasks by step, kept on disk.

No decision depends on it. A disk that refuses the file, or an evaluation that fails, does not
stop the learning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from p2p.errors import StorageError
from p2p.naming import printable
from p2p.world import Disk
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import (
    Answers,
    EngineError,
    GroupTask,
    Learner,
    Sampling,
    TrainingGroup,
)
from roles.engines.evaluation import Evaluation, evaluation_sampling, grade, questions
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment, Sample, read_along
from roles.envs.contained import EnvironmentFailed
from roles.envs.mix import kind_of
from roles.rl.learner import LearnerConfig
from roles.shared.checked_json import DamagedFile, keep, recall

logger = logging.getLogger(__name__)

PROGRESS: Final = "trainer/progress.json"
SHOWN: Final = 10
"""Number of held-out tasks whose answers are kept, so that people can check a curve against
them."""
GRADED_TOGETHER: Final = 64
"""Number of answers whose rewards are asked for in one call. At 0.1 s each, which a computer
algebra system needs, a call takes a fifth of its limit (`roles.envs.base.Ration.patience`)."""


@dataclass(slots=True)
class Learnt:
    """Results of a run for people, kept beside the checkpoint."""

    step: int = 0
    greedy_start: float | None = None
    reward_start: float | None = None
    greedy: float | None = None
    reward: float | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, greedy, sampled) at each evaluation."""
    kinds_start: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(greedy, sampled) of each kind of task, if there are several."""
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    shown_start: list[tuple[list[int], list[int], float]] = field(default_factory=list)
    """Prompt, greedy answer and reward of a few held-out tasks, for people to read."""
    shown: list[tuple[list[int], list[int], float]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """The same answers as text: question, answer and reward. Empty if the environment cannot
    write them as text."""
    samples_start: list[Sample] = field(default_factory=list)
    held_out: int = 0
    """Number of tasks in an evaluation, from which the error of the curve is computed."""
    staleness_max: int = 0
    groups_used: int = 0
    train_reward: float | None = None
    """Mean reward of the groups of the last step, all of which have spread."""
    sample: tuple[list[int], list[int], float] | None = None
    """One prompt, answer and reward of the last step."""


class LearningCurve:
    """The results up to now, and the schedule of evaluations."""

    def __init__(
        self,
        disk: Disk,
        sampling: SamplingTerms,
        learner: LearnerConfig,
        environment: ContainedEnvironment,
    ) -> None:
        self._disk = disk
        self._sampling = sampling
        self._learner = learner
        self._environment = environment
        self._tasks: list[Task] = []
        self.learnt = Learnt()
        self.unexamined = ""
        """Reason why the last evaluation has no result; empty if it has one."""

    async def restore(self, step: int) -> None:
        """Read what an earlier process saved; ``step`` is the step of the checkpoint."""
        try:
            self.learnt = Learnt(**(await recall(self._disk, PROGRESS) or {}))
        except DamagedFile as error:
            logger.warning("%s; the curve begins anew, the policy is not touched", error)
        self.learnt.step = step

    async def keep(self) -> None:
        """Write the results to disk; a disk error is not fatal."""
        try:
            await keep(self._disk, PROGRESS, asdict(self.learnt))
        except StorageError as error:
            logger.info("progress_not_kept step=%d: %s", self.learnt.step, error)

    def note_step(
        self, step: int, groups: Sequence[TrainingGroup], staleness_max: int
    ) -> float:
        """Record that the engine has learnt from ``groups`` and is at ``step`` now. Returns the
        mean reward of the groups."""
        learnt = self.learnt
        rewards = [reward for group in groups for reward in group.rewards]
        learnt.step = step
        learnt.train_reward = reward = sum(rewards) / len(rewards)
        learnt.groups_used += len(groups)
        learnt.staleness_max = max(learnt.staleness_max, staleness_max)
        one = groups[0]
        answer = list(one.completions[0].tokens)
        learnt.sample = (list(one.prompt), answer, one.rewards[0])
        return reward

    async def evaluate(self, engine: Learner, step: int) -> None:
        """Evaluate the held-out tasks if an evaluation is due: at the start, at intervals, and
        at the end."""
        learnt, every = self.learnt, self._learner.evaluate_every
        known = bool(learnt.curve) and learnt.curve[-1][0] == step
        if known or (0 < step < self._sampling.steps and (every == 0 or step % every)):
            return
        try:
            result, shown, samples = await self._examine(engine)
        except (EngineError, EnvironmentFailed) as error:  # it need not stop the learning
            logger.error("evaluation_failed step=%d: %s", step, error)
            self.unexamined = f"the policy could not be examined: {printable(str(error))}"
            return
        self.unexamined = ""
        learnt.curve.append((step, result.greedy, result.sampled))
        learnt.greedy, learnt.reward = result.greedy, result.sampled
        learnt.kinds, learnt.shown, learnt.samples = result.kinds, shown, samples
        if learnt.greedy_start is None:
            learnt.greedy_start, learnt.reward_start = result.greedy, result.sampled
            learnt.kinds_start, learnt.shown_start = result.kinds, shown
            learnt.samples_start = samples
        learnt.held_out = len(self._tasks)
        await self.keep()

    async def _answer(
        self, engine: Learner, asked: Sequence[GroupTask], sampling: Sampling
    ) -> list[Answers]:
        """Return one answer to each task, in as many turns as the run allows."""
        answers = await engine.answer(asked, sampling)
        drawn = [list(tokens) for (tokens,) in answers]
        texts = [[*task.prompt, *tokens] for task, tokens in zip(asked, drawn, strict=True)]
        most = sampling.max_new_tokens
        for turn in range(1, self._sampling.turns):
            heard = await self._environment.hear(
                [(task, [one]) for task, one in zip(self._tasks, drawn, strict=True)]
            )
            told = [said[-1] if len(said) == turn else None for said in heard]
            open_rows = [at for at, words in enumerate(told) if words]
            if not open_rows:
                break
            for at in open_rows:
                texts[at] += told[at] or ()
            again = [
                GroupTask(
                    at, tuple(texts[at]), (hashlib.sha256(seed + bytes([turn])).digest(),)
                )
                for at in open_rows
                for (seed,) in [asked[at].seeds]
            ]
            left = most - min(len(drawn[at]) for at in open_rows)
            more = await engine.answer(again, replace(sampling, max_new_tokens=left))
            for at, (tokens,) in zip(open_rows, more, strict=True):
                kept = tokens[: most - len(drawn[at])]
                drawn[at] += kept
                texts[at] += kept
        return [(tuple(tokens),) for tokens in drawn]

    async def _examine(
        self, engine: Learner
    ) -> tuple[Evaluation, list[tuple[list[int], list[int], float]], list[Sample]]:
        """Return rewards on the held-out tasks, and the answers to the first tasks as tokens
        and as text.

        Raises `EngineError` and `EnvironmentFailed`.
        """
        sampling, learner = self._sampling, self._learner
        if not self._tasks:
            tasks = await self._environment.evaluation()
            self._tasks = tasks[: learner.evaluate_tasks or len(tasks)]
        asked = questions(self._tasks, learner.evaluation_seed)
        rewards, said = [], []
        for temperature in (0.0, sampling.temperature):
            how = evaluation_sampling(sampling, temperature)
            answers = await self._answer(engine, asked, how)
            given = list(zip(self._tasks, answers, strict=True))
            rewards.append(
                [
                    reward
                    for start in range(0, len(given), GRADED_TOGETHER)
                    for reward in await self._environment.rewards(
                        given[start : start + GRADED_TOGETHER]
                    )
                ]
            )
            said.append(answers)
        shown = [
            (list(task.prompt), list(tokens), reward)
            for task, (tokens,), reward in zip(self._tasks, said[0], rewards[0], strict=True)
        ][:SHOWN]
        graded = grade([kind_of(task) for task in self._tasks], *rewards)
        greedy = list(zip(self._tasks[:SHOWN], said[0][:SHOWN], strict=True))
        earned = [reward for _, _, reward in shown]
        return graded, shown, await read_along(self._environment, greedy, earned)
