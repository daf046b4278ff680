"""GRPO with a two-sided clip and a loss per token, as INTELLECT-2 ran it.

Sources: GRPO, arXiv 2402.03300; the second side of the clip, INTELLECT-2, arXiv 2505.07291; the
mean over tokens, DAPO, arXiv 2503.14476. TRL calls this loss ``dapo`` with ``delta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from roles.rl.algorithms.base import (
    Group,
    Sequences,
    Tokens,
    check_range,
    clipped,
    normalised,
    ratio,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """Each token's ratio to the policy before the step, clipped."""

    clip: float = 0.2
    """The ratio is clipped to 1 +- this (PPO's epsilon)."""

    clip_negative: float = 4.0
    """Most that a ratio counts where the advantage is negative; more than 1 + ``clip``. Without
    it the loss of one token grows with its ratio without end: runs at too high a rate reached
    80."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation."""

    def __post_init__(self) -> None:
        check_range("clip", self.clip, 0.0, 1e6)
        check_range("advantage_epsilon", self.advantage_epsilon, 0.0, 1.0)
        if self.clip_negative <= 1 + self.clip:
            raise ValueError(
                f"clip_negative must exceed 1 + clip ({1 + self.clip}), not"
                f" {self.clip_negative}"
            )

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [normalised(group.rewards, self.advantage_epsilon) for group in groups]

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        losses, is_clipped = clipped(
            ratio(tokens.logprobs, tokens.old),
            tokens.advantages,
            self.clip,
            self.clip,
            self.clip_negative,
        )
        return (losses * tokens.weights).sum() / tokens.total, {"clipped": is_clipped}
