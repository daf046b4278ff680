"""The outer step: what all members hold alike, and how the mean of their updates changes it.

Theory of operation
-------------------
Rounds, sums, records and recovery know vectors and digests, and not what is learnt by them. An
`OuterAlgorithm` says what a mean means: for `Nesterov` it is how far the members have come
(DiLoCo), for `DataParallel` it is a gradient, and every inner step is a round.

The state is replicated, so a step must give the same bits on all machines. The operations are
numpy's on float32, one after the other, so that no compiler fuses two into one rounding; sums
over a vector are folded by halves, since libraries add up in an order of their own. What falls
below the smallest normal number is zero on machines that flush it, so it is made zero on all.

A model of F fragments is exchanged in F rounds, a fragment each, by turns. The bytes between
two exchanges of one weight are the same, the burst is an F-th (Streaming DiLoCo, 2501.18512).
Whatever is not exchanged in a round keeps what a member has learnt since its own last turn. All
fragments have one length, the last with zeros behind it: so the pieces of an update are cut
alike in all rounds, and rounds, sums and evidence need not know of fragments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np

from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.core.pieces import PieceGrid, digest_of, root_of
from roles.diloco.core.quant import Values

RAMP: Final = 20
"""Steps over which the rate climbs while Adam's moments are young: its first steps are as large
as its rate, whatever the gradient."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """How a model is parted."""

    size: int
    """Weights of the model."""
    count: int = 1

    @property
    def length(self) -> int:
        """Weights of a fragment, padding included."""
        return -(-self.size // self.count)

    def span(self, step: int) -> slice:
        """The weights that the outer step ``step`` changes."""
        start = (step - 1) % self.count * self.length
        return slice(min(start, self.size), min(start + self.length, self.size))

    def cut(self, step: int, vector: Values) -> Values:
        """What of a vector of all weights travels at a step."""
        part = vector[self.span(step)]
        return np.concatenate([part, np.zeros(self.length - part.size, np.float32)])


@dataclass(frozen=True, slots=True)
class OuterState:
    """What all members hold alike between two steps."""

    weights: Values
    moments: tuple[Values, ...]
    """Of the outer algorithm, each as long as the weights."""

    @classmethod
    def begin(cls, weights: Values, moments: int = 1) -> OuterState:
        """Before the first step: all moments are zero."""
        return cls(weights, (np.zeros_like(weights),) * moments)

    @property
    def grid(self) -> PieceGrid:
        """Of weights and moments, one behind the other, as joiners fetch them."""
        return state_grid(self.weights.size, len(self.moments))

    def piece(self, index: int) -> bytes:
        """One piece of weights and moments, as a joiner fetches it."""
        size, span = self.weights.size, self.grid.span(index)
        return b"".join(
            vector[max(0, span.start - at) : max(0, span.stop - at)].astype("<f4").tobytes()
            for at, vector in zip(
                range(0, span.stop, size), (self.weights, *self.moments), strict=False
            )
        )

    def pieces(self) -> list[bytes]:
        """All of them."""
        return [self.piece(one) for one in range(self.grid.pieces)]

    @classmethod
    def joined(cls, size: int, pieces: list[bytes], moments: int = 1) -> OuterState:
        """What `pieces` gave. Raises `BadMessage`."""
        all_of_them = state_grid(size, moments).join(pieces).reshape(1 + moments, size)
        weights, *rest = (one.copy() for one in all_of_them)
        return cls(weights, tuple(rest))

    @property
    def root(self) -> bytes:
        """What the state is known by: the digest of its pieces' digests."""
        return root_of([digest_of(piece) for piece in self.pieces()])


def state_grid(size: int, moments: int = 1) -> PieceGrid:
    """How the state of a model of ``size`` weights is cut."""
    return PieceGrid.of((1 + moments) * size, Codec.FP32)


class OuterAlgorithm(Protocol):
    """What takes the outer steps of a run."""

    @property
    def moments(self) -> int:
        """Vectors that it keeps, beside the weights."""
        ...

    def after(self, state: OuterState, mean: Values, step: int) -> OuterState:
        """The state after the outer step ``step``, of which ``mean`` is the mean update."""
        ...


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Stochastic gradient descent with Nesterov momentum against the mean of outer minus inner
    weights; of a model in fragments, on the fragment of the step."""

    rate: float
    decay: float
    fragments: int = 1
    moments: ClassVar[int] = 1
    """The momentum."""

    def after(self, state: OuterState, mean: Values, step: int) -> OuterState:
        """v <- m v + g; theta <- theta - r (g + m v), as torch's ``SGD(nesterov=True)``."""
        kept, rate = np.float32(self.decay), np.float32(self.rate)
        span = Fragments(state.weights.size, self.fragments).span(step)
        mean = mean[: span.stop - span.start]
        weights, momentum = state.weights.copy(), state.moments[0].copy()
        momentum[span] = _flushed(kept * momentum[span] + mean)
        weights[span] -= rate * (mean + kept * momentum[span])
        return OuterState(weights, (momentum,))


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Synchronous data parallel: the mean is that of the members' gradients, and all take the
    same step of AdamW, clipped, on the run's schedule."""

    terms: DilocoTerms
    moments: ClassVar[int] = 2
    """Adam's two."""

    def after(self, state: OuterState, mean: Values, step: int) -> OuterState:
        """As one machine with the whole batch would (`roles.engines.torch.pretrain`)."""
        terms, (early, late) = self.terms, self.terms.betas
        one = np.float32
        length = math.sqrt(_folded(np.square(mean, dtype=np.float64)))
        gradient = mean * one(min(1.0, terms.gradient_norm / (length + 1e-6)))
        first, second = state.moments
        first = _flushed(first * one(early) + gradient * one(1 - early))
        second = _flushed(second * one(late) + np.square(gradient) * one(1 - late))
        rate = terms.rate_at(step - 1) * min(1.0, step / RAMP)
        spread = np.sqrt(second) * one(1 / math.sqrt(1 - late**step)) + one(1e-8)
        weights = state.weights * one(1 - rate * terms.weight_decay)
        weights -= first / spread * one(rate / (1 - early**step))
        return OuterState(weights, (first, second))


def algorithm_of(terms: DilocoTerms) -> OuterAlgorithm:
    """The one that a run's owner chose."""
    if terms.outer is Outer.PARALLEL:
        return DataParallel(terms)
    return Nesterov(terms.outer_rate, terms.outer_momentum, terms.fragments)


def _flushed(values: Values) -> Values:
    values[np.abs(values) < np.finfo(np.float32).tiny] = 0.0
    return values


def _folded(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The sum, by halves: the same on all machines."""
    while values.size > 1:
        half = values.size // 2
        folded = values[:half] + values[half : 2 * half]
        folded[: values.size % 2] += values[2 * half :]
        values = folded
    return float(values[0]) if values.size else 0.0
