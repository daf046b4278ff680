"""The whole recipe in one process, without a network: ``python -m bench alone --seed 0``.

The sampler uses the policy of exactly ``lag`` steps ago, as a swarm's does at worst. The
exit status is 0 only if the learning gate is passed: a start that leaves room, and a rise that
luck does not give.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from p2p.node.usage import STANDARD_OUTPUT
from roles.demo.gate import LearningGate
from roles.engines.base import GroupTask, Row, Sampling, StepReport, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.evaluation import Evaluation, grade, questions
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sampler import Sampler
from roles.envs.base import Task
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.rl.algorithms.base import has_spread
from roles.rl.recipes import NETWORK

Advantages = list[NDArray[np.float32]]
Progressed = Callable[[int, Evaluation | None], None]


@dataclass(slots=True)
class Course:
    """Course of a run: rewards by step, reports of every step, CPU seconds by activity."""

    seed: int
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    sampled_tokens: int = 0
    tasks: int = 0
    unlike: int = 0
    """Tasks of these whose completions earned different rewards."""

    @property
    def gate(self) -> LearningGate:
        """Compare the first evaluation with the last."""
        return LearningGate(
            self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)]
        )

    def summary(self) -> dict[str, object]:
        """Return the summary for JSON."""
        return {
            "seed": self.seed,
            "passed": self.gate.passed,
            "evaluations": {str(step): asdict(one) for step, one in self.evaluations.items()},
            "cpu_seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
            "sampled_tokens": self.sampled_tokens,
            "tasks": self.tasks,
            "k3_mean": math.fsum(one.k3 for one in self.reports) / max(1, len(self.reports)),
            "k3_max": max((one.k3 for one in self.reports), default=0.0),
            "reports": [asdict(one) for one in self.reports],
        }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the CPU seconds of the block to ``seconds[name]``."""
    start = time.process_time()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - start


DRAW: Final = 64
"""Tasks drawn at a time, until enough groups of them show spread."""
DRAWS: Final = 4
"""Most draws for one step: with a reward near 0 or 1 few groups show spread. On the mean a step
takes 160 to 190 tasks."""
NO_CHECKPOINT: Final = Path("/nonexistent/checkpoint")


def sorting(seed: int, steps: int = NETWORK.sampling.steps) -> EngineConfig:
    """Return the engine configuration of the network that sorts, with its learner."""
    sampling = replace(NETWORK.sampling, steps=steps)
    return EngineConfig(seed=seed, sampling=sampling, learner=NETWORK.learner)


class Alone:
    """A trainer and a sampler that take turns.

    Args:
        config: The run; its environment is the one that is played, unless there is a setup.
        shuffled: The advantages of a step are permuted (the control).
        setup: The environments, if they are not that of `config`.
        base: The folder of the model that the run begins with.
        at_once: Tasks drawn at a time; at most `DRAWS` times as many for one step.
    """

    def __init__(
        self,
        config: EngineConfig,
        shuffled: bool = False,
        *,
        setup: EnvironmentSetup | None = None,
        base: Path | None = None,
        at_once: int = DRAW,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._config, self._base, self._at_once = config, base, at_once
        assert config.learner is not None
        self._sampling, self._learner = config.sampling, config.learner
        parts = (EnvironmentPart(name=str(config.environment)),)
        self.environment = open_mix(setup or EnvironmentSetup(parts=parts))
        self._rng = Random(1000 + config.seed)
        self._shuffled = shuffled
        self.learner = TorchLearner(config)
        self.sampler = TransformerModel(config.shape, config.dtype)
        self._history: deque[dict[str, torch.Tensor]] = deque(maxlen=config.sampling.lag + 1)
        self.course = Course(config.seed)
        self.turns = dict[float, tuple[float, float]]()
        """Of the last evaluation, by temperature: the reward that was earned in a single turn,
        and the mean number of turns."""

    def warm_up(self) -> None:
        """Bring the policy to where RL starts, and evaluate it."""
        with _timed(self.course.seconds, "warm-up"):
            self.learner.open(NO_CHECKPOINT, self._base)
        self.evaluate()

    def evaluate(self) -> Evaluation:
        """Evaluate and remember."""
        with _timed(self.course.seconds, "evaluation"):
            temperature = self._sampling.temperature
            greedy, sampled = self.rewards_at(0.0), self.rewards_at(temperature)
            evaluation = grade([""] * len(greedy), greedy, sampled)
        self.course.evaluations[self.learner.step_number] = evaluation
        return evaluation

    def rewards_at(self, temperature: float) -> list[float]:
        """Return the rewards of the held-out tasks, with the learner's evaluation seed."""
        tasks = self.environment.evaluation()[: self._learner.evaluate_tasks or None]
        asked = questions(tasks, self._learner.evaluation_seed)
        self.sampler.load_state_dict(self._published())
        groups = self._play(tasks, asked, temperature, 1)
        rewards = [group.rewards[0] for group in groups]
        later = [len(group.completions[0].turns) for group in groups]
        at_once = math.fsum(one for one, more in zip(rewards, later, strict=True) if not more)
        self.turns[temperature] = at_once / len(tasks), 1 + sum(later) / len(tasks)
        return rewards

    def step(self) -> StepReport:
        """Sample with the old policy, learn with the new one."""
        self._history.append(self._published())
        self.sampler.load_state_dict(self._history[0])
        with _timed(self.course.seconds, "generation"):
            groups = self._groups_with_spread()
        with _timed(self.course.seconds, "training"):
            report = self.learner.update(groups, self._advantages(groups))
        self.course.reports.append(report)
        return report

    def _published(self) -> dict[str, torch.Tensor]:
        weights = self.learner.model.state_dict()
        return {name: one.to(self.sampler.dtype, copy=True) for name, one in weights.items()}

    def _groups_with_spread(self) -> list[TrainingGroup]:
        """Draw tasks until enough groups teach something."""
        groups, kept = self._learner.groups, list[TrainingGroup]()
        drawn = 0
        while len(kept) < groups and drawn < DRAWS * self._at_once:
            kept.extend(group for group in self._draw() if has_spread(group.rewards))
            drawn += self._at_once
        self.course.tasks += drawn
        self.course.unlike += len(kept)
        return kept[:groups]

    def _draw(self) -> list[TrainingGroup]:
        size = self._sampling.group_size
        tasks = [self.environment.task(self._rng.randbytes(32)) for _ in range(self._at_once)]
        asked = [
            GroupTask(number, task.prompt, self._seeds(size))
            for number, task in enumerate(tasks)
        ]
        return self._play(tasks, asked, self._sampling.temperature, size)

    def _play(
        self, tasks: Sequence[Task], asked: Sequence[GroupTask], temperature: float, size: int
    ) -> list[TrainingGroup]:
        """Let the sampler's policy answer tasks, in turns if the run has turns."""
        terms, environment = self._sampling, self.environment
        sampling = Sampling(
            temperature, terms.max_new_tokens, size, turns=terms.turns, heard=terms.heard
        )
        drawing = Sampler(self.sampler, frozenset(self._config.end_tokens), self._config.draw)
        drawing.add(asked, sampling)
        while drawing.has_work:
            drawing.step()
            paused = [
                (row, environment.hear(tasks[row.group], row.tokens)[-1])
                for row in drawing.paused()
            ]
            drawing.hear([Row(row.group, row.slot, said or ()) for row, said in paused])
        groups = sorted((group for _, group in drawing.take_ended()), key=lambda one: one.group)
        self.course.sampled_tokens += sum(
            len(each.tokens) for group in groups for each in group.completions
        )
        return [
            TrainingGroup(
                task.prompt,
                group.completions,
                tuple(environment.reward(task, each.tokens) for each in group.completions),
            )
            for task, group in zip(tasks, groups, strict=True)
        ]

    def _seeds(self, count: int) -> tuple[bytes, ...]:
        return tuple(self._rng.randbytes(32) for _ in range(count))

    def _advantages(self, groups: Sequence[TrainingGroup]) -> Advantages:
        """Return the advantages of each group. In the control run they are permuted over all
        completions of the step."""
        advantages = self.learner.advantages(groups)
        if not self._shuffled:
            return advantages
        flat = np.concatenate(advantages).tolist()
        self._rng.shuffle(flat)
        return np.split(np.array(flat, np.float32), np.cumsum([*map(len, advantages)])[:-1])


def learn(
    config: EngineConfig,
    steps: int,
    every: int,
    progressed: Progressed,
    *,
    shuffled: bool = False,
) -> Course:
    """Warm up, take ``steps`` steps, evaluate after every ``every`` of them and at the end."""
    alone = Alone(config, shuffled)
    alone.warm_up()
    progressed(0, alone.course.evaluations[0])
    for step in range(1, steps + 1):
        alone.step()
        is_due = step % every == 0 or step == steps
        progressed(step, alone.evaluate() if is_due else None)
    return alone.course


@contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Progressed]:
    """Show a bar on standard error with the rewards as they come."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        bar = progress.add_task(f"{title}: warm-up", total=steps)

        def progressed(step: int, evaluation: Evaluation | None) -> None:
            progress.update(bar, completed=step)
            if evaluation is not None:
                text = (
                    f"{title}: greedy {evaluation.greedy:.3f}, sampled {evaluation.sampled:.3f}"
                )
                progress.update(bar, description=text)
                progress.console.print(f"step {step:3d}  {text}")

        yield progressed


def run(args: list[str]) -> int:
    """Run the recipe and judge it; 1 if the gate is not passed."""
    parser = argparse.ArgumentParser(prog="python -m bench alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NETWORK.sampling.steps)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument(
        "--json", type=Path, help="write the course to this file; - is standard output"
    )
    options = parser.parse_args(args)
    config = sorting(options.seed, options.steps)
    with progress_bar(f"seed {options.seed}", options.steps) as progressed:
        course = learn(config, options.steps, options.every, progressed)
    if options.json is not None:
        text = json.dumps(course.summary(), indent=2)
        if options.json == STANDARD_OUTPUT:
            print(text, file=sys.__stdout__)
        else:
            options.json.write_text(text + "\n", encoding="utf-8")
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in course.seconds.items())
    Console(stderr=True).print(f"{course.gate}; CPU seconds: {spent}", soft_wrap=True)
    return 0 if course.gate.passed else 1
