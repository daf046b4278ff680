"""Level 0: a workload without trio, which fills the heap of events and runs it itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import run_bare
from sim.run.observers import Observers
from sim.run.result import Result
from sim.run.scenario import Scenario
from sim.run.simulated import Metrics, options_for, result_of


class BareWorkload(Protocol):
    """A workload that runs on level 0, without trio."""

    def run_bare(self, simulation: Simulation, scenario: Scenario) -> Metrics:
        """Set up, let ``simulation.queue`` run, and return metrics."""


def play(
    scenario: Scenario,
    workload: BareWorkload,
    seed: int,
    options: SimOptions,
    observers: Observers,
) -> Result:
    """Play a scenario at level 0."""

    def main(simulation: Simulation) -> Mapping[str, float | int | str]:
        if observers.started is not None:
            observers.started(simulation)
        return workload.run_bare(simulation, scenario)

    ended = run_bare(main, seed=seed, options=options_for(options, scenario))
    return result_of(scenario, seed, ended, observers.plan)
