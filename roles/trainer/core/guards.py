"""Warnings about learning that goes wrong, with the setting that corrects it.

A rate that is too high is not seen in the reward before the model is ruined; it is seen at once
in how far the trainer has moved from the policy that drew.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

from roles.engines.base import StepReport

MAX_K3: Final = 0.5
"""Highest `StepReport.k3` of a healthy step. A healthy run has a mean of 0.05 and a maximum of
0.26; a rate that ruins a model gives more than 1."""
MAX_RATIO: Final = 20.0
"""Highest `StepReport.ratio_max` of a healthy step: the factor by which one token became
likelier for the trainer than for the sampler. Runs at too high a rate reach 80 and more."""
WARY_K3: Final = 0.1
"""`StepReport.k3` from which on `MAX_RATIO` is checked. The ratio is one token's: of 7,000
tokens in a step one reaches 160 now and then while the others have hardly moved, at a k3 of
0.01."""
RISING: Final = 5
"""Number of consecutive steps with rising entropy before a warning. Entropy falls while a model
learns."""
RISE: Final = 1.5
"""Least factor of that rise. Five rises in a row occur by chance once in 720 steps, and a
healthy run's entropy rose by a quarter in them."""


class LearningGuards:
    """Checks the report of each step."""

    def __init__(self) -> None:
        self._entropies: deque[float] = deque(maxlen=RISING + 1)
        self._was_wrong = False

    def why_wrong(self, report: StepReport) -> str:
        """Return a warning about this step, with the remedy; empty if nothing is wrong."""
        self._entropies.append(report.entropy)
        found = list(self._symptoms(report))
        if not found:
            return ""
        return (
            f"step {report.step} goes wrong: {'; '.join(found)}. Lower `rate` in learner.toml"
            " (or `lag`, or `minibatches`), and begin again from a policy before that"
        )

    def is_news(self, wrong: str) -> bool:
        """Return True if the result of `why_wrong` should be reported, as the first of several
        in a row."""
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
