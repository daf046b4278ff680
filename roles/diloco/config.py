"""Settings of a machine's part in a DiLoCo run; the run file has the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DilocoConfig:
    """Settings of one member, from the table ``[role.trainer.diloco]``."""

    turn_seconds: float = 1.0
    """About how long the worker computes before it is told whether the round is over. Less
    costs a message each, more lets the others wait."""

    evaluate_every: int = 1
    """Rounds between measurements of the loss on what is held out; 0: never."""

    export_every: int = 0
    """Rounds between exports as a Hugging Face folder, ``diloco/export``; 0: only at the
    end."""

    means_kept: int = 4
    """Rounds whose means are kept, for members that missed one: half a byte a weight each."""

    def __post_init__(self) -> None:
        if not self.turn_seconds > 0 or min(self.evaluate_every, self.export_every) < 0:
            raise ValueError("turn_seconds is above zero, and no interval is below")
        if self.means_kept < 1:
            raise ValueError("means_kept is at least 1")
