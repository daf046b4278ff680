"""The learning gate: whether held-out reward rose by more than luck gives.

The demo, the recipe in one process and the bench of controls ask the same question, and get the
answer here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from roles.engines.base import Evaluation

RISE: Final = 0.25
"""By how much held-out reward must rise, greedy and sampled, in the default number of steps.

Of 14 demos with seeds 0 to 13, thirteen rose by 0.47 to 0.65 greedy and one by 0.34: its
warm-up came out weakest (it started at 0.10, the others at 0.16 to 0.42), and has further to
go. With 0.35, which stood here first, that one was called a failure though it learnt. The
controls (``bench rl-controls``: permuted advantages, the best of eight temperatures) rise by
less. With fewer steps nothing is promised: ten gain 0.15, or nothing."""
START_BELOW: Final = 0.55
"""Below which held-out reward must start: what the warm-up alone can do. Above it too little is
left to learn for a rise of `RISE`."""


@dataclass(frozen=True, slots=True)
class LearningGate:
    """The first evaluation of a run against its last."""

    start: Evaluation
    end: Evaluation

    @property
    def passed(self) -> bool:
        """Both rises at least `RISE`, from starts below `START_BELOW`."""
        return not list(self.failures())

    @property
    def rises(self) -> tuple[float, float]:
        """Of greedy and of sampled reward."""
        return self.end.greedy - self.start.greedy, self.end.sampled - self.start.sampled

    def failures(self, *, promised: bool = True) -> Iterator[str]:
        """What is not as it must be; a rise is ``promised`` for the default number of steps and
        more."""
        starts = self.start.greedy, self.start.sampled
        for kind, start, rise in zip(("greedy", "reward"), starts, self.rises, strict=True):
            if start >= START_BELOW:
                yield (
                    f"{kind} started at {start:.3f}, not below {START_BELOW}: the warm-up"
                    " learnt too much"
                )
            if promised and rise < RISE:
                yield f"{kind} rose by {rise:.3f}, not by {RISE}"

    def __str__(self) -> str:
        start, end, (greedy, sampled) = self.start, self.end, self.rises
        return (
            f"{'learned' if self.passed else 'did not learn'}:"
            f" greedy {start.greedy:.3f} to {end.greedy:.3f} ({greedy:+.3f}),"
            f" sampled {start.sampled:.3f} to {end.sampled:.3f} ({sampled:+.3f})"
        )
