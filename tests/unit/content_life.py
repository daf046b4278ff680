"""One engine whose content is large and whose model is nothing, in processes of its own.

``python -m tests.unit.content_life worker`` is the engine: it counts. ``... hangs`` says that
it has a step, and waits for ever; ``... node FOLDER`` is a node that gives it one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import trio

from p2p.machine import open_world
from roles.contract.core.sampling import SamplingTerms
from roles.engines import client, worker
from roles.engines.base import (
    Answers,
    Completion,
    EngineError,
    Group,
    GroupTask,
    Placement,
    Row,
    Sampling,
    StepReport,
    TrainingGroup,
)
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig
from roles.rl.learner import LearnerConfig

TOKENS: Final = 100_000
CONFIG: Final = EngineConfig(
    context=1000,
    sampling=SamplingTerms(steps=1, group_size=2, max_new_tokens=TOKENS),
    learner=LearnerConfig(groups=46, rate=8e-4),
)
LESSON: Final = TrainingGroup(
    (1, 2, 3), 2 * (Completion((9,) * TOKENS, (-0.5,) * TOKENS),), (0.0, 1.0)
)
ARGV: Final = ("tests.unit.content_life",)


IDLE: Final = "this machine's GPU lies idle"


class Counter:
    def __init__(self, *, hangs: bool, idle: str = "") -> None:
        self._hangs = hangs
        self._idle = idle
        self._steps = 0
        self._under_way: list[GroupTask] = []

    def placement(self) -> Placement:
        return Placement("counter", "cpu", 1, self._idle)

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        if self._hangs:
            sys.stderr.write("reading\n")
            sys.stderr.flush()
            threading.Event().wait()
        self._steps += 1
        drawn = [one for group in groups for one in group.completions]
        return StepReport(
            step=self._steps, loss=sum(sum(one.logprobs) for one in drawn), k3=0.0,
            ratio_max=0.0, clipped=0.0, capped=0.0, entropy=0.0, gradient_norm=0.0,
            tokens=sum(len(one.tokens) for one in drawn), changed=0.0,
        )  # fmt: skip

    @property
    def has_room(self) -> bool:
        return not self._under_way

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        self._under_way += tasks

    def advance(self, seconds: float) -> list[Group]:
        """One group each time. One whose prompt is 13 cannot be drawn."""
        if not self._under_way:
            return []
        task = self._under_way.pop()
        if task.prompt == (13,):
            raise EngineError("13 is not drawn")
        return [Group(task.group, tuple(Completion(task.prompt) for _ in task.seeds))]

    @property
    def waiting(self) -> Sequence[Row]:
        return ()

    def hear(self, answers: Sequence[Row]) -> None:
        raise EngineError("nothing waits")

    def drop(self) -> None:
        self._under_way.clear()

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        return [
            tuple(task.prompt[:1] * sampling.max_new_tokens for _ in task.seeds)
            for task in tasks
        ]


async def live(folder: Path) -> None:
    client.WORKER_ARGV = (*ARGV, "hangs")
    async with open_world(folder) as world, open_engine(world, CONFIG) as engine:
        await engine.step([LESSON])


def main(role: str, *arguments: str) -> None:
    if role == "node":
        trio.run(live, Path(arguments[0]))
        return
    counter: Any = Counter(hangs=role == "hangs", idle=IDLE if role == "idle" else "")
    worker.make_engine = lambda _: counter
    worker.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
