"""Observers of a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim.faults.plan import Fault
from sim.kernel.simulation import Simulation

Progress = Callable[[float, str], None]
"""Called now and then with the seconds of the scenario that are over, and the current
activity."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Observers that a caller of `sim.run.runner.run_scenario` may pass."""

    progress: Progress | None = None
    """Called now and then; it cannot change the trace."""

    started: Callable[[Simulation], None] | None = None
    """Given the simulation before anything happens."""

    plan: list[Fault] = field(default_factory=list)
    """Filled with all faults, drawn ones included, even if the run fails."""
