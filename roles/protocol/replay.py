"""Repeating what a validator did to a submission: by the trainer, or by any bystander.

The engine holds the policy that the submission names. Groups are scored one at a time, so that
others of the engine's callers wait for one of them at most.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from p2p.errors import BadMessage
from proofs.checks import Verdict
from roles.engines.base import Engine, Group, GroupTask, Scored
from roles.envs.base import Task
from roles.envs.client import ContainedEnvironment
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.core.judging import check_shapes, violations
from roles.protocol.core.lies import (
    LOGPROBS,
    LOGPROBS_LIMIT,
    MOST_NATS,
    NO_ANSWER,
    NO_REWARD,
    REWARDS,
    REWARDS_LIMIT,
    Acceptance,
    Finding,
)
from roles.protocol.core.messages import (
    AcceptedWork,
    Submission,
    decode_groups_untrusted,
    decode_logprobs_untrusted,
)
from roles.protocol.core.work import Work, work_of
from roles.run import Run


async def replay(
    run: Run,
    engine: Engine,
    tasks: Sequence[GroupTask],
    groups: Sequence[Group],
    logprobs: bytes,
) -> list[Finding]:
    """Score ``groups``, and say what of them and of a validator's ``logprobs`` is not as it was
    signed.

    Raises what the engine raises: then nothing is known.
    """
    scored = await _score(run, engine, tasks, groups)
    found = exceeded(run, scored)
    apart = _apart(logprobs, b"".join(one.logprobs for one in scored))
    if not apart <= LOGPROBS_LIMIT:
        found.append(Finding(LOGPROBS, apart, LOGPROBS_LIMIT))
    return found


async def _score(
    run: Run, engine: Engine, tasks: Sequence[GroupTask], groups: Sequence[Group]
) -> list[Scored]:
    sampling = run_sampling(run)
    scored: list[Scored] = []
    for task, group in zip(tasks, groups, strict=True):
        scored += await engine.score([task], [group], sampling)
    return scored


def exceeded(run: Run, scored: Sequence[Scored]) -> list[Finding]:
    """The limits of the run that are exceeded."""
    broken = violations([one.evidence for one in scored], run.terms.limits)
    return [Finding(one.reason.value, one.statistic, one.limit) for one in broken]


async def open_refused(
    run: Run, environment: ContainedEnvironment, submission: Submission
) -> tuple[list[GroupTask], tuple[Group, ...]]:
    """The tasks and groups of work that was rejected. Raises `BadMessage` if it is not of its
    place, or has the wrong shape, and what the environment raises."""
    commitment = submission.commitment
    order = draw_order(run, commitment.node, commitment.version, commitment.policy)
    groups = open_place(run, submission)
    made = await environment.tasks(order.task_seeds(commitment.index))
    return [task for _, task in order.with_draws(commitment.index, made)], groups


def open_place(run: Run, submission: Submission) -> tuple[Group, ...]:
    """The groups of a submission. Raises `BadMessage` if it is not of its place, or has the
    wrong shape."""
    commitment = submission.commitment
    order = draw_order(run, commitment.node, commitment.version, commitment.policy)
    groups = decode_groups_untrusted(submission.content)
    if [group.group for group in groups] != list(order.numbers(commitment.index)):
        raise BadMessage("it is not the groups of its place in the draw order")
    shaped = check_shapes(groups, run.shape())
    if shaped.verdict is not Verdict.ACCEPTED:
        raise BadMessage(f"its shape is wrong: {shaped.reason.value}")
    return groups


async def violated(
    run: Run, engine: Engine, tasks: Sequence[GroupTask], groups: Sequence[Group]
) -> list[Finding]:
    """What of rejected work a replay finds wrong, too: nothing, if the verdict was false.
    Raises what the engine raises."""
    return exceeded(run, await _score(run, engine, tasks, groups))


def _apart(theirs: bytes, ours: bytes) -> float:
    """Mean difference of log-probs, in nats."""
    count = len(ours) // 2
    signed: tuple[float, ...] = struct.unpack(f"<{count}e", theirs)
    found: tuple[float, ...] = struct.unpack(f"<{count}e", ours)
    apart = [min(abs(a - b), MOST_NATS) for a, b in zip(signed, found, strict=True)]
    return sum(apart) / max(1, count)


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


async def examine(
    run: Run,
    environment: ContainedEnvironment,
    engine: Engine,
    work: AcceptedWork | Acceptance,
) -> list[Finding]:
    """All that an accepting verdict says and a replay does not, for who has the policy.

    ``engine`` holds the policy that the work names. Raises `BadMessage` if log-probs are not as
    many as the tokens, and what engine and environment raise.
    """
    commitment = work.verdict.commitment
    order = draw_order(run, commitment.node, commitment.version, commitment.policy)
    try:
        groups = open_place(run, work.submission)
    except BadMessage:
        return [Finding(NO_ANSWER, 1, 0)]
    made = await environment.tasks(order.task_seeds(commitment.index))
    tasks = order.with_draws(commitment.index, made)
    drawn = [task for _, task in tasks]
    if isinstance(work, AcceptedWork):
        decode_logprobs_untrusted(work.logprobs, groups)  # as many as there are tokens
        found = await replay(run, engine, drawn, groups, work.logprobs)
    else:
        found = await violated(run, engine, drawn, groups)
    answers, signed = answers_of([task for task, _ in tasks], groups), work.verdict.rewards
    ours = await environment.rewards(answers)
    wrong = impossible_reward(signed)
    if wrong is None and (wrong := wrong_reward(signed, ours)) is not None:
        await environment.confirm(answers, ours)  # its own fault, if it does not repeat itself
    return [*found, *([wrong] if wrong else [])]


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
