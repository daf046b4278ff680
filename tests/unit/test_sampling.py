"""Seeded draws: prefix-stable uniforms, draws that replay exactly, and cheats that do not."""

from __future__ import annotations

from hashlib import sha256
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from proofs.sampling import choose, draw_seed, logprobs, replay, surprise, task_seed, uniforms

SEEDS = [sha256(bytes([i])).digest() for i in range(8)]


def scores(rows: int, seed: int = 0, vocabulary: int = 50) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(seed).standard_normal((rows, vocabulary), dtype=np.float32)


def positions(rows: int, seed: int = 0) -> NDArray[np.float64]:
    return uniforms([sha256(seed.to_bytes(8, "big")).digest()], 0, rows).reshape(-1)


# Seeds and uniforms


def test_seed_vectors() -> None:
    """Pinned: a change here is a change of protocol."""
    assert draw_seed(b"run", b"policy", b"node", 1, 2).hex() == (
        "6915d7ef601af747863a16af11bfc56c073ecaf8a424011c7d7c603fc1931ccc"
    )
    assert task_seed(b"run", b"policy", b"node", 1, 2).hex() == (
        "60498ee779978cf70efba50e96df384c5d2be27338e459a7c63f763dcf0af947"
    )


def test_every_field_changes_the_seed() -> None:
    base = (b"run", b"policy", b"node", 1, 2)
    others = [
        (b"runp", b"olicy", b"node", 1, 2),
        (b"run", b"policyn", b"ode", 1, 2),
        (b"run", b"policy", b"nodf", 1, 2),
        (b"run", b"policy", b"node", 2, 1),
        (b"run", b"policy", b"node", 1, 3),
        (b"", b"runpolicy", b"node", 1, 2),
    ]
    assert len({draw_seed(*fields) for fields in [base, *others]}) == 7
    assert draw_seed(*base) != task_seed(*base)


@pytest.mark.parametrize(("step", "slot"), [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
def test_numbers_beyond_64_bits(step: int, slot: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        draw_seed(b"", b"", b"", step, slot)


def test_uniforms_are_the_documented_bits() -> None:
    digest = sha256(b"/shoal/uniform/1.0.0" + SEEDS[0] + (1).to_bytes(8, "big")).digest()
    words = [int.from_bytes(digest[i : i + 8], "big") >> 11 for i in range(0, 32, 8)]
    assert uniforms(SEEDS[:1], 4, 4)[0].tolist() == [word / 2**53 for word in words]
    assert uniforms([bytes(32)], 0, 2)[0].tolist() == [0.9507446981310522, 0.6728881925898932]


@given(st.integers(0, 70), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_uniforms_are_prefix_stable(start: int, count: int) -> None:
    whole = uniforms(SEEDS, 0, 110)
    assert (uniforms(SEEDS, start, count) == whole[:, start : start + count]).all()
    assert ((whole >= 0) & (whole < 1)).all()


def test_uniforms_are_uniform() -> None:
    u = uniforms(SEEDS, 0, 4000).reshape(-1)
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / u.size) ** 0.5
    counts = np.histogram(u, bins=16, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 50  # chi squared, 15 degrees: p = 1e-5


def test_odd_requests() -> None:
    assert uniforms([], 0, 5).shape == (0, 5)
    assert uniforms(SEEDS, 3, 0).shape == (8, 0)
    with pytest.raises(ValueError, match="32 bytes"):
        uniforms([b"short"], 0, 1)
    with pytest.raises(ValueError, match="negative"):
        uniforms(SEEDS, -1, 1)


# Draws


def test_the_inverse_cdf_by_hand() -> None:
    logits = np.log(np.array([[0.25, 0.0625, 0.6875]] * 5)).astype(np.float64)
    u = np.array([0.0, 0.2499, 0.2501, 0.3126, 1 - 2**-53])
    assert choose(logits, u, 1.0).tolist() == [0, 0, 1, 2, 2]
    assert choose(logits, u, 0.0).tolist() == [2] * 5


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.array([[-inf, 0.0, -inf, 0.0, -inf]] * 4)
    assert choose(logits, np.array([0.0, 0.49, 0.5, 1 - 2**-53]), 1.0).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("bad", [np.nan, inf])
def test_no_distribution_no_draw(bad: float) -> None:
    with pytest.raises(ValueError, match="logits"):
        choose(np.array([[0.0, bad]]), np.array([0.5]), 1.0)


@pytest.mark.parametrize("temperature", [-1.0, inf, np.nan])
def test_temperatures(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        choose(scores(1), np.array([0.5]), temperature)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.3]),
    st.sampled_from([0.0, 1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_honest_draws_replay_exactly(seed: int, temperature: float, scale: float) -> None:
    logits, u = scores(40, seed) * np.float32(scale), positions(40, seed)
    tokens = choose(logits, u, temperature)
    result = replay(logits, tokens.tolist(), u, temperature)
    assert result.distance.max() == 0
    assert not result.mismatch.any()
    assert (result.logprob == logprobs(logits, tokens, temperature)).all()
    assert (result.logprob <= 0).all()


def test_a_step_at_a_time_equals_all_at_once() -> None:
    logits = scores(64).reshape(8, 8, 50)
    ahead = uniforms(SEEDS, 0, 8)
    for t in range(8):
        now = uniforms(SEEDS, t, 1)[:, 0]
        assert (choose(logits[:, t], now, 0.9) == choose(logits[:, t], ahead[:, t], 0.9)).all()


def test_draws_follow_the_distribution() -> None:
    row = scores(1, vocabulary=6)
    u = uniforms(SEEDS, 0, 2500).reshape(-1)
    counts = np.bincount(choose(np.repeat(row, u.size, axis=0), u, 0.8), minlength=6)
    weights = np.exp((row[0] / 0.8).astype(np.float64))
    expected = u.size * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 35  # 5 degrees: p = 1e-6


def test_logprobs_by_hand() -> None:
    logits = np.array([[0.0, log(3.0)]])
    assert logprobs(logits, np.array([1]), 1.0)[0] == pytest.approx(log(0.75))
    assert logprobs(logits, np.array([1]), 0.0)[0] == pytest.approx(log(0.75))
    assert logprobs(logits, np.array([1]), 0.5)[0] == pytest.approx(log(0.9))


# Replays of what was not drawn


def test_distance_by_hand() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25]] * 3))
    result = replay(logits, [0, 1, 2], np.array([0.6, 0.1, 0.95]), 1.0)
    assert result.distance.tolist() == pytest.approx([0.1, 0.4, 0.0])
    assert result.mismatch.tolist() == [True, True, False]
    assert replay(logits[:1], [1], np.array([0.6]), 0.0).distance[0] == pytest.approx(0.25)


def test_near_numerics_are_near() -> None:
    logits, u = scores(2000), positions(2000)
    tokens = choose(logits, u, 1.0)
    result = replay(logits + 1e-5 * scores(2000, seed=1), tokens.tolist(), u, 1.0)
    assert result.distance.max() < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_greedy_sold_as_a_draw_is_caught(temperature: float) -> None:
    logits, u = scores(32), positions(32)
    greedy = choose(logits, u, 0.0)
    result = replay(logits, greedy.tolist(), u, temperature)
    assert result.distance.max() > 0.05
    assert result.mismatch.sum() >= 3


def test_another_seed_is_caught() -> None:
    logits = scores(32)
    tokens = choose(logits, positions(32, seed=1), 1.0)
    assert replay(logits, tokens.tolist(), positions(32, seed=2), 1.0).distance.max() > 0.05


def test_a_draw_sold_as_greedy_is_caught() -> None:
    logits, u = scores(32), positions(32)
    assert replay(logits, choose(logits, u, 1.0).tolist(), u, 0.0).mismatch.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token", [-1, 50, 2**70])
def test_tokens_outside_the_vocabulary(token: int, temperature: float) -> None:
    result = replay(scores(2), [token, 3], positions(2), temperature)
    assert result.distance[0] == inf
    assert result.mismatch[0]
    assert result.logprob[0] == -inf
    assert np.isfinite(result.distance[1])


def test_logits_that_are_not_numbers_reject() -> None:
    logits = np.array([[np.nan, 0.0], [inf, 0.0], [-inf, -inf], [0.0, 0.0]])
    result = replay(logits, [1, 0, 0, 0], np.array([0.1] * 4), 1.0)
    assert result.mismatch.tolist() == [True, True, True, False]
    assert result.distance.tolist() == [inf, inf, inf, 0.0]


def test_replay_wants_rows_that_match() -> None:
    with pytest.raises(ValueError, match="rows"):
        replay(scores(2), [1], positions(2), 1.0)


# Surprise


def test_surprise_of_honest_greedy_and_foreign_tokens() -> None:
    logits, u = scores(400), positions(400)
    assert abs(surprise(logits, choose(logits, u, 1.0), 1.0)) < 4
    assert surprise(logits, choose(scores(400, seed=5), u, 1.0), 1.0) > 20
    assert surprise(logits, choose(logits, u, 0.0), 1.0) < -4
    assert surprise(logits, choose(logits, u, 0.0), 0.0) == 0


def test_one_unlikely_token_of_a_sure_policy_is_no_crime() -> None:
    logits = np.zeros((100, 2))
    logits[:, 1] = -14.0
    tokens = np.zeros(100, dtype=np.int64)
    tokens[50] = 1
    assert 4 < surprise(logits, tokens, 1.0) < 10
    tokens[51] = 1
    assert surprise(logits, tokens, 1.0) > 10
    assert exp(-14) * 100 < 1e-3


def test_surprise_of_the_impossible_is_infinite() -> None:
    assert surprise(np.array([[0.0, -inf]]), np.array([1]), 1.0) == inf
