"""How much of the work is checked, what a newcomer owes first, and what can slip through.

Theory of operation
-------------------
A worker commits to a *window* of places at once, and a lot then names which of them are
checked. A newcomer's places are all checked, and none of its *probation* is learnt from.
Afterwards each place is checked with the chance ``share``; one caught lie voids its window and
makes the worker a newcomer again, or bans it. So a worker that turns after its probation gets a
few places through, once for every ``probation`` places of honest work. `leak` is how many that
are in the best case for it, and `docs/trust.md` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from roles.shared.bounds import check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustTerms:
    """How workers earn it that not all of their work is checked."""

    share: float = 0.1
    """Chance that a place of a worker in standing is checked. With two validators a place, and
    scoring an eighth as dear as drawing, a tenth of the work costs validators 3 % of it."""

    probation: int = 64
    """Places of a newcomer that are checked before anything of it is learnt from. Nine are what
    it can slip through afterwards at best: seven times as much honest work as it can win."""

    window: int = 16
    """Places that are committed together, and void together. More of them punish a liar that is
    caught more, and make a slow worker's work older before it may be sent."""

    validators: int = 2
    """How many check a place that was drawn. Two that disagree show that one of them lies."""

    beacon: float = 4.0
    """Seconds between two links of the trainer's beacon. A lot falls two links after a window
    is committed: much less than a step takes, or work goes stale meanwhile."""

    margin: float = 1.2
    """By which the noise of one honest engine may exceed another's before pooled signals count.
    vLLM's is 1.1 to 1.2 times torch's; where all use one engine, 1.05 finds more."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "share": (0.01, 1.0),
                "probation": (1, 1 << 16),
                "window": (1, 16),
                "validators": (1, 16),
                "beacon": (0.1, 600.0),
                "margin": (1.0, 10.0),
            },
        )

    def best_slip(self, detection: float = 1.0) -> tuple[float, float]:
        """What a worker in standing gets through before it is caught, if it chooses the best
        number of lies a window: the places in the mean, and their share of all its work.

        ``detection`` is the chance that a check sees the lie: above 0.
        """
        return max(
            (self.slip(lies, detection) for lies in range(1, self.window + 1)),
            key=lambda slipped: slipped[1],
        )

    def slip(self, lies: int, detection: float = 1.0) -> tuple[float, float]:
        """The same with so many ``lies`` in each window.

        A window passes with the chance (1 - share * detection) ** lies, so 1 / (1 - passes)
        windows are committed, the last of which is caught.
        """
        passes = (1 - self.share * detection) ** lies
        places = lies * passes / (1 - passes)
        return places, places / (self.probation + self.window / (1 - passes))

    def worth(self, saving: float = 1.0, detection: float = 1.0) -> float:
        """What a name wins by lying, in places, with the best number of lies a window, if a lie
        saves this share of what a place costs. Below zero no lie pays, however often it comes
        back: probation and the void window cost more than all its lies save."""
        windows = (
            lies / (1 - (1 - self.share * detection) ** lies)
            for lies in range(1, self.window + 1)
        )
        return saving * max(windows) - self.probation - self.window


def leak(terms: TrustTerms, turncoats: float, detection: float = 1.0) -> float:
    """The largest share of what is learnt from that is lies, in the mean.

    Workers with the share ``turncoats`` of the speed of all that is learnt from turn after
    their probation, and come back whenever they are caught.
    """
    if not 0 <= turncoats < 1:
        raise ValueError(f"turncoats are a share of the workers, not {turncoats}")
    slipped = turncoats * terms.best_slip(detection)[1]
    return slipped / (1 - turncoats + slipped)
