"""GSPO (arXiv 2507.18071): one ratio for a whole completion, clipped as one.

The ratio is exp of the mean log-ratio of the completion's tokens, and every completion counts
the same. Its clips are small because a mean over many tokens hardly moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from roles.rl.algorithms.base import (
    FURTHEST,
    Group,
    Sequences,
    Tokens,
    check_range,
    clipped,
    normalised,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """Each completion's ratio to the policy before the step, clipped."""

    clip_low: float = 3e-4
    """Distance below 1 to which the ratio may fall."""
    clip_high: float = 4e-4
    """The ratio is clipped to 1 - ``clip_low`` and 1 + ``clip_high``."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation."""

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0, 1e6)
        check_range("advantage_epsilon", self.advantage_epsilon, 0.0, 1.0)

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [normalised(group.rewards, self.advantage_epsilon) for group in groups]

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        means = sequences.mean(tokens.logprobs - tokens.old)
        losses, is_clipped = clipped(
            means.clamp(max=FURTHEST).exp(),
            sequences.mean(tokens.advantages),
            self.clip_low,
            self.clip_high,
        )
        loss = (losses * sequences.mean(tokens.weights)).sum() / sequences.total
        return loss, {"clipped": is_clipped[sequences.index]}
