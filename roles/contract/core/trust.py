"""Amount of work that is checked, and debt of newcomers (docs/trust.md)."""

from __future__ import annotations

from dataclasses import dataclass

from roles.contract.core.bounds import check_bounds

MAX_WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustTerms:
    """The three numbers of the run's ``[trust]``."""

    share: float = 0.05
    """Chance that a place without spread is checked, that a group without spread is replayed,
    and that a validator's verdict is repeated."""

    probation: int = 32
    """Places of a new name that must stand before the trainer learns from it."""

    window: int = MAX_WINDOW
    """Most places that are committed, and void, together."""

    def __post_init__(self) -> None:
        bounds = {"share": (0.01, 1.0), "probation": (1, 1 << 16), "window": (1, MAX_WINDOW)}
        check_bounds(self, bounds)
        if 1 / self.share >= self.probation + 1:
            raise ValueError(
                f"with share = {self.share:g} and probation = {self.probation} lying pays: who"
                f" lies where nothing is learnt gets {1 / self.share:g} places through for"
                f" {self.probation + 1} of honest work. Raise probation to at least"
                f" {int(1 / self.share)}, or share, in [trust]"
            )
