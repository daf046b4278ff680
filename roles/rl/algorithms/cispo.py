"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a capped importance weight.

The ratio is a constant factor, so every token keeps its gradient; clipping the update of rare
tokens, as PPO does, would drop the turns of thought that they begin. Only the upper side is
capped, as ScaleRL (arXiv 2510.13786) and TRL do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from roles.rl.algorithms.base import Group, Sequences, Tokens, check_range, normalised, ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """-min(ratio, cap) A log-prob, where the ratio carries no gradient."""

    cap: float = 5.0
    """Upper bound of a ratio: TRL's ``epsilon_high``, ScaleRL's 5."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation."""

    def __post_init__(self) -> None:
        check_range("cap", self.cap, 1.0, 1e6)
        check_range("advantage_epsilon", self.advantage_epsilon, 0.0, 1.0)

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [normalised(group.rewards, self.advantage_epsilon) for group in groups]

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = ratio(tokens.logprobs, tokens.old).detach()
        losses = -ratios.clamp(max=self.cap) * tokens.advantages * tokens.logprobs
        is_capped = (ratios > self.cap) & (tokens.advantages > 0)
        return (losses * tokens.weights).sum() / tokens.total, {"clipped": is_capped}
