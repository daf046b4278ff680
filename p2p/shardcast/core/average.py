"""What a quantity has been lately, and from when on it is late."""

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
        return f"{type(self).__name__}({self.value:.4g})"


_DEVIATIONS: Final = 4
"""Mean deviations beyond the average from which a sample is no accident any more, as in TCP's
retransmission timeout (RFC 6298). A steady line is known to be late soon, an uneven one is
waited for. Example: chunks that take 0.3 s and hardly vary are late after 0.35 s; if every
other takes 0.2 and 0.4 s, after 0.7 s."""


class UsualTime(SmoothedAverage):
    """An average with what its samples usually differ from it, and so how long to wait."""

    __slots__ = ("_deviation",)

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self._deviation = value / 2

    def observe(self, sample: float) -> None:
        """Take one more sample into account; the first counts whole."""
        if not self.value:
            self.reset(sample)
            return
        self._deviation += SMOOTHING * (abs(sample - self.value) - self._deviation)
        super().observe(sample)

    def reset(self, value: float) -> None:
        """Forget the samples: ``value`` is what is known, give or take a half."""
        super().reset(value)
        self._deviation = value / 2

    @property
    def late(self) -> float:
        """The longest that is still usual."""
        return self.value + _DEVIATIONS * self._deviation
