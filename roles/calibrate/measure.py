"""Honest work and cheats, drawn by one engine and scored by another.

Theory of operation
-------------------
A way to work is a pair of what the generator does and what it claims: tasks, seeds, sampling
and weights may differ from what the run prescribes, and the validator scores all of it as if
they did not. Both are engines as a node has them (`roles.engines.worker.LocalEngine`), so what
is measured is what nodes see, whichever kinds the engines are. They may be one engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from proofs.checks import Evidence
from roles.engines.base import Completion, Group, GroupTask, Sampling
from roles.engines.worker import LocalEngine, draw_all

BATCH: Final = 8
"""Groups drawn and scored together: a submission of the demo."""
PLAIN_CHEATS: Final = 5
"""Ways of `WorkBench.cheats` that need no other weights."""
BEST_OF: Final = 4
"""Draws of which a cheat hands in the likeliest."""

Generate = Callable[[Sequence[GroupTask]], list[Group]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A validator's evidence about one way to work."""

    name: str
    evidence: tuple[Evidence, ...]
    """Evidence of each group."""


class WorkBench:
    """A generator, a validator, and tasks between them."""

    def __init__(
        self,
        generator: LocalEngine,
        validator: LocalEngine,
        sampling: Sampling,
        policy: Path,
        progress: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """Prepare both engines; ``policy`` is the claimed one, and ``progress`` is told of
        every group.
        """
        self._generator = generator
        self._validator = validator
        self._sampling = sampling
        self._policy = policy
        self._progress = progress

    def honest(self, tasks: Sequence[GroupTask]) -> Measured:
        """Return the evidence about work as the run prescribes it."""
        return self._measure("honest", tasks, self._policy, self._as_prescribed)

    def cheats(
        self, tasks: Sequence[GroupTask], others: Sequence[tuple[str, Path]]
    ) -> Iterator[Measured]:
        """Yield the evidence about every way to cheat; ``others`` are weights that are not the
        policy's.
        """
        for name, temperature in (("temperature 0.9", 0.9), ("greedy", 0.0)):
            yield self._measure(name, tasks, self._policy, self._at(temperature))
        yield self._measure("other seed", tasks, self._policy, self._with_other_seeds)
        yield self._measure("other prompt", tasks, self._policy, self._to_other_prompts)
        yield self._measure(f"best of {BEST_OF}", tasks, self._policy, self._best)
        for name, weights in others:
            yield self._measure(name, tasks, weights, self._as_prescribed)

    def _measure(
        self, name: str, tasks: Sequence[GroupTask], weights: Path, generate: Generate
    ) -> Measured:
        # all is drawn before any is scored: one engine may do both, with one policy at a time
        self._generator.load(str(weights))
        batches = [tasks[start : start + BATCH] for start in range(0, len(tasks), BATCH)]
        drawn = list[list[Group]]()
        for batch in batches:
            drawn.append(generate(batch))
            self._progress(name, len(batch))
        self._validator.load(str(self._policy))
        evidence = [
            one.evidence
            for batch, groups in zip(batches, drawn, strict=True)
            for one in self._validator.score(batch, groups, self._sampling)
        ]
        return Measured(name, tuple(evidence))

    def _as_prescribed(self, tasks: Sequence[GroupTask]) -> list[Group]:
        return draw_all(self._generator, tasks, self._sampling)

    def _at(self, temperature: float) -> Generate:
        """Return a way to draw at a share of the run's temperature."""
        sampling = replace(self._sampling, temperature=temperature * self._sampling.temperature)
        return lambda tasks: draw_all(self._generator, tasks, sampling)

    def _with_other_seeds(self, tasks: Sequence[GroupTask]) -> list[Group]:
        return self._as_prescribed([_reseeded(task, 1) for task in tasks])

    def _to_other_prompts(self, tasks: Sequence[GroupTask]) -> list[Group]:
        """Draw answers to the neighbouring task's prompt."""
        others = (*tasks[1:], tasks[0])
        return self._as_prescribed(
            [
                replace(task, prompt=other.prompt)
                for task, other in zip(tasks, others, strict=True)
            ]
        )

    def _best(self, tasks: Sequence[GroupTask]) -> list[Group]:
        """Draw each completion several times, the first by its own seed, and return the
        likeliest.
        """
        tries = [
            self._as_prescribed([_reseeded(task, number) for task in tasks])
            for number in range(BEST_OF)
        ]
        return likeliest(tries)


def likeliest(tries: Sequence[Sequence[Group]]) -> list[Group]:
    """Return each completion's likeliest try, by its mean log-prob."""
    return [
        Group(
            same[0].group,
            tuple(
                max(drawn, key=_likelihood)
                for drawn in zip(*(one.completions for one in same), strict=True)
            ),
        )
        for same in zip(*tries, strict=True)
    ]


def make_tasks(
    prompts: Sequence[tuple[int, ...]], group_size: int, label: str
) -> list[GroupTask]:
    """Return a group for each prompt, with seeds that follow from ``label``."""
    return [
        GroupTask(
            number,
            prompt,
            tuple(
                hashlib.sha256(f"{label} {number} {slot}".encode()).digest()
                for slot in range(group_size)
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def _reseeded(task: GroupTask, number: int) -> GroupTask:
    """Return the task with seeds that the run does not give; ``number`` 0 is the task
    itself.
    """
    if not number:
        return task
    mark = number.to_bytes(1, "big")
    return replace(
        task, seeds=tuple(hashlib.sha256(mark + seed).digest() for seed in task.seeds)
    )


def _likelihood(completion: Completion) -> float:
    return sum(completion.logprobs) / len(completion.logprobs)
