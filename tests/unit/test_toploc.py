"""Activation proofs: the package's bytes, the law of interpolation, and every way to cheat
them."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from proofs.field import PRIME, evaluate, interpolate
from proofs.toploc import (
    MAX_MODULUS,
    Malformed,
    ToplocStats,
    TopValues,
    bfloat16_patterns,
    commit,
    independence,
    injective_moduli,
    largest,
    proof_size,
    verify,
    worst,
)

PERFECT = ToplocStats(chunks=2, exponent_mismatches=0, mantissa_mean=0.0, mantissa_median=0.0)


def ramp(tokens: int, width: int) -> NDArray[np.float32]:
    """Activations that are exact in float32 and need no random number generator."""
    index = np.arange(tokens * width, dtype=np.uint64)
    spread = (index * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(np.int64)
    return ((spread - (1 << 23)) / (1 << 20)).astype(np.float32).reshape(tokens, width)


def noise(tokens: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, width), dtype=np.float32)


def stats_of(proof: bytes, rows: NDArray[np.float32]) -> ToplocStats:
    (result,) = verify([proof], [rows])
    assert isinstance(result, ToplocStats), result
    return result


# Bytes


@pytest.mark.parametrize(
    ("tokens", "width", "digest"),
    [
        (32, 64, "c68c70969ab16d3361440fca4815cddfd4db61a380e91666686ea1a34af7d089"),
        (40, 64, "cd5cfd3842a98331315e8d37863b78b75b35e26058cbaa130a9814add1b693f7"),
        (33, 100, "dd7e9099f5db2a758d46753bcd6874326c745965212e593349ca0cd33ff6361b"),
        (64, 4096, "b94f12e2ad6f688d23d90279de023133929a3c57530e200aae8afc674477c236"),
        (1, 7, "aa67e7dc35d92c7e8db8ca3b8ee43def7413ed2684fcd28a9f88206964f9fe92"),
    ],
)
def test_whole_proofs_of_the_package(tokens: int, width: int, digest: str) -> None:
    """Made by the package's own C++ interpolation from the same top values."""
    (proof,) = commit([ramp(tokens, width)])
    assert sha256(proof).hexdigest() == digest


def test_zeros_and_sizes() -> None:
    (proof,) = commit([np.zeros((40, 64), dtype=np.float32)])
    assert proof == (b"\xff\xd9" + bytes(256)) * 2
    assert proof_size(40, 64) == 516
    assert proof_size(33, 64) == 258 + 2 + 2 * 64
    assert proof_size(0, 64) == 0
    assert commit([np.zeros((0, 64), dtype=np.float32)]) == [b""]


def test_a_batch_is_the_proofs_one_by_one() -> None:
    batch = [noise(n, 64, seed=n) for n in (5, 32, 0, 33, 100, 1, 64)] + [noise(40, 100)]
    assert commit(batch) == [commit([rows])[0] for rows in batch]
    assert verify(commit(batch), batch) == [verify(commit([rows]), [rows])[0] for rows in batch]


# Arithmetic


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32))
def test_evaluate_undoes_interpolate(points: int, polynomials: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.array([rng.choice(PRIME, points, replace=False) for _ in range(polynomials)])
    y = rng.integers(0, PRIME, (polynomials, points))
    coefficients = interpolate(x, y)
    assert (evaluate(coefficients, x) == y).all()
    order = rng.permutation(points)
    assert (interpolate(x[:, order], y[:, order]) == coefficients).all()


def test_the_field_at_its_edges() -> None:
    x = np.array([[0, PRIME - 1, PRIME - 2, 1]])
    y = np.array([[PRIME - 1, PRIME - 1, 0, PRIME - 1]])
    assert (evaluate(interpolate(x, y), x) == y).all()
    top = np.full((1, 128), PRIME - 1)
    expected = sum((PRIME - 1) ** (power + 1) for power in range(128)) % PRIME
    assert evaluate(top, np.array([[PRIME - 1]])).tolist() == [[expected]]


def test_rounding_is_to_nearest_even() -> None:
    bits = [
        0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFFFFFFFF, 0x80000000,
        0x7F800000,
    ]  # fmt: skip
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    rounded = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7FC0, 0x8000, 0x7F80]
    assert bfloat16_patterns(values).tolist() == rounded


@given(
    st.integers(1, 5000), st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e30]), st.integers(0, 2**32)
)
def test_largest_agrees_with_sorting(size: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (np.round(rng.standard_normal((2, size)), rng.integers(0, 4)) * scale).astype(
        np.float32
    )
    k = min(128, size)
    indices, patterns = largest(rows, k)
    for row, got, values in zip(rows, indices, patterns, strict=True):
        every = bfloat16_patterns(row)
        expected = np.argsort(-(every & 0x7FFF).astype(int), kind="stable")[:k]
        assert got.tolist() == expected.tolist()
        assert values.tolist() == every[expected].tolist()


def test_moduli_step_down_together_and_stop() -> None:
    rows = np.array([[1, 2], [0, MAX_MODULUS], [5, 5 + MAX_MODULUS], [0, 3]])
    assert injective_moduli(rows).tolist() == [
        MAX_MODULUS, MAX_MODULUS - 1, MAX_MODULUS - 1, MAX_MODULUS,
    ]  # fmt: skip
    # 256 k - i takes every value from 32,513 to 65,536: each modulus there brings two of these
    # together.
    clash = np.array([[*range(256), *range(256 * 128, 256 * 257, 256)]])
    with pytest.raises(ValueError, match="32768"):
        injective_moduli(clash)


# Verification


def test_an_index_that_wraps_is_reduced_by_the_verifier_too() -> None:
    rows = np.zeros((32, 4096), dtype=np.float32)
    rows.reshape(-1)[[0, MAX_MODULUS, 9]] = [4.0, 50.0, 6.0]
    (proof,) = commit([rows])
    assert int.from_bytes(proof[:2], "big") < MAX_MODULUS
    assert stats_of(proof, rows) == ToplocStats(1, 0, 0.0, 0.0)


@given(
    st.lists(st.integers(0, 50), max_size=6),
    st.sampled_from([3, 64, 2100]),
    st.sampled_from([16, 62, 128]),
)
def test_blocks_of_any_size_amount_to_the_whole(
    sizes: list[int], width: int, values: int
) -> None:
    rows = noise(sum(sizes), width, seed=len(sizes))
    fed = TopValues(values)
    start = 0
    for size in sizes:
        block = rows[start : start + size].copy()
        fed.add(block)
        block[:] = np.nan  # the caller may use its array again
        start += size
        # what is there so far, as for a completion that ends here
        assert commit([fed], values) == commit([rows[:start]], values)
    (proof,) = commit([fed], values)
    assert len(proof) == proof_size(len(rows), width, values)
    assert verify([proof], [fed], values) == verify([proof], [rows], values)
    assert sum(len(part) for part in fed.waiting) < 32 * width


def test_fewer_values_are_the_packages_own_format() -> None:
    """The first coefficients differ, the form does not: modulus and k coefficients."""
    rows = noise(40, 64)
    (proof,) = commit([rows], 62)
    assert len(proof) == 2 * 126 == proof_size(40, 64, 62)
    assert isinstance(verify([proof], [rows], 62)[0], ToplocStats)
    assert isinstance(verify([proof], [rows], 128)[0], Malformed)


def test_the_worst_of_several_sequences_speaks_for_all() -> None:
    good = ToplocStats(2, 1, 0.5, 0.0, means=(0.5, 0.25))
    bad = ToplocStats(1, 0, 0.25, 3.0, means=(0.25,))
    assert worst([good, bad]) == ToplocStats(3, 1, 0.5, 3.0, means=(0.5, 0.25, 0.25))
    assert worst([good, Malformed("short")]) == Malformed("sequence 1: short")
    assert worst([]) == ToplocStats(0, 0, 0.0, 0.0)


def test_errors_of_a_short_chunk_are_scaled() -> None:
    """By the fourth root of how much of it is there; so are those of blocks that were fed."""
    rows = noise(34, 64)
    changed = rows * np.float32(1.03)
    (proof,) = commit([rows])
    fed = TopValues()
    for start in range(0, 34, 7):
        fed.add(changed[start : start + 7])
    for activations in (changed, fed):
        (stats,) = verify([proof], [activations])
        assert isinstance(stats, ToplocStats)
        whole, short = stats.means
        assert short == pytest.approx(whole * 0.5, rel=0.3)
        assert stats.mantissa_mean == max(whole, short)


# How much of a group is evidence of its own


def test_states_behind_the_same_tokens_are_shared() -> None:
    assert independence([[1], [2], [3]]) == [[1 / 3]] * 3
    # of two rows the first is shared: (1/2 + 1) / 2
    assert independence([[1, 9], [2, 9]]) == [[0.75], [0.75]]
    # what has ended shares nothing more: (1/2 + 1/2) / 2, (1/2 + 1/2 + 1) / 3
    assert independence([[1, 2], [1, 2, 3]]) == [[0.5], [pytest.approx(2 / 3)]]
    one, other = list(range(64)), [*range(32), *range(100, 132)]
    # the row behind token 31 is shared: both have read the same 32 tokens
    assert independence([one, other]) == [[0.5, (0.5 + 31) / 32]] * 2
    assert (independence([]), independence([[]])) == ([], [[]])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=6))
def test_rows_are_counted_once(completions: list[list[int]]) -> None:
    """As many rows as there are different beginnings; never less than one chunk."""
    counts = independence(completions)
    assert [len(one) for one in counts] == [-(-len(one) // 32) for one in completions]
    assert all(0 < count <= 1 for one in counts for count in one)
    rows = 0.0
    for tokens, one in zip(completions, counts, strict=True):
        lengths = [min(32, len(tokens) - start) for start in range(0, len(tokens), 32)]
        rows += sum(count * length for count, length in zip(one, lengths, strict=True))
    beginnings = {tuple(one[:place]) for one in completions for place in range(len(one))}
    assert rows == pytest.approx(len(beginnings))
    assert sum(map(sum, counts)) > 0.999
    assert independence(completions[::-1]) == counts[::-1]


def test_noise_shows_in_the_mantissas_and_other_activations_in_the_exponents() -> None:
    rows = noise(64, 64)
    (proof,) = commit([rows])
    stats = stats_of(proof, rows * np.float32(1.004))
    assert stats.exponent_mismatches < 8
    assert 0 < stats.mantissa_mean < 2
    assert stats_of(proof, -rows).exponent_mismatches >= 120
    rows[40, 3], rows[41, 7] = np.nan, np.inf  # they agree with nothing
    assert stats_of(commit([rows])[0], rows).exponent_mismatches == 2


def test_a_border_value_that_rounds_the_other_way_rejects_no_honest_work() -> None:
    """16 equal values enter or leave a chunk's top 128 together."""
    rng = np.random.default_rng(7)
    rows = rng.uniform(0.1, 2.0, (32, 64)).astype(np.float32)
    flat = rows.reshape(-1)
    places = rng.permutation(flat.size)
    flat[places[:120]] = rng.uniform(2.5, 3.9, 120)  # surely inside
    flat[places[120:136]] = 2.3203125 + 2e-7  # 16 equal values for the last 8 places
    flat[places[136:152]] = 2.3203125  # what is one step lower by rounding
    decoded, prefilled = rows.copy(), rows.copy()
    prefilled.reshape(-1)[places[120:136]] = 2.3203125 - 2e-7
    prefilled.reshape(-1)[places[136:152]] = 2.3203125 + 2e-7
    stats = stats_of(commit([decoded])[0], prefilled)
    assert stats.exponent_mismatches == 0
    assert stats.mantissa_mean == 0.0


def test_one_step_across_a_power_of_two_is_rounding() -> None:
    """1.99609375 +- 1e-7 rounds to 1.9921875 or to 2.0, whose exponents differ."""
    rows = noise(32, 64)
    decoded, prefilled = rows.copy(), rows.copy()
    decoded[3, 5], prefilled[3, 5] = 3.992, 4.0  # well inside the top of the chunk
    stats = stats_of(commit([decoded])[0], prefilled)
    assert stats.exponent_mismatches == 0
    assert 0 < stats.mantissa_mean < 0.02
    prefilled[3, 5] = 4.05  # two steps
    assert stats_of(commit([decoded])[0], prefilled).exponent_mismatches == 1


def test_equal_activations_are_still_compared() -> None:
    """Where no value lies above the border, all are compared: ones prove ones only."""
    ones = np.ones((32, 64), dtype=np.float32)
    assert stats_of(commit([ones])[0], ones) == ToplocStats(1, 0, 0.0, 0.0)
    assert stats_of(commit([ones])[0], -ones).exponent_mismatches == 128


def test_a_forged_polynomial_does_not_pass() -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(0, PRIME, (2, 129)).astype(">u2")
    words[:, 0] = MAX_MODULUS
    assert stats_of(words.tobytes(), noise(64, 64)).exponent_mismatches >= 100
    words[:, 1:] = 0
    words[:, 1] = 0x4026  # the constant 2.59
    assert stats_of(words.tobytes(), noise(64, 64)).mantissa_mean > 10
    rows = noise(64, 64, seed=1)
    (proof,) = commit([rows])
    for wrong, read in ((proof, noise(64, 64, seed=2)), (proof[258:] + proof[:258], rows)):
        assert stats_of(wrong, read).mantissa_mean > 10, "another's, or of swapped chunks"


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: b"", lambda p: p[:258], lambda p: p[:-1], lambda p: p[:-2],
        lambda p: p + p[:258], lambda p: p + b"\0", lambda p: p[:2], lambda p: bytes(len(p)),
        lambda p: b"\0\0" + p[2:], lambda p: b"\0\1" + p[2:], lambda p: b"\x80\0" + p[2:],
        lambda p: (65496).to_bytes(2, "big") + p[2:],
        lambda p: (65498).to_bytes(2, "big") + p[2:],
        lambda p: p[:2] + PRIME.to_bytes(2, "big") + p[4:], lambda p: p[:-2] + b"\xff\xff",
    ],
)  # fmt: skip
def test_malformed_proofs(damage: object) -> None:
    assert callable(damage)
    rows = noise(64, 64)
    honest = commit([rows])[0]
    good, bad, also_good = verify([honest, damage(honest), honest], [rows] * 3)
    assert isinstance(bad, Malformed)
    assert good == also_good == PERFECT


def test_wide_chunks_may_need_a_smaller_modulus_but_not_any() -> None:
    rows = noise(32, 4096)
    (proof,) = commit([rows])
    for modulus, sound in ((32767, False), (32768, True), (65497, True), (65498, False)):
        (result,) = verify([modulus.to_bytes(2, "big") + proof[2:]], [rows])
        assert isinstance(result, ToplocStats) is sound


def test_noise_in_values_near_zero_is_nobodys_fault() -> None:
    """The top k takes all of a row, down to float32 noise."""
    theirs = noise(1, 64)
    theirs[0, :4] = 3e-6, -4e-6, 5e-6, 1e-5
    mine = theirs.copy()
    mine[0, :4] = -2e-6, 6e-6, 9e-7, 3e-5
    (proof,) = commit([theirs])
    assert verify([proof], [mine]) == [ToplocStats(1, 0, 0.0, 0.0)]


def test_one_infinite_value_among_small_ones_hides_nothing() -> None:
    theirs, mine = noise(1, 64), noise(1, 64)
    mine[0] = theirs[0] * 2
    mine[0, 0] = np.inf
    (stats,) = verify(commit([theirs]), [mine])
    assert isinstance(stats, ToplocStats)
    assert stats.exponent_mismatches == 64
