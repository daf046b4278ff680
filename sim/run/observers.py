"""Who is told of a run while it goes on, and what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim.faults.plan import Fault
from sim.kernel.simulation import Simulation

Progress = Callable[[float, str], None]
"""Told from time to time how many seconds of the scenario are over, and what is being done."""


@dataclass(frozen=True, slots=True)
class Observers:
    """What a caller of `sim.run.runner.run_scenario` may want to be told."""

    progress: Progress | None = None
    """Called now and then; it cannot change the trace."""

    started: Callable[[Simulation], None] | None = None
    """Given the simulation before anything happens."""

    plan: list[Fault] = field(default_factory=list)
    """Filled with all faults, drawn ones included; it is there even if the run fails."""
