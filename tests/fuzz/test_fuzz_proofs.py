"""Whatever the bytes, `verify` answers with a value; whatever the claims, so do replay and the
judge.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings, strategies as st

from proofs import (
    Evidence,
    Limits,
    Malformed,
    Shape,
    ToplocStats,
    check_shape,
    commit,
    judge,
    proof_size,
    replay,
    uniforms,
    verify,
)

ROWS = np.random.default_rng(0).standard_normal((33, 16), dtype=np.float32)
WIDE = np.random.default_rng(1).standard_normal((32, 2100), dtype=np.float32)
HONEST = commit([ROWS, WIDE])


@given(st.binary(max_size=900))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes(data: bytes) -> None:
    for result in verify([data, data], [ROWS, WIDE]):
        assert isinstance(result, Malformed | ToplocStats)


@given(st.binary(min_size=proof_size(33, 16), max_size=proof_size(33, 16)))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_of_the_right_length(data: bytes) -> None:
    (result,) = verify([data], [ROWS])
    assert isinstance(result, Malformed) or result.chunks == 2


@given(st.integers(0, 1), st.integers(0), st.binary(min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=100, deadline=None)
def test_arbitrary_tokens_replay(tokens: list[int], temperature: float) -> None:
    logits = np.zeros((len(tokens), 5))
    result = replay(logits, tokens, uniforms([bytes(32)], 0, len(tokens))[0], temperature)
    assert not np.isnan(result.distance).any()


@given(
    st.lists(st.lists(st.integers(-2, 12), max_size=6), max_size=3),
    st.lists(st.lists(st.floats(), max_size=6), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_arbitrary_shapes(tokens: list[list[int]], logprobs: list[list[float]]) -> None:
    check_shape(
        tokens,
        logprobs,
        Shape(group_size=2, max_new_tokens=4, vocabulary=10, end_tokens=frozenset({9})),
    )


@given(*[st.floats()] * 6, st.integers(0), st.integers(0), st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None)
def test_arbitrary_evidence(
    mean: float,
    median: float,
    distance: float,
    end: float,
    surprise: float,
    logprob: float,
    exponents: int,
    mismatches: int,
    tokens: int,
) -> None:
    numbers = (mean, median, distance, end, surprise, logprob)
    judgement = judge(
        Evidence(
            tokens, "", exponents, mean, median, distance, mismatches, end, surprise, logprob
        ),
        Limits.bf16(),
    )
    if any(math.isnan(number) for number in numbers) and tokens:
        assert judgement.verdict.value == "rejected"
