"""What rewards on held-out tasks say together: their means, over all and kind by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roles.engines.base import Evaluation


def evaluation_of_rewards(
    kinds: Sequence[str], greedy: Sequence[float], sampled: Sequence[float]
) -> Evaluation:
    """The means of both, and of both for each kind. One reward of either for each task, whose
    kind stands at the same place in ``kinds``."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kind, *rewards in zip(kinds, greedy, sampled, strict=True):
        by_kind.setdefault(kind, []).append((rewards[0], rewards[1]))
    return Evaluation(
        _mean(greedy),
        _mean(sampled),
        {
            kind: (_mean([one for one, _ in pairs]), _mean([one for _, one in pairs]))
            for kind, pairs in by_kind.items()
        },
    )


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)
