"""Judgements: every limit bites, NaN never passes, and pools see what groups do not."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, factorial, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import proofs
from proofs import Evidence, Limits, Reason, Shape, Verdict, check_shape, judge, judge_pool
from proofs.checks import Judgement, poisson_limit

HONEST = Evidence(
    tokens=300,
    malformed="",
    exponent_mismatches=0,
    mantissa_mean=0.0,
    mantissa_median=0.0,
    draw_distance=0.0,
    draw_mismatches=0,
    gap_mean=0.0,
    gap_max=0.0,
    end_probability=1.0,
    surprise=0.5,
    mantissa_worst=0.0,
    chunks=1.0,
)
SHAPE = Shape(group_size=2, max_new_tokens=4, vocabulary=10, end_tokens=frozenset({9}))
LIMITS = [Limits.fp32(), Limits.bf16()]


def reason(judgement: Judgement) -> Reason:
    assert (judgement.verdict is Verdict.ACCEPTED) is (judgement.reason is Reason.WITHIN_LIMITS)
    return judgement.reason


def with_field(field: str, value: Any) -> Evidence:
    return replace(HONEST, **{field: value})


def shape_reason(*completions: list[int]) -> Reason:
    return reason(check_shape(completions, SHAPE))


# Shape


def test_honest_shapes() -> None:
    assert shape_reason([1, 2, 9], [1, 2, 3, 4]) is Reason.WITHIN_LIMITS
    assert shape_reason([9], [1, 2, 3, 9]) is Reason.WITHIN_LIMITS


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ([], Reason.LENGTH),
        ([1, 2, 3, 4, 5], Reason.LENGTH),
        ([1, 2, 3, 4, 9], Reason.LENGTH),
        ([1, 10, 9], Reason.TOKEN),
        ([-1, 9], Reason.TOKEN),
        ([9, 9], Reason.AFTER_END),
        ([1, 9, 2, 3], Reason.AFTER_END),
        ([1, 2], Reason.UNFINISHED),
        ([1, 2, 3], Reason.UNFINISHED),
    ],
)
def test_dishonest_shapes(completion: list[int], expected: Reason) -> None:
    assert shape_reason([9], completion) is expected
    assert shape_reason(completion, [9]) is expected


def test_counts_must_agree() -> None:
    assert shape_reason([9]) is Reason.GROUP_SIZE
    assert shape_reason([9], [9], [9]) is Reason.GROUP_SIZE


# One group


@pytest.mark.parametrize("limits", LIMITS)
def test_honest_evidence_is_accepted(limits: Limits) -> None:
    assert str(judge(HONEST, limits)) == "accepted"


VIOLATIONS = [
    ("malformed", "too short", Reason.MALFORMED_PROOF),
    ("exponent_mismatches", 15, Reason.EXPONENTS),
    ("mantissa_mean", 5.1, Reason.MANTISSA_MEAN),
    ("mantissa_mean", inf, Reason.MANTISSA_MEAN),
    ("mantissa_worst", 5.1, Reason.MANTISSA_CHUNK),
    ("mantissa_worst", inf, Reason.MANTISSA_CHUNK),
    ("mantissa_median", 4.1, Reason.MANTISSA_MEDIAN),
    ("draw_distance", 0.16, Reason.DRAW_DISTANCE),
    ("draw_distance", inf, Reason.DRAW_DISTANCE),
    ("gap_max", 0.91, Reason.DRAW_GAP),
    ("gap_max", inf, Reason.DRAW_GAP),
    ("draw_mismatches", 24, Reason.DRAW_MISMATCHES),
    ("end_probability", 1e-7, Reason.IMPROBABLE_END),
    ("surprise", 21.0, Reason.SURPRISE),
    ("surprise", -21.0, Reason.SURPRISE),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("field", "value", "expected"), VIOLATIONS)
def test_every_limit_bites(limits: Limits, field: str, value: Any, expected: Reason) -> None:
    judgement = judge(with_field(field, value), limits)
    assert judgement.verdict is Verdict.REJECTED
    assert judgement.reason is expected


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    "field", [f.name for f in fields(Evidence) if f.name not in ("tokens", "malformed")]
)
def test_nan_never_passes(limits: Limits, field: str) -> None:
    assert judge(with_field(field, nan), limits).verdict is Verdict.REJECTED


def test_fp32_is_tighter_than_bf16() -> None:
    for field, value in [
        ("mantissa_mean", 0.3),
        ("draw_distance", 0.01),
        ("gap_max", 0.3),
    ]:
        evidence = with_field(field, value)
        assert judge(evidence, Limits.fp32()).verdict is Verdict.REJECTED
        assert judge(evidence, Limits.bf16()).verdict is Verdict.ACCEPTED


def test_nothing_to_judge_is_inconclusive() -> None:
    assert judge(replace(HONEST, tokens=0), Limits.fp32()).verdict is Verdict.INCONCLUSIVE
    assert judge_pool([], Limits.fp32()).verdict is Verdict.INCONCLUSIVE


def test_a_judgement_says_what_decided_it() -> None:
    judgement = judge(replace(HONEST, draw_distance=0.4), Limits.fp32())
    assert str(judgement) == "rejected: a token is far from its seeded draw (0.4, limit 0.0001)"
    assert str(judge(replace(HONEST, tokens=0), Limits.fp32())) == "inconclusive: no tokens"


@pytest.mark.parametrize(
    "change", [{"surprise": nan}, {"mantissa_mean": -1.0}, {"false_alarm": 0.0}]
)
def test_limits_are_checked_at_birth(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be from 0|false_alarm"):
        replace(Limits.fp32(), **change)


# A submission


def test_the_pool_catches_temperature_that_groups_do_not_show() -> None:
    """int8 weights in bfloat16: 4.8 % of tokens differ, 14 in each group of 300."""
    group = replace(HONEST, draw_mismatches=14, gap_max=0.2)
    assert judge(group, Limits.bf16()).verdict is Verdict.ACCEPTED
    assert reason(judge_pool([group] * 10, Limits.bf16())) is Reason.DRAW_MISMATCHES


def test_the_pool_catches_a_shift_of_the_mantissas() -> None:
    """By the number of chunks, not of groups."""
    shifted = replace(HONEST, mantissa_mean=2.5)
    longer = replace(shifted, chunks=4.0)
    assert judge(shifted, Limits.bf16()).verdict is Verdict.ACCEPTED
    assert judge(longer, Limits.bf16()).verdict is Verdict.ACCEPTED
    for group, enough in ((shifted, 7), (longer, 2)):
        assert reason(judge_pool([group] * (enough - 1), Limits.bf16())) is (
            Reason.WITHIN_LIMITS
        )
        assert reason(judge_pool([group] * enough, Limits.bf16())) is Reason.MANTISSA_MEAN
    for field in ("mantissa_mean", "chunks"):
        pool = [replace(shifted, **{field: nan})] * 16
        assert reason(judge_pool(pool, Limits.bf16())) is Reason.MANTISSA_MEAN
    nothing = replace(HONEST, chunks=0.0, mantissa_mean=nan)
    assert reason(judge_pool([nothing] * 2, Limits.bf16())) is Reason.MANTISSA_MEAN


@pytest.mark.parametrize(
    ("chunks", "limit"), [(0, 5.0), (1, 5.0), (16, 2.1125), (256, 1.7516), (inf, 1.7)]
)
def test_the_limit_of_a_mean_falls_as_its_error_does(chunks: float, limit: float) -> None:
    assert Limits.bf16().mantissa_limit(chunks) == pytest.approx(limit, rel=1e-4)


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_more_chunks_never_allow_more(fewer: float, more: float) -> None:
    fewer, more = sorted((fewer, more))
    for limits in LIMITS:
        assert limits.mantissa_limit(more) <= limits.mantissa_limit(fewer)
        assert (
            limits.pooled_mantissa_mean <= limits.mantissa_limit(more) <= limits.mantissa_mean
        )


def test_gaps_count_where_there_are_enough_tokens_for_a_mean() -> None:
    """Temperature 0.9 in bfloat16: a mean gap of 0.023; one token of an honest group may have
    0.28."""
    group = replace(HONEST, tokens=400, gap_mean=0.023, gap_max=0.4)
    assert judge(group, Limits.bf16()).verdict is Verdict.ACCEPTED
    assert reason(judge_pool([group] * 2, Limits.bf16())) is Reason.WITHIN_LIMITS
    assert reason(judge_pool([group] * 3, Limits.bf16())) is Reason.DRAW_GAPS
    assert reason(judge(replace(group, tokens=1000), Limits.bf16())) is Reason.DRAW_GAPS
    sparse = replace(group, gap_mean=0.0)
    assert reason(judge_pool([group, sparse, sparse], Limits.bf16())) is Reason.DRAW_GAPS
    assert reason(judge_pool([sparse] * 3, Limits.bf16())) is Reason.WITHIN_LIMITS
    nothing = replace(group, gap_mean=nan)
    assert reason(judge_pool([nothing, sparse, sparse], Limits.bf16())) is Reason.DRAW_GAPS


def test_an_honest_pool_is_accepted() -> None:
    rng = np.random.default_rng(0)
    pool = [
        replace(
            HONEST,
            draw_mismatches=int(rng.poisson(0.3)),
            mantissa_mean=float(rng.uniform(0.1, 1.3)),
        )
        for _ in range(200)
    ]
    assert judge_pool(pool, Limits.bf16()).verdict is Verdict.ACCEPTED


def test_one_malformed_proof_spoils_the_pool() -> None:
    assert (
        reason(judge_pool([HONEST, replace(HONEST, malformed="cut")], Limits.fp32()))
        is Reason.MALFORMED_PROOF
    )


@given(st.floats(1e-6, 60.0), st.floats(1e-9, 0.5))
@settings(max_examples=80, deadline=None)
def test_the_poisson_limit_is_the_smallest(mean: float, false_alarm: float) -> None:
    def tail(count: int) -> float:
        return max(0.0, 1 - exp(-mean) * sum(mean**i / factorial(i) for i in range(count + 1)))

    limit = poisson_limit(mean, false_alarm)
    assert tail(limit) <= false_alarm + 1e-12
    assert limit == 0 or tail(limit - 1) >= false_alarm - 1e-12


def test_poisson_limits_at_the_ends() -> None:
    assert poisson_limit(4.5, 1e-4) == 14  # 3,000 tokens at 0.15 %: 15 is too many
    assert poisson_limit(0.0, 1e-4) == 0
    assert 1_003_000 < poisson_limit(1e6, 1e-4) < 1_004_500


def test_the_public_names_exist() -> None:
    assert all(hasattr(proofs, name) for name in proofs.__all__)
