"""Outer algorithms, a suite for both: what all members hold alike after a mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.core.outer import (
    Arithmetic,
    BadPiece,
    DataParallel,
    Nesterov,
    OuterAlgorithm,
    Rows,
    digests_of,
)
from roles.diloco.core.quant import Values

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


def test_a_piece_of_a_mean_that_cannot_be_read_is_named() -> None:
    arithmetic = Arithmetic(DilocoTerms(), 5001)
    pieces, _ = arithmetic.encoded(normal(5001), 1)
    pieces[3] = b"\xc0\x7f" + pieces[3][2:]
    with pytest.raises(BadPiece) as caught:
        arithmetic.advance(arithmetic.begun(normal(5001)), b"".join(pieces), 1)
    assert caught.value.index == 3


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
