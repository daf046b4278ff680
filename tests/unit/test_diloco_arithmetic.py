"""Quantisers, pieces, sums and outer steps: what all members hold alike after a mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.prime import prime_decode, prime_encode
from p2p.errors import BadMessage
from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.core.outer import (
    Arithmetic,
    DataParallel,
    Nesterov,
    OuterAlgorithm,
    Rows,
    digests_of,
)
from roles.diloco.core.pieces import (
    MAX_PIECE_BYTES,
    PieceGrid,
    owners,
    shares,
)
from roles.diloco.core.quant import Values, decode_untrusted, encode, encoded_bytes
from tests.support.pieces import encode_all
from tests.unit.core_swarm import peer_named

PARALLEL = DilocoTerms(outer=Outer.PARALLEL, inner_steps=1, outer_steps=300)
TERMS = [
    pytest.param(DilocoTerms(), id="diloco"),
    pytest.param(DilocoTerms(fragments=4), id="fragments"),
    pytest.param(PARALLEL, id="parallel"),
]


def normal(count: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def stepped(outer: OuterAlgorithm, state: Rows, mean: Values, step: int) -> Rows:
    """Of a copy, in pieces of odd lengths."""
    after = state.copy()
    outer.advance(after, lambda: np.array_split(mean, 3), step)
    return after


def begun(size: int, outer: OuterAlgorithm) -> Rows:
    return np.concatenate([normal(size)[None], np.zeros((outer.moments, size), np.float32)])


@pytest.mark.parametrize("terms", TERMS)
def test_a_state_is_known_by_the_digests_of_its_pieces(terms: DilocoTerms) -> None:
    size = 200_000
    arithmetic = Arithmetic(terms, size)
    state = arithmetic.begun(normal(size))
    digests = digests_of(arithmetic.state_grid, state.tobytes())
    assert len(digests) == arithmetic.state_grid.pieces > 1
    other = state.copy()
    other[-1, -1] += np.float32(1e-9)
    changed = digests_of(arithmetic.state_grid, other.tobytes())
    assert changed[:-1] == digests[:-1]
    assert changed[-1] != digests[-1]
    assert digests_of(arithmetic.state_grid, state.tobytes()[:-4]) == []


@pytest.mark.parametrize("terms", TERMS)
def test_equal_means_leave_equal_bits(terms: DilocoTerms) -> None:
    """Views fail: a step is taken again from the state before, and must come out the same."""
    size = 5001
    arithmetic = Arithmetic(terms, size)
    state = arithmetic.begun(normal(size))
    for step in range(1, 6):
        pieces, _ = arithmetic.encoded(normal(size, step), step)
        first, again = state.copy(), state.copy()
        for one in (first, again):
            arithmetic.advance(one, b"".join(pieces), step)
        assert np.array_equal(first, again)
        assert not np.array_equal(first, state)
        state = first
    tiny = np.full(arithmetic.grid.count, 1e-42, np.float32)
    moments = stepped(arithmetic.outer, state, tiny, 6)[1:]
    assert not np.any((moments != 0) & (np.abs(moments) < np.finfo(np.float32).tiny))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e20])
def test_an_update_that_has_diverged_is_not_sent(wrong: float) -> None:
    arithmetic = Arithmetic(DilocoTerms(codec=Codec.FP32), 5001)
    with pytest.raises(ValueError, match=r"NaN|norm"):
        arithmetic.encoded(np.full(5001, wrong, np.float32), 1)


def test_the_outer_step_is_torchs_nesterov() -> None:
    torch = pytest.importorskip("torch")
    outer = Nesterov(0.7, 0.9)
    state = begun(1000, outer)
    weights = torch.nn.Parameter(torch.from_numpy(state[0].copy()))
    optimiser = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        mean = normal(1000, step)
        state = stepped(outer, state, mean, step)
        weights.grad = torch.from_numpy(mean)
        optimiser.step()
    assert np.allclose(state[0], weights.detach().numpy(), rtol=0, atol=1e-5)


def test_a_step_of_data_parallel_is_torchs_adamw_on_the_clipped_mean() -> None:
    torch = pytest.importorskip("torch")
    terms = replace(PARALLEL, warmup=10, outer_steps=60)
    outer = DataParallel(terms)
    start = state = begun(1001, outer)
    weights = torch.nn.Parameter(torch.from_numpy(start[0].copy()))
    optimiser = torch.optim.AdamW([weights], 1.0, (0.9, 0.95), weight_decay=0.1)
    for step in range(1, 61):
        mean = normal(1001, step) * np.float32(0.01 if step % 2 else 1.0)
        state = stepped(outer, state, mean, step)
        weights.grad = torch.from_numpy(mean.copy())
        torch.nn.utils.clip_grad_norm_([weights], terms.gradient_norm)
        for group in optimiser.param_groups:
            group["lr"] = terms.rate_at(step - 1) * min(1.0, step / 20)
        optimiser.step()
    assert np.allclose(state[0], weights.detach().numpy(), rtol=0, atol=2e-6)
    assert np.linalg.norm(state[0] - start[0]) > 0.5


def test_each_fragment_is_stepped_in_its_own_turn_as_if_it_were_the_model() -> None:
    size, count = 1003, 4
    arithmetic = Arithmetic(DilocoTerms(fragments=count, codec=Codec.FP32), size)
    parts, plain = arithmetic.fragments, Nesterov(0.9, 0.5)
    state = arithmetic.begun(normal(size))
    alone = state.copy()
    for step in range(1, 3 * count + 1):
        before, update = state.copy(), normal(size, step)
        arithmetic.advance(state, b"".join(arithmetic.encoded(update, step)[0]), step)
        changed = np.flatnonzero(state[0] != before[0])
        span = parts.span(step)
        assert span.start <= changed.min() <= changed.max() < span.stop
        if step % count == 1:
            only = np.zeros(size, np.float32)
            only[span] = update[span]
            alone = stepped(plain, alone, only, step)
    first = parts.span(1)
    assert np.array_equal(state[0, first], alone[0, first])
    assert sum(parts.span(one).stop - parts.span(one).start for one in range(1, 5)) == size


@pytest.mark.parametrize("wrong", [{"inner_steps": 2}, {"overlap": True}, {"fragments": 2}])
def test_data_parallel_is_refused_what_it_cannot_mean(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="averages the gradients of each step"):
        replace(PARALLEL, **wrong)  # type: ignore[arg-type]


# Quantisers, pieces, owners, sums


def heavy(count: int) -> Values:
    return np.random.default_rng(1).standard_t(3, count).astype(np.float32)


def lost(values: Values, back: Values) -> float:
    return float(np.linalg.norm(back - values) / np.linalg.norm(values))


def error(codec: Codec, values: Values) -> float:
    return lost(values, decode_untrusted(codec, encode(codec, values), values.size))


def test_blocks_keep_a_heavy_tail_that_one_scale_for_all_loses() -> None:
    """PRIME's scale is set by outliers: a third of a heavy-tailed gradient was lost."""
    n, t = normal(1 << 20), heavy(1 << 20)
    assert error(Codec.INT8, n) == pytest.approx(0.0070, abs=2e-4)
    assert error(Codec.INT8, t) == pytest.approx(0.0174, abs=2e-3)
    assert error(Codec.INT4, n) == pytest.approx(0.117, abs=2e-3)
    assert error(Codec.INT4, t) == pytest.approx(0.224, abs=1e-2)
    assert error(Codec.FP32, n) == 0
    assert lost(n, prime_decode(*prime_encode(n))) == pytest.approx(0.0161, abs=4e-4)
    assert lost(t, prime_decode(*prime_encode(t))) > 0.25


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([0, 1, -1, 2, -2, 0.25, -0.25, 0.5, -0.5, 3],
         [128, 157, 99, 186, 70, 135, 121, 142, 114, 215]),
        (range(-5, 6), [64, 77, 89, 102, 115, 128, 141, 154, 167, 179, 192]),
        ([0, 0, 0], [0, 0, 0]),
        ([3.0], [128]),
    ],
)  # fmt: skip
def test_primes_quantiser_is_primes(values: object, codes: object) -> None:
    """What the original C++ gave for these."""
    array = np.array(list(values), np.float32)
    found, table = prime_encode(array)
    assert list(found) == codes
    assert np.array_equal(prime_decode(found, table), array)


@given(st.sampled_from(Codec), st.lists(st.floats(-(2.0**66), 2.0**66, width=32), max_size=700))
def test_what_is_encoded_decodes_within_half_a_step(codec: Codec, numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    data = encode(codec, values)
    assert len(data) == encoded_bytes(codec, values.size)
    back = decode_untrusted(codec, data, values.size)
    step = {Codec.FP32: 0.0, Codec.INT8: 1 / 127, Codec.INT4: 1 / 7}[codec]
    if values.size:
        assert np.isfinite(back).all()
        peak = float(np.abs(values).max())
        assert float(np.abs(back - values).max()) <= 0.51 * step * peak + 1e-30


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_encoded(codec: Codec, bad: float) -> None:
    values = normal(1000)
    values[7] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        encode(codec, values)


@pytest.mark.parametrize(
    ("codec", "count", "last", "said"),
    [
        (Codec.INT8, 10, 0x80, "below"),
        (Codec.INT4, 9, 0x05, "padding"),
        (Codec.INT4, 10, 0x00, "below"),
    ],
)
def test_codes_that_no_encoder_writes_are_refused(
    codec: Codec, count: int, last: int, said: str
) -> None:
    data = encode(codec, normal(count))
    with pytest.raises(BadMessage, match=said):
        decode_untrusted(codec, data[:-1] + bytes([last]), count)


# Pieces, owners, sums.


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("count", [1, 255, 256, 257, 123_200, 5_000_000])
def test_pieces_cover_a_vector_once(codec: Codec, count: int) -> None:
    grid = PieceGrid.of(count, codec)
    assert sum(grid.values(one) for one in range(grid.pieces)) == count
    assert max(grid.length(one) for one in range(grid.pieces)) <= MAX_PIECE_BYTES
    if count < 1000:
        vector = normal(count)
        parts = [grid.decode_untrusted(*one) for one in enumerate(encode_all(grid, vector))]
        whole = decode_untrusted(codec, encode(codec, vector), count)
        assert np.array_equal(np.concatenate(parts), whole)


def test_who_has_twice_the_bandwidth_sums_twice_as_much() -> None:
    one, two, three = sorted(peer_named(n) for n in range(3))
    found = owners(400, {one: 10.0, two: 20.0, three: 10.0})
    assert [found.count(peer) for peer in (one, two, three)] == [100, 200, 100]
    assert found == sorted(found)
    unknown = owners(300, {one: 0.0, two: 5.0, three: 5.0})
    assert [unknown.count(peer) for peer in (one, two, three)] == [100, 100, 100]
    boaster = owners(1000, {one: 1e15, two: 5.0, three: 5.0})
    assert boaster.count(one) == 800


def test_a_mean_is_by_tokens_and_a_norm_beyond_three_medians_is_clipped() -> None:
    """A contribution a thousand times too large moves the mean as three honest ones would."""
    peers = sorted(peer_named(n) for n in range(4))
    tokens = dict(zip(peers, (100, 100, 100, 300), strict=True))
    by = shares(tokens, dict(zip(peers, (1.0, 1.0, 1.0, 1000.0), strict=True)))
    expected = [1 / 6, 1 / 6, 1 / 6, 0.5 * 0.003]
    assert [float(by[peer]) for peer in peers] == pytest.approx(expected, rel=1e-6)
    assert float(sum(shares(tokens, dict.fromkeys(peers, 0.0)).values())) == pytest.approx(1)
