"""What a quantity has been lately, and how long to wait for the next one."""

from __future__ import annotations

import math
from typing import Final

SMOOTHING: Final = 0.25
"""Weight of the newest sample. TCP gives a round trip 1/8 (RFC 6298); here samples are chunks,
which are fewer: after four of them two thirds of the average are theirs."""
_DEVIATIONS: Final = 4
"""Mean deviations above the average from which a sample counts as late, as in TCP's
retransmission timeout (RFC 6298): a steady line is late soon, an uneven one is waited for."""


class SmoothedAverage:
    """An exponentially weighted moving average: each sample moves it by a quarter of the
    way."""

    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def observe(self, sample: float) -> None:
        """Take one more sample into account."""
        self.value += SMOOTHING * (sample - self.value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value:.4g})"


class Patience:
    """How long to wait for something, judged by how long it has usually taken.

    This is the only estimator of "late" in SHARDCAST. It waits for what is usual plus four
    times what samples usually differ from that, at least ``floor`` and at most ``ceiling``
    seconds. The floor keeps a queue that is about to move from being taken for a failure; the
    ceiling keeps a peer from teaching others to wait for it.
    """

    __slots__ = ("_ceiling", "_deviation", "_floor", "usual")

    def __init__(
        self, usual: float = 0.0, floor: float = 0.0, ceiling: float = math.inf
    ) -> None:
        """``usual`` is a guess, which counts like one sample; 0 if there is none."""
        self._floor, self._ceiling = floor, ceiling
        self.reset(usual)

    def reset(self, usual: float) -> None:
        """Forget the samples: ``usual`` is a guess, give or take a half."""
        self.usual = usual
        """Seconds that it takes, lately; 0 if that is not known."""
        self._deviation = usual / 2

    def observe(self, sample: float) -> None:
        """It took ``sample`` seconds."""
        if not self.usual:
            self.reset(sample)
            return
        self._deviation += SMOOTHING * (abs(sample - self.usual) - self._deviation)
        self.usual += SMOOTHING * (sample - self.usual)

    def wait(self, floor: float = 0.0) -> float:
        """Seconds after which it is late; at least ``floor`` whatever the ceiling."""
        late = max(self._floor, self.usual + _DEVIATIONS * self._deviation)
        return max(floor, min(self._ceiling, late))
