"""Repeating what a validator did to a submission: by the trainer, or by any bystander.

The engine holds the policy that the submission names.
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


def contradictions(run: Run, scored: Sequence[Scored], logprobs: bytes) -> list[Finding]:
    """What a replay finds in a submission, and in a validator's ``logprobs``, that is not as it
    was signed."""
    found = exceeded(run, scored)
    apart = _apart(logprobs, b"".join(one.logprobs for one in scored))
    if not apart <= LOGPROBS_LIMIT:
        found.append(Finding(LOGPROBS, apart, LOGPROBS_LIMIT))
    return found


def exceeded(run: Run, scored: Sequence[Scored]) -> list[Finding]:
    """The limits of the run that are exceeded."""
    broken = violations([one.evidence for one in scored], run.terms.limits)
    return [Finding(one.reason.value, one.statistic, one.limit) for one in broken]


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
    work: AcceptedWork,
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
    decode_logprobs_untrusted(work.logprobs, groups)  # as many as there are tokens
    scored = await engine.score(drawn, groups, run_sampling(run))
    found = contradictions(run, scored, work.logprobs)
    ours = await environment.rewards(answers_of([task for task, _ in tasks], groups))
    signed = work.verdict.rewards
    wrong = impossible_reward(signed) or wrong_reward(signed, ours)
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
