"""What all members hold alike: the weights, and the moments of what takes the outer steps.

Every member computes the same bits from the same mean (`algorithm`), and the record of a step
holds the digest of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roles.contract.core.diloco import Codec
from roles.diloco.core.pieces import PieceGrid, digest_of, root_of
from roles.diloco.core.quant import Values


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
