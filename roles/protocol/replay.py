"""What repeating a place has in common, whoever repeats it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from roles.engines.base import Group, GroupTask
from roles.envs.base import Task
from roles.protocol.core.findings import NO_REWARD, REWARDS, REWARDS_LIMIT, Finding
from roles.protocol.core.work import Work, work_of


def as_signed(reward: float) -> float:
    """A reward as a verdict carries it."""
    value: float = struct.unpack("<f", struct.pack("<f", reward))[0]
    return value


def impossible_reward(rewards: Sequence[float]) -> Finding | None:
    """The reward in a verdict that no environment pays, if there is one."""
    for reward in rewards:
        if not 0 <= reward <= 1:
            return Finding(NO_REWARD, reward, 1.0)
    return None


def wrong_reward(signed: Sequence[float], ours: Sequence[float]) -> Finding | None:
    """How far the rewards in a verdict are from ours, if they are not the same."""
    if len(signed) != len(ours):
        return Finding(NO_REWARD, len(signed), len(ours))
    furthest = max(
        (abs(a - as_signed(b)) for a, b in zip(signed, ours, strict=True)), default=0.0
    )
    return Finding(REWARDS, furthest, REWARDS_LIMIT) if furthest else None


def answers_of(
    tasks: Sequence[Task], groups: Sequence[Group]
) -> list[tuple[Task, list[tuple[int, ...]]]]:
    """Each task with its answers, as an environment is asked what they earn."""
    return [
        (task, [completion.tokens for completion in group.completions])
        for task, group in zip(tasks, groups, strict=True)
    ]


def count_work(tasks: Sequence[tuple[Task, GroupTask]], groups: Sequence[Group]) -> Work:
    """How much ``groups`` were to draw, each completion with its prompt."""
    return work_of(
        (len(drawn.prompt), len(completion.tokens))
        for (_, drawn), group in zip(tasks, groups, strict=True)
        for completion in group.completions
    )
