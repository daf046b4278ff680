"""The outer step: the common state of all members, and its change by the mean of their updates.

Theory of operation
-------------------
Rounds, sums, records and recovery know vectors and digests, and not what is learnt by them. An
`OuterAlgorithm` says what a mean means: for `Nesterov` it is how far the members have come
(DiLoCo), for `DataParallel` it is a gradient, and every inner step is a round.

The state is an array of float32: the weights, and as many rows of the same length as the
algorithm has moments. It is replicated, so a step must give the same bits on all machines. The
operations are numpy's on float32, one after the other, so that no compiler fuses two into one
rounding; sums over a vector are folded by halves, since libraries add up in an order of their
own. What falls below the smallest normal number is zero on machines that flush it, so it is
made zero on all. A step goes through the mean piece by piece: no vector beside the state is
ever whole.

A model of F fragments is exchanged in F rounds, a fragment each, by turns. The bytes between
two exchanges of one weight are the same, the burst is an F-th (Streaming DiLoCo, 2501.18512).
Whatever is not exchanged in a round keeps what a member has learnt since its own last turn. All
fragments have one length, the last with zeros behind it: so the pieces of an update are cut
alike in all rounds, and rounds, sums and evidence need not know of fragments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage
from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.core.pieces import (
    MAX_NORM,
    PieceGrid,
    check_part,
    digest_of,
    norm_of,
    sum_piece,
)
from roles.diloco.core.quant import Values, encode

Rows: TypeAlias = NDArray[np.float32]
"""(1 + moments, weights): what all members hold alike between two steps."""
Parts = Callable[[], Iterable[Values]]
"""Gives the pieces of a mean, decoded, in order."""

RAMP: Final = 20
"""Steps over which the rate climbs while Adam's moments are young: its first steps are as large
as its rate, whatever the gradient."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """The division of a model into fragments, of which each outer step changes one."""

    size: int
    """Number of weights in the model."""
    count: int = 1

    @property
    def length(self) -> int:
        """Weights of a fragment, padding included."""
        return -(-self.size // self.count)

    def span(self, step: int) -> slice:
        """Return the weights that the outer step ``step`` changes."""
        start = (step - 1) % self.count * self.length
        return slice(min(start, self.size), min(start + self.length, self.size))


class OuterAlgorithm(Protocol):
    """The rule that computes a run's outer steps."""

    @property
    def moments(self) -> int:
        """Number of vectors that the algorithm keeps beside the weights."""
        ...

    def advance(self, state: Rows, parts: Parts, step: int) -> None:
        """Take the outer step ``step`` in place; ``parts`` are of the mean update."""
        ...


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Stochastic gradient descent with Nesterov momentum against the mean of outer minus inner
    weights; of a model in fragments, on the fragment of the step."""

    rate: float
    decay: float
    fragments: int = 1
    moments: ClassVar[int] = 1
    """One vector is kept beside the weights: the momentum."""

    def advance(self, state: Rows, parts: Parts, step: int) -> None:
        """v <- m v + g; theta <- theta - r (g + m v), as torch's ``SGD(nesterov=True)``."""
        kept, rate = np.float32(self.decay), np.float32(self.rate)
        span = Fragments(state.shape[1], self.fragments).span(step)
        for (weights, momentum), mean in _beside(state[:, span], parts()):
            momentum[:] = _flushed(kept * momentum + mean)
            weights -= rate * (mean + kept * momentum)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Synchronous data parallel: the mean is that of the members' gradients, and all take the
    same step of AdamW, clipped, on the run's schedule."""

    terms: DilocoTerms
    moments: ClassVar[int] = 2
    """Two vectors are kept beside the weights: Adam's moments."""

    def advance(self, state: Rows, parts: Parts, step: int) -> None:
        """Take the step of AdamW that one machine with the whole batch would
        (`roles.diloco.pretrain`).
        """
        terms, (early, late) = self.terms, self.terms.betas
        one = np.float32
        length = math.sqrt(sum(_folded(np.square(part, dtype=np.float64)) for part in parts()))
        clip = one(min(1.0, terms.gradient_norm / (length + 1e-6)))
        rate = terms.rate_at(step - 1) * min(1.0, step / RAMP)
        for (weights, first, second), mean in _beside(state, parts()):
            gradient = mean * clip
            first[:] = _flushed(first * one(early) + gradient * one(1 - early))
            second[:] = _flushed(second * one(late) + np.square(gradient) * one(1 - late))
            spread = np.sqrt(second) * one(1 / math.sqrt(1 - late**step)) + one(1e-8)
            weights *= one(1 - rate * terms.weight_decay)
            weights -= first / spread * one(rate / (1 - early**step))


def algorithm_of(terms: DilocoTerms) -> OuterAlgorithm:
    """Return the outer algorithm that the run's owner chose."""
    if terms.outer is Outer.PARALLEL:
        return DataParallel(terms)
    return Nesterov(terms.outer_rate, terms.outer_momentum, terms.fragments)


def _beside(state: Rows, parts: Iterable[Values]) -> Iterator[tuple[Rows, Values]]:
    """Yield each part with the columns of ``state`` that it changes, without the padding."""
    at = 0
    for part in parts:
        rows = state[:, at : at + part.size]
        yield rows, part[: rows.shape[1]]
        at += part.size


def _flushed(values: Values) -> Values:
    values[np.abs(values) < np.finfo(np.float32).tiny] = 0.0
    return values


def _folded(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return the sum, added by halves so that all machines get the same bits."""
    while values.size > 1:
        half = values.size // 2
        folded = values[:half] + values[half : 2 * half]
        folded[: values.size % 2] += values[2 * half :]
        values = folded
    return float(values[0]) if values.size else 0.0


class BadPiece(Exception):
    """A piece cannot be used. The error carries its number and its contributor's rank."""

    def __init__(self, index: int, rank: int = 0) -> None:
        super().__init__(f"piece {index} of member {rank} cannot be used")
        self.index, self.rank = index, rank


class Arithmetic:
    """The arithmetic that all members of a run share: how vectors are cut, encoded, summed,
    applied.

    It holds no vector, so that a node may have one as well as its worker.
    """

    def __init__(self, terms: DilocoTerms, size: int) -> None:
        """Prepare the arithmetic of a model with ``size`` weights."""
        self.size = size
        self.outer = algorithm_of(terms)
        self.fragments = Fragments(size, terms.fragments)
        self.grid = PieceGrid.of(self.fragments.length, terms.codec)
        """Cuts an update, and a mean."""
        self.state_grid = PieceGrid.of((1 + self.outer.moments) * size, Codec.FP32)
        """Cuts weights and moments, which lie one behind the other, as joiners fetch them."""

    def rows(self, values: Values) -> Rows:
        """Return a state file's values as rows that share their memory.

        Raises:
            ValueError: The state is of a model with another size.
        """
        return values.reshape(1 + self.outer.moments, self.size)

    def begun(self, weights: Values) -> Rows:
        """Return the state before the first step."""
        state = np.zeros((1 + self.outer.moments, self.size), np.float32)
        state[0] = weights
        return state

    def encoded(self, update: Values, step: int) -> tuple[list[bytes], list[float]]:
        """Return an update's pieces, encoded for a step, and the norm of each piece as it
        decodes.

        Raises:
            ValueError: The update cannot be encoded: the inner steps have diverged.
        """
        part = update[self.fragments.span(step)]
        pieces, norms = [], []
        for index in range(self.grid.pieces):
            values = part[self.grid.span(index)]
            short = self.grid.values(index) - values.size
            if short:  # the last fragment has zeros behind it
                values = np.concatenate([values, np.zeros(short, np.float32)])
            pieces.append(encode(self.grid.codec, values))
            norms.append(
                float(np.float32(norm_of(self.grid.decode_untrusted(index, pieces[-1]))))
            )
        if max(norms) > MAX_NORM:
            raise ValueError(f"a piece of it has norm {max(norms):g}")
        return pieces, norms

    def summed(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        """Return the encoded pieces of the mean from ``first`` on.

        Args:
            first: The number of the first piece.
            parts: Pieces of each contributor, in order of ids.
            norms: Norms that each contributor signed, of all its pieces.
            by: Weight of each contribution.

        Raises:
            BadPiece: A contributor signed an invalid piece.
        """

        def judged(index: int, pieces: Sequence[bytes]) -> Iterator[Values]:
            for rank, piece in enumerate(pieces):
                try:
                    yield check_part(self.grid, index, piece, norms[rank][index])
                except BadMessage as error:
                    raise BadPiece(index, rank) from error

        return [
            sum_piece(self.grid, index, judged(index, pieces), by)
            for index, pieces in enumerate(zip(*parts, strict=True), first)
        ]

    def advance(self, state: Rows, mean: bytes | memoryview, step: int) -> None:
        """Take an outer step in place; ``mean`` has its pieces end to end.

        Raises:
            BadPiece: A piece cannot be decoded. The state is then only partly changed.
        """
        pieces = self.grid.cut(mean)

        def parts() -> Iterator[Values]:
            for index, piece in enumerate(pieces):
                try:
                    yield self.grid.decode_untrusted(index, piece)
                except BadMessage as error:
                    raise BadPiece(index) from error

        self.outer.advance(state, parts, step)


def digests_of(grid: PieceGrid, data: bytes | memoryview) -> list[bytes]:
    """Return the digests of pieces that lie end to end; none if the length is not the
    grid's.
    """
    if len(data) != grid.total_bytes:
        return []
    return [digest_of(piece) for piece in grid.cut(data)]
