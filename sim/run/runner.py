"""Runs a scenario: checks it, and hands it to the level that it asks for.

The way of a run: `sim.run.scenario` reads the TOML file, `run_scenario` opens its workload and
checks level and parameters, `sim.run.simulated` (levels 0 to 2) or `sim.run.real` (level 3)
plays it, and a `sim.run.result.Result` comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from p2p.errors import ConfigError
from sim.faults.plan import Fault
from sim.kernel.simulation import SimOptions, Simulation
from sim.run.observers import Observers, Progress
from sim.run.real import play_real
from sim.run.result import Result
from sim.run.scenario import (
    BareWorkload,
    Levelled,
    Parameters,
    Parametrised,
    Scenario,
    Workload,
)
from sim.run.simulated import play_bare, play_swarm

Play = Callable[[Scenario, Workload, int, SimOptions, Observers], Result]
"""Plays a checked scenario with one seed."""

LEVELS: Final[Mapping[int, Play]] = {0: play_bare, 1: play_swarm, 2: play_swarm, 3: play_real}
"""The ladder of fidelity: what plays a scenario on each of its rungs."""


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    options: SimOptions | None = None,
    progress: Progress | None = None,
    started: Callable[[Simulation], None] | None = None,
    plan: list[Fault] | None = None,
) -> Result:
    """Run one scenario with one seed. Raises what the simulation raises, at level 3 what the
    lab does.

    ``started`` is given the simulation before anything happens, ``progress`` now and then on
    the way; ``plan`` is filled with the faults, also those drawn from the seed, and is there if
    the run fails.
    """
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    parameters = _noting_reads(scenario, workload)
    scenario = replace(scenario, parameters=parameters)
    observers = Observers(progress, started, [] if plan is None else plan)
    result = LEVELS[scenario.level](
        scenario, workload, seed, options or SimOptions(), observers
    )
    parameters.check_read()
    return result


def check_scenario(scenario: Scenario) -> None:
    """Raise `ConfigError` for what can be known before a run: no such workload, level or
    parameter."""
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    _noting_reads(scenario, workload)


def levels_of(workload: Workload) -> Sequence[int]:
    """The rungs of the ladder of fidelity on which a workload runs."""
    if isinstance(workload, Levelled):
        return workload.levels
    return (0,) if isinstance(workload, BareWorkload) else (1,)


def _check_level(scenario: Scenario, workload: Workload) -> None:
    levels = levels_of(workload)
    if scenario.level not in levels:
        places = " and ".join(f"level {level}" for level in levels)
        raise ConfigError(
            f"scenario {scenario.name}: {scenario.workload} runs at {places}, not at level"
            f" {scenario.level}"
        )


def _noting_reads(scenario: Scenario, workload: Workload) -> Parameters:
    """The scenario's parameters, noting which of them the workload reads: an unread one is an
    error."""
    known = workload.parameters if isinstance(workload, Parametrised) else None
    try:
        return Parameters(scenario.parameters, known)
    except ConfigError as error:
        raise ConfigError(f"scenario {scenario.name}, [parameters]: {error}") from None
