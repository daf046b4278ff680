"""DAPO (arXiv 2503.14476): clip-higher, a loss per token, and a soft penalty for long answers.

Its dynamic sampling is what every run of Shoal does: groups whose rewards are all equal are not
learnt from.
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
class Dapo:
    """A higher upper clip leaves room for unlikely tokens to grow."""

    clip_low: float = 0.2
    """Distance below 1 to which the ratio may fall."""
    clip_high: float = 0.28
    """The ratio is clipped to 1 - ``clip_low`` and 1 + ``clip_high``."""

    overlong_buffer: int = 0
    """Tokens before the run's limit in which the penalty grows to `overlong_penalty`; 0: none.
    Eq. 13."""

    overlong_penalty: float = 1.0
    """Taken off the reward of a completion that reaches the limit."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation."""

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0, 1e6)
        check_range("overlong_buffer", self.overlong_buffer, 0, 1 << 20)
        check_range("overlong_penalty", self.overlong_penalty, 0.0, 1e6)
        check_range("advantage_epsilon", self.advantage_epsilon, 0.0, 1.0)

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [
            normalised(
                [
                    reward - self._penalty(length, group.limit)
                    for reward, length in zip(group.rewards, group.lengths, strict=True)
                ],
                self.advantage_epsilon,
            )
            for group in groups
        ]

    def _penalty(self, length: int, limit: int) -> float:
        over = length - (limit - self.overlong_buffer)
        return self.overlong_penalty * over / self.overlong_buffer if over > 0 else 0.0

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        losses, is_clipped = clipped(
            ratio(tokens.logprobs, tokens.old),
            tokens.advantages,
            self.clip_low,
            self.clip_high,
        )
        return (losses * tokens.weights).sum() / tokens.total, {"clipped": is_clipped}
