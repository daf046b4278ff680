"""Group-relative advantages, and which groups teach anything.

The trainer computes them, never the worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ: a group that is all right or all wrong has no gradient."""
    return len(rewards) > 1 and min(rewards) != max(rewards)


def group_advantages(rewards: Sequence[float], epsilon: float) -> list[float]:
    """(reward - mean) / (standard deviation with n - 1 + ``epsilon``), per completion of one
    group."""
    if len(rewards) < 2:
        raise ValueError("an advantage needs at least two completions to compare")
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + epsilon) for reward in rewards]
