"""Tasks for engines: prompts and seeds that are the same for equal arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

from roles.engines.base import Group, GroupTask, TrainingGroup
from roles.envs.sort import SortEnvironment

SORT = SortEnvironment()


def make_tasks(
    groups: int,
    completions: int = 4,
    *,
    tokens: Sequence[int] = (),
    lengths: Sequence[int] = range(2, 21),
    salt: object = "",
) -> list[GroupTask]:
    """Return a task for each group: random ``tokens``, or else a prompt of the sorter."""
    rng = Random(f"{salt}")

    def prompt(group: int) -> tuple[int, ...]:
        if tokens:
            return tuple(rng.choices(tokens, k=rng.choice(lengths)))
        return SORT.task(hashlib.sha256(f"task {group}".encode()).digest()).prompt

    def seed(group: int, slot: int) -> bytes:
        return hashlib.sha256(f"{salt} {group} {slot}".encode()).digest()

    return [
        GroupTask(group, prompt(group), tuple(seed(group, slot) for slot in range(completions)))
        for group in range(groups)
    ]


def taught(
    tasks: Sequence[GroupTask], groups: Sequence[Group], rewards: tuple[float, ...]
) -> list[TrainingGroup]:
    """Return what a learner is given of ``groups``, each with the same rewards."""
    return [
        TrainingGroup(task.prompt, group.completions, rewards)
        for task, group in zip(tasks, groups, strict=True)
    ]
