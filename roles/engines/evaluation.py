"""Evaluation of a policy: rewards on held-out tasks, with fixed draws.

The trainer, the learning in one process and the benches all use this module, so their results
can be compared. `questions` gives every task one seed that depends on its number alone; `grade`
sums up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import GroupTask, Sampling
from roles.envs.base import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward on the held-out tasks."""

    greedy: float
    """Mean reward with greedy sampling."""

    sampled: float
    """Mean reward at the sampling temperature."""

    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Maps each kind of task to its (greedy, sampled) means, if there are several kinds."""


def questions(tasks: Sequence[Task], seed: int) -> list[GroupTask]:
    """Return the engine's tasks for an evaluation: each task once."""
    return [
        GroupTask(
            number,
            tuple(task.prompt),
            (hashlib.sha256(f"evaluation {seed} {number}".encode()).digest(),),
        )
        for number, task in enumerate(tasks)
    ]


def evaluation_sampling(sampling: SamplingTerms, temperature: float) -> Sampling:
    """Return the sampling of an evaluation: one completion for each task."""
    return Sampling(temperature, sampling.max_new_tokens, 1)


def grade(
    kinds: Sequence[str], greedy: Sequence[float], sampled: Sequence[float]
) -> Evaluation:
    """Return the means over all tasks and by kind; the three arguments are in the order of the
    tasks."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for kind, *pair in zip(kinds, greedy, sampled, strict=True):
        rows.setdefault(kind, []).append((pair[0], pair[1]))
    whole = _mean(list(zip(greedy, sampled, strict=True)))
    by_kind = {kind: _mean(pairs) for kind, pairs in rows.items()} if len(rows) > 1 else {}
    return Evaluation(*whole, by_kind)


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (
        math.fsum(one for one, _ in pairs) / len(pairs),
        math.fsum(other for _, other in pairs) / len(pairs),
    )
