"""Whatever the bytes, `verify` answers with a value; whatever the claims, so do replay and the
judge."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, strategies as st

from proofs import (
    DrawRule,
    Evidence,
    Limits,
    Malformed,
    Shape,
    ToplocStats,
    check_shape,
    commit,
    draw_words,
    judge,
    proof_size,
    replay,
    verify,
)
from proofs.checks import LADDER

ROWS = np.random.default_rng(0).standard_normal((33, 16), dtype=np.float32)
WIDE = np.random.default_rng(1).standard_normal((32, 2100), dtype=np.float32)
HONEST = commit([ROWS, WIDE])


@given(st.binary(max_size=900))
def test_arbitrary_bytes(data: bytes) -> None:
    for result in verify([data, data], [ROWS, WIDE]):
        assert isinstance(result, Malformed | ToplocStats)


@given(st.binary(min_size=proof_size(33, 16), max_size=proof_size(33, 16)))
def test_arbitrary_bytes_of_the_right_length(data: bytes) -> None:
    (result,) = verify([data], [ROWS])
    assert isinstance(result, Malformed) or result.chunks == 2


@given(st.integers(0, 1), st.integers(0), st.binary(min_size=1, max_size=4))
def test_damaged_proofs(which: int, offset: int, patch: bytes) -> None:
    proof, rows = HONEST[which], (ROWS, WIDE)[which]
    at = offset % len(proof)
    damaged = (proof[:at] + patch + proof[at + len(patch) :])[: len(proof)]
    (result,) = verify([damaged], [rows])
    if damaged == proof:
        assert isinstance(result, ToplocStats)
        assert result.exponent_mismatches == 0
    elif isinstance(result, ToplocStats):
        assert result.exponent_mismatches > 0 or result.mantissa_mean > 0


@given(st.lists(st.integers(), max_size=8), st.sampled_from([0.0, 0.5, 1.0]))
def test_arbitrary_tokens_replay(tokens: list[int], temperature: float) -> None:
    logits = np.zeros((len(tokens), 5))
    words = draw_words([bytes(32)], 0, len(tokens))[0]
    for rule in DrawRule:
        result = replay(logits, tokens, words, temperature, rule)
        assert not np.isnan(result.distance).any()
        assert not np.isnan(result.gap).any()


@given(
    st.lists(
        st.lists(st.floats(width=32), min_size=3, max_size=3).filter(
            lambda row: max(row) < 1e38
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.01, 1.0]),
)
def test_arbitrary_logits_replay(
    rows: list[list[float]], token: int, temperature: float
) -> None:
    """NaN, infinities and denormal numbers among them: a claim passes or is infinitely off."""
    logits = np.array(rows, dtype=np.float32)
    words = draw_words([bytes(32)], 0, len(rows))[0]
    for rule in DrawRule:
        result = replay(logits, [token] * len(rows), words, temperature, rule)
        assert not np.isnan(result.distance).any()
        assert not np.isnan(result.gap).any()
        assert not np.isnan(result.logprob).any()
        off = np.maximum(result.distance, result.gap)
        assert (result.mismatch | (off == 0)).all()


@given(st.lists(st.lists(st.integers(-2, 12), max_size=6), max_size=3))
def test_arbitrary_shapes(tokens: list[list[int]]) -> None:
    check_shape(
        tokens, Shape(group_size=2, max_new_tokens=4, vocabulary=10, end_tokens=frozenset({9}))
    )


@given(*[st.floats()] * 8, st.integers(0), st.integers(0), st.integers(0, 1 << 30))
def test_arbitrary_evidence(
    mean: float,
    median: float,
    distance: float,
    end: float,
    surprise: float,
    gap: float,
    gap_max: float,
    chunks: float,
    exponents: int,
    mismatches: int,
    tokens: int,
) -> None:
    numbers = (mean, median, distance, end, surprise, gap, gap_max, chunks)
    evidence = Evidence(
        tokens=tokens,
        malformed="",
        exponent_mismatches=exponents,
        mantissa_mean=mean,
        mantissa_median=median,
        draw_distance=distance,
        off=(mismatches,) * len(LADDER),
        gap_mean=gap,
        gap_max=gap_max,
        end_probability=end,
        surprise=surprise,
        mantissa_worst=mean,
        chunks=chunks,
    )
    judgement = judge(evidence, Limits.bf16())
    if any(math.isnan(number) for number in numbers) and tokens:
        assert judgement.verdict.value == "rejected"
