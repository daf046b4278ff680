"""How sure it is that somebody lies: findings of a replay, weighed.

Somebody else's engine finds numbers that differ a little, as numerics do, and limits that
honest work exceeds now and then. So a `Finding` is weighed by how far it lies beyond its limit:

- up to `MARGIN` times it is borderline: nobody is accused;
- up to `BEYOND_DOUBT` times it is a strike;
- further, or where no numerics are in it, it is a lie, which convicts alone. In float32 every
  cheat is far beyond: made-up tokens are 500 times, an older policy 20 times. In bfloat16
  made-up tokens are 14 times, int8 weights and other temperatures strikes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from proofs.checks import Reason

MARGIN: Final = 1.5
"""Up to so many times a limit no validator is accused: two honest engines that measure one
statistic near a limit differ by less."""
BEYOND_DOUBT: Final = 10.0
"""More times a limit than any honest numerics: in bfloat16 a token 9 nats below its draw, where
one in a million is 1 below."""
STRIKES: Final = 3
"""Strikes that convict together. A false one in 10,000 replays makes three in 100 once in six
million."""
REWARDS_LIMIT: Final = 1e-3
"""By which a reward may differ from ours: environments are the same code on the same data, and
differ by a rounding at most."""

REWARDS: Final = "rewards differ from the environment's"
NO_REWARD: Final = "a reward that no environment pays"
NO_ANSWER: Final = "content that is no answer to the tasks of its place"
HEARS_OTHER: Final = "its worker's environment said other words within it than this one"
"""A finding against a validator that accepted it; of its worker nothing is known."""

_CERTAIN: Final = (Reason.MALFORMED_PROOF.value, NO_REWARD, NO_ANSWER)
"""Reasons that have no numerics in them."""
_NEVER_ALONE: Final = (Reason.SURPRISE.value, Reason.IMPROBABLE_END.value, REWARDS)
"""Heavy tails, and the code of others, which may depend on the machine after all."""


class Weight(IntEnum):
    """What a finding says of the validator that signed otherwise."""

    NOTHING = 0
    BORDERLINE = 1
    """Not what was signed, and no validator's fault."""
    STRIKE = 2
    LIE = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One number that is not what an accepting verdict says it is."""

    reason: str
    statistic: float
    limit: float

    @property
    def weight(self) -> Weight:
        """How much it says."""
        if self.reason in _CERTAIN:
            return Weight.LIE
        if self.reason == HEARS_OTHER:
            return Weight.STRIKE
        excess = self._excess
        if not excess > MARGIN:  # also what is no number: our engine's trouble
            return Weight.BORDERLINE
        if excess <= BEYOND_DOUBT or self.reason in _NEVER_ALONE:
            return Weight.STRIKE
        return Weight.LIE

    @property
    def _excess(self) -> float:
        """By which factor the limit is exceeded, or, of a least value, fallen short of. Of a
        limit of zero, which counts have, by how many."""
        if self.reason == Reason.IMPROBABLE_END.value:
            return self.limit / self.statistic if self.statistic > 0 else math.inf
        return self.statistic / (self.limit or 1.0)

    def __str__(self) -> str:
        return f"{self.reason} ({self.statistic:g}, limit {self.limit:g})"
