"""Dr. GRPO (arXiv 2503.20783): GRPO without the two terms that favour long wrong answers and
groups of little spread.

Advantages are not divided by the group's standard deviation, and the loss is divided by a
constant, the run's limit of tokens, in place of the completions' lengths.
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
    centred,
    check_range,
    clipped,
    ratio,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpo:
    """Each token's ratio to the policy before the step, clipped."""

    clip: float = 0.2
    """The ratio is clipped to 1 +- this."""

    def __post_init__(self) -> None:
        check_range("clip", self.clip, 0.0, 1e6)

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [np.array(centred(group.rewards), dtype=np.float32) for group in groups]

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        losses, is_clipped = clipped(
            ratio(tokens.logprobs, tokens.old), tokens.advantages, self.clip, self.clip
        )
        divisor = sequences.total * sequences.limit
        return (losses * tokens.weights).sum() / divisor, {"clipped": is_clipped}
