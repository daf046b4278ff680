"""Weighing of a replay's findings: how certain it is that somebody lied.

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
"""Factor of a limit up to which no validator is accused: two honest engines that measure one
statistic near a limit differ by less."""
BEYOND_DOUBT: Final = 10.0
"""Factor of a limit that no honest numerics exceed: in bfloat16 a token 9 nats below its draw,
where one in a million is 1 below."""
STRIKES: Final = 3
"""Number of strikes that convict together. If one replay in 10,000 gives a false strike, three
in 100 replays occur once in six million."""
REWARDS_LIMIT: Final = 1e-3
"""Most by which a reward may differ from ours. Environments are the same code on the same data,
and differ by a rounding at most."""

REWARDS: Final = "rewards differ from the environment's"
NO_REWARD: Final = "a reward that no environment pays"
NO_ANSWER: Final = "content that is no answer to the tasks of its place"
HEARS_OTHER: Final = "its worker's environment said other words within it than this one"
"""Finding against a validator that accepted the place; it tells nothing about the worker."""

_CERTAIN: Final = (Reason.MALFORMED_PROOF.value, NO_REWARD, NO_ANSWER)
"""Reasons that do not depend on numerics."""
_NEVER_ALONE: Final = (Reason.SURPRISE.value, Reason.IMPROBABLE_END.value, REWARDS)
"""Reasons that never convict alone: statistics with heavy tails, and environments' code, which
may depend on the machine."""


class Weight(IntEnum):
    """Strength of a finding against the validator that signed otherwise."""

    NOTHING = 0
    BORDERLINE = 1
    """The result differs from what was signed, but the validator is not at fault."""
    STRIKE = 2
    LIE = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """A statistic that contradicts an accepting verdict."""

    reason: str
    statistic: float
    limit: float

    @property
    def weight(self) -> Weight:
        """Strength of this finding against the validator."""
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
        """Factor by which the limit is exceeded, or, for a lower limit, missed. If the limit is
        zero, as for counts, the statistic itself."""
        if self.reason == Reason.IMPROBABLE_END.value:
            return self.limit / self.statistic if self.statistic > 0 else math.inf
        return self.statistic / (self.limit or 1.0)

    def __str__(self) -> str:
        return f"{self.reason} ({self.statistic:g}, limit {self.limit:g})"
