"""What a validator and a trainer that repeats its work both ask of a submission's groups."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.checks import (
    ACCEPTED,
    Evidence,
    Judgement,
    Limits,
    Shape,
    Verdict,
    check_shape,
    judge,
    judge_pool,
)
from roles.engines.base import Group


def check_shapes(groups: Sequence[Group], shape: Shape) -> Judgement:
    """The first group that is not even shaped right, or acceptance."""
    for group in groups:
        judgement = check_shape([one.tokens for one in group.completions], shape)
        if judgement.verdict is not Verdict.ACCEPTED:
            return judgement
    return ACCEPTED


def judge_all(pool: Sequence[Evidence], limits: Limits) -> Judgement:
    """Each group by itself, then all of them together; the first violation decides."""
    found = violations(pool, limits)
    return found[0] if found else ACCEPTED


def violations(pool: Sequence[Evidence], limits: Limits) -> list[Judgement]:
    """What of a submission is not accepted: of each group, then of all together."""
    said = [*(judge(evidence, limits) for evidence in pool), judge_pool(pool, limits)]
    return [judgement for judgement in said if judgement.verdict is not Verdict.ACCEPTED]
