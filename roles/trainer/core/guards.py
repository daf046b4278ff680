"""When learning goes wrong: the figures that say so, and the knob that mends it.

A rate that is too high is not seen in the reward before the model is ruined; it is seen at once
in how far the trainer has moved from the policy that drew.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

from roles.engines.base import StepReport

MAX_K3: Final = 0.5
"""Of `StepReport.k3`: a healthy run has 0.05 in the mean and 0.26 at most, a rate that ruins a
model more than 1."""
MAX_RATIO: Final = 20.0
"""Of `StepReport.ratio_max`: how many times likelier one token became for the trainer than it
was for who drew it. Runs at too high a rate reach 80 and more."""
WARY_K3: Final = 0.1
"""Of `StepReport.k3`, from which on that counts. It is one token's figure: of 7,000 in a step
one reaches 160 now and then while the others have hardly moved, at a k3 of 0.01."""
RISING: Final = 5
"""Steps in a row in which entropy rises before that is told: it falls while a model learns."""
RISE: Final = 1.5
"""By what factor, at least: five rises in a row come about by chance once in 720 steps, and a
healthy run's entropy rose by a quarter in them."""


class LearningGuards:
    """Looks at each step's report."""

    def __init__(self) -> None:
        self._entropies: deque[float] = deque(maxlen=RISING + 1)
        self._was_wrong = False

    def why_wrong(self, report: StepReport) -> str:
        """What is wrong with this step, and what to do; empty if nothing is."""
        self._entropies.append(report.entropy)
        found = list(self._symptoms(report))
        if not found:
            return ""
        return (
            f"step {report.step} goes wrong: {'; '.join(found)}. Lower `rate` in learner.toml"
            " (or `lag`, or `minibatches`), and begin again from a policy before that"
        )

    def is_news(self, wrong: str) -> bool:
        """Whether what `why_wrong` said is to be told: the first of several in a row."""
        was, self._was_wrong = self._was_wrong, bool(wrong)
        return self._was_wrong and not was

    def _symptoms(self, report: StepReport) -> list[str]:
        found = []
        if report.k3 > MAX_K3:
            found.append(f"k3 is {report.k3:.2f}, over {MAX_K3:g}")
        if report.ratio_max > MAX_RATIO and report.k3 > WARY_K3:
            found.append(f"ratio_max is {report.ratio_max:.0f}, over {MAX_RATIO:g}")
        told = list(self._entropies)
        rises = len(told) > RISING and all(before < after for before, after in pairwise(told))
        if rises and told[-1] > RISE * told[0]:
            found.append(
                f"entropy rose {RISING} steps in a row, from {told[0]:.2f} to {told[-1]:.2f}"
            )
        return found
