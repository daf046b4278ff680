"""The outer optimiser: stochastic gradient descent with Nesterov momentum, on the mean update.

The outer weights and the momentum are replicated: every member computes the same bits from the
same mean, and the record of a step holds the digest of both. The operations are numpy's on
float32, one after the other, so that no compiler fuses two into one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roles.diloco.core.pieces import PieceGrid, digest_of, root_of
from roles.diloco.core.quant import Codec, Values


@dataclass(frozen=True, slots=True)
class OuterState:
    """What all members hold alike between two steps."""

    weights: Values
    momentum: Values

    @classmethod
    def begin(cls, weights: Values) -> OuterState:
        """Before the first step: no momentum."""
        return cls(weights, np.zeros_like(weights))

    def after(self, mean: Values, *, rate: float, decay: float) -> OuterState:
        """One step against ``mean``, the mean of outer minus inner weights.

        v <- m v + g; theta <- theta - r (g + m v), as torch's ``SGD(nesterov=True)``. Momentum
        that falls below the smallest normal number is zero on machines that flush it, so it is
        made zero on all.
        """
        kept, step = np.float32(decay), np.float32(rate)
        momentum = (kept * self.momentum + mean).astype(np.float32, copy=False)
        momentum[np.abs(momentum) < np.finfo(np.float32).tiny] = 0.0
        weights = self.weights - step * (mean + kept * momentum)
        return OuterState(weights.astype(np.float32, copy=False), momentum)

    @property
    def grid(self) -> PieceGrid:
        """Of weights and momentum, one behind the other, as joiners fetch them."""
        return state_grid(self.weights.size)

    def piece(self, index: int) -> bytes:
        """One piece of weights and momentum, as a joiner fetches it."""
        size, span = self.weights.size, self.grid.span(index)
        parts = (
            self.weights[span.start : min(span.stop, size)],
            self.momentum[max(0, span.start - size) : max(0, span.stop - size)],
        )
        return b"".join(part.astype("<f4").tobytes() for part in parts)

    def pieces(self) -> list[bytes]:
        """All of them."""
        return [self.piece(one) for one in range(self.grid.pieces)]

    @classmethod
    def joined(cls, size: int, pieces: list[bytes]) -> OuterState:
        """What `pieces` gave. Raises `BadMessage`."""
        both = state_grid(size).join(pieces)
        return cls(both[:size].copy(), both[size:].copy())

    @property
    def root(self) -> bytes:
        """What the state is known by: the digest of its pieces' digests."""
        return root_of([digest_of(piece) for piece in self.pieces()])


def state_grid(size: int) -> PieceGrid:
    """How the state of a model of ``size`` weights is cut."""
    return PieceGrid.of(2 * size, Codec.FP32)
