"""Outer algorithms, a suite for both: what all members hold alike after a mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.core.outer import (
    DataParallel,
    Fragments,
    Nesterov,
    OuterAlgorithm,
    OuterState,
    algorithm_of,
    state_grid,
)
from roles.diloco.core.pieces import PieceGrid, digest_of, root_of
from roles.diloco.core.quant import Values
from roles.diloco.reduction import DigestedState

PARALLEL = DilocoTerms(outer=Outer.PARALLEL, inner_steps=1, outer_steps=300)
ALGORITHMS = [
    pytest.param(algorithm_of(DilocoTerms()), id="diloco"),
    pytest.param(algorithm_of(DilocoTerms(fragments=4)), id="fragments"),
    pytest.param(algorithm_of(PARALLEL), id="parallel"),
]


def normal(count: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def length(outer: OuterAlgorithm, size: int) -> int:
    """Of an update."""
    count = outer.fragments if isinstance(outer, Nesterov) else 1
    return Fragments(size, count).length


@pytest.mark.parametrize("outer", ALGORITHMS)
def test_a_state_is_known_by_the_digests_of_its_pieces(outer: OuterAlgorithm) -> None:
    size = 200_000
    state = OuterState.begin(normal(size), outer.moments)
    state = outer.after(state, normal(length(outer, size), 1), 1)
    pieces = state.pieces()
    assert state.root == root_of([digest_of(one) for one in pieces])
    assert len(pieces) == state_grid(size, outer.moments).pieces > 1
    back = OuterState.joined(size, pieces, outer.moments)
    assert back.root == state.root
    assert all(map(np.array_equal, back.moments, state.moments))
    other = OuterState(state.weights, (state.moments[0] + np.float32(1e-9), *state.moments[1:]))
    assert other.root != state.root


@pytest.mark.parametrize("outer", ALGORITHMS)
def test_equal_means_leave_equal_bits_and_the_state_before_as_it_was(
    outer: OuterAlgorithm,
) -> None:
    """Views fail: a step is taken again from the state before, and must come out the same."""
    size = 5001
    grid = PieceGrid.of(length(outer, size), Codec.INT4)
    state = OuterState.begin(normal(size), outer.moments)
    for step in range(1, 6):
        pieces, before = grid.encode_all(normal(grid.count, step)), state.root
        first, again = (DigestedState.after(outer, grid, state, pieces, step) for _ in range(2))
        assert first.blob.root == again.blob.root != before == state.root
        state = first.state
    small = outer.after(state, np.full(grid.count, 1e-42, np.float32), 6)
    for moment in small.moments:
        assert not np.any((moment != 0) & (np.abs(moment) < np.finfo(np.float32).tiny))


def test_the_outer_step_is_torchs_nesterov() -> None:
    torch = pytest.importorskip("torch")
    start, outer = normal(1000), Nesterov(0.7, 0.9)
    state = OuterState.begin(start)
    weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        mean = normal(1000, step)
        state = outer.after(state, mean, step)
        weights.grad = torch.from_numpy(mean)
        optimiser.step()
    assert np.allclose(state.weights, weights.detach().numpy(), rtol=0, atol=1e-5)


def test_a_step_of_data_parallel_is_torchs_adamw_on_the_clipped_mean() -> None:
    torch = pytest.importorskip("torch")
    terms = replace(PARALLEL, warmup=10, outer_steps=60)
    start, outer = normal(1001), DataParallel(terms)
    state = OuterState.begin(start, outer.moments)
    weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.AdamW([weights], 1.0, (0.9, 0.95), weight_decay=0.1)
    for step in range(1, 61):
        mean = normal(1001, step) * np.float32(0.01 if step % 2 else 1.0)
        state = outer.after(state, mean, step)
        weights.grad = torch.from_numpy(mean.copy())
        torch.nn.utils.clip_grad_norm_([weights], terms.gradient_norm)
        for group in optimiser.param_groups:
            group["lr"] = terms.rate_at(step - 1) * min(1.0, step / 20)
        optimiser.step()
    assert np.allclose(state.weights, weights.detach().numpy(), rtol=0, atol=2e-6)
    assert np.linalg.norm(state.weights - start) > 0.5


def test_each_fragment_is_stepped_in_its_own_turn_as_if_it_were_the_model() -> None:
    size, count = 1003, 4
    parts, outer = Fragments(size, count), Nesterov(0.7, 0.9, count)
    state = alone = OuterState.begin(normal(size))
    plain = Nesterov(0.7, 0.9)
    for step in range(1, 3 * count + 1):
        before, update = state.weights, normal(size, step)
        state = outer.after(state, parts.cut(step, update), step)
        changed = np.flatnonzero(state.weights != before)
        span = parts.span(step)
        assert span.start <= changed.min() <= changed.max() < span.stop
        if step % count == 1:
            only = np.zeros(size, np.float32)
            only[span] = update[span]
            alone = plain.after(alone, only, step)
    first = parts.span(1)
    assert np.array_equal(state.weights[first], alone.weights[first])
    assert sum(parts.span(one).stop - parts.span(one).start for one in range(1, 5)) == size


@pytest.mark.parametrize(
    "wrong",
    [{"inner_steps": 2}, {"overlap": True}, {"fragments": 2}],
)
def test_data_parallel_is_refused_what_it_cannot_mean(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="averages the gradients of each step"):
        replace(PARALLEL, **wrong)  # type: ignore[arg-type]
