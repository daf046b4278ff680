"""Functions shared by all that repeat the work of a place."""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from dataclasses import replace

from p2p.errors import BadMessage
from roles.contract import Run
from roles.engines.base import Completion, Group, GroupTask, Turn
from roles.envs.base import Task
from roles.envs.turns import Heard
from roles.protocol.core.findings import NO_REWARD, REWARDS, REWARDS_LIMIT, Finding
from roles.protocol.core.groups import heard_digest
from roles.protocol.core.work import Work, work_of


def as_signed(reward: float) -> float:
    """Return a reward rounded to float32, as a verdict carries it."""
    value: float = struct.unpack("<f", struct.pack("<f", reward))[0]
    return value


def impossible_reward(rewards: Sequence[float]) -> Finding | None:
    """Return a finding for the first reward in a verdict that no environment pays, if there is
    one."""
    for reward in rewards:
        if not 0 <= reward <= 1:
            return Finding(NO_REWARD, reward, 1.0)
    return None


def wrong_reward(signed: Sequence[float], ours: Sequence[float]) -> Finding | None:
    """Compare the rewards in a verdict with ours. Return a finding with the largest difference,
    or with both lengths if these differ; None if all rewards are equal."""
    if len(signed) != len(ours):
        return Finding(NO_REWARD, len(signed), len(ours))
    furthest = max(
        (abs(a - as_signed(b)) for a, b in zip(signed, ours, strict=True)), default=0.0
    )
    return Finding(REWARDS, furthest, REWARDS_LIMIT) if furthest else None


def answers_of(
    tasks: Sequence[Task], groups: Sequence[Group]
) -> list[tuple[Task, list[tuple[int, ...]]]]:
    """Return each task with its answers, in the form in which an environment is asked for
    rewards."""
    return [
        (task, [completion.tokens for completion in group.completions])
        for task, group in zip(tasks, groups, strict=True)
    ]


def turns_of(tokens: Sequence[int], heard: Heard, ends: Container[int]) -> tuple[Turn, ...]:
    """Return the turns of a complete completion.

    Args:
        tokens: All drawn tokens; their shape was checked.
        heard: The environment's answers to them (`roles.envs.turns.hear`).
        ends: The tokens that end a turn.

    Raises:
        BadMessage: The completion goes on where the environment has ended it, or ends where it
            has not.
    """
    inner = [at for at, token in enumerate(tokens[:-1], 1) if token in ends]
    inserted = [words for words in heard if words]
    if len(inserted) < len(inner):
        raise BadMessage("tokens follow where the environment has ended the completion")
    if len(inserted) > len(inner):
        raise BadMessage("a completion ends where the environment has answered")
    return tuple(map(Turn, inner, inserted))


def with_heard(group: Group, run: Run) -> Group:
    """Add to a group that was drawn here the digests of what the environment inserted in it."""
    sampling, ends = run.terms.sampling, run.terms.model.end_tokens

    def told(one: Completion) -> Completion:
        said = [turn.inserted for turn in one.turns]
        is_cut = len(one.tokens) == sampling.max_new_tokens
        if one.tokens[-1] in ends and not is_cut and len(said) + 1 < sampling.turns:
            said.append(())  # the environment has ended it
        return replace(one, heard=one.heard or heard_digest(said))

    if sampling.turns == 1:
        return group
    return replace(group, completions=tuple(map(told, group.completions)))


def count_work(tasks: Sequence[tuple[Task, GroupTask]], groups: Sequence[Group]) -> Work:
    """Return the work of drawing ``groups``: their tokens, with the prompt counted for each
    completion."""
    return work_of(
        (len(drawn.prompt), len(completion.tokens))
        for (_, drawn), group in zip(tasks, groups, strict=True)
        for completion in group.completions
    )
