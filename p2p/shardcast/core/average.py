"""`SmoothedAverage`: what a quantity has been lately."""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.25
"""Weight of the newest sample: after four samples two thirds of the value are theirs. TCP's
round-trip estimate takes 1/8 (RFC 6298), of many samples a second; here a sample is a chunk,
and one policy has a few hundred. Example: a line that took 0.1 s a chunk and takes 0.4 s from
now on is taken for 0.175 s after one chunk, then 0.231, 0.273 and 0.305 s."""


class SmoothedAverage:
    """An exponentially weighted moving average: each sample moves it by a quarter of the
    way."""

    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def observe(self, sample: float) -> None:
        """Take one more sample into account."""
        self.value += SMOOTHING * (sample - self.value)

    def reset(self, value: float) -> None:
        """Forget the samples: ``value`` is what is known."""
        self.value = value

    def __repr__(self) -> str:
        return f"SmoothedAverage({self.value:.4g})"
