"""Runs a scenario: checks it, and hands it to the level that it asks for.

The way of a run: `sim.run.scenario` reads the TOML file, `run_scenario` opens its workload and
checks level and parameters, `sim.run.simulated` (levels 1 and 2) or a study
(`STUDIES`) plays it, and a `sim.run.result.Result` comes back.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from p2p.errors import ConfigError
from sim.faults.plan import Fault
from sim.kernel.simulation import SimOptions, Simulation
from sim.run.observers import Observers, Progress
from sim.run.result import Result
from sim.run.scenario import (
    Levelled,
    Parameters,
    Parametrised,
    Scenario,
    Workload,
)
from sim.run.simulated import play_swarm

Play = Callable[[Scenario, Workload, int, SimOptions, Observers], Result]
"""Plays a checked scenario with one seed."""

STUDIES: Final[Mapping[int, str]] = {0: "sim.studies.bare", 3: "sim.studies.lab.real"}
"""Modules whose ``play`` plays a level that is no simulation of nodes; imported when needed."""


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    options: SimOptions | None = None,
    progress: Progress | None = None,
    started: Callable[[Simulation], None] | None = None,
    plan: list[Fault] | None = None,
) -> Result:
    """Run one scenario with one seed. Raises the errors of the simulation, or at level 3 those
    of the lab.

    ``started`` is given the simulation before anything happens, ``progress`` now and then on
    the way; ``plan`` is filled with the faults, also those drawn from the seed, and is there if
    the run fails.
    """
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    parameters = _noting_reads(scenario, workload)
    scenario = replace(scenario, parameters=parameters)
    observers = Observers(progress, started, [] if plan is None else plan)
    study = STUDIES.get(scenario.level)
    play: Play = play_swarm if study is None else importlib.import_module(study).play
    result = play(scenario, workload, seed, options or SimOptions(), observers)
    parameters.check_read()
    return result


def check_scenario(scenario: Scenario) -> None:
    """Check that the workload exists and has the scenario's level and parameters.

    Raises:
        ConfigError: It does not. The message names what is wrong.
    """
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    _noting_reads(scenario, workload)


def _check_level(scenario: Scenario, workload: Workload) -> None:
    levels = workload.levels if isinstance(workload, Levelled) else (1,)
    if scenario.level not in levels:
        places = " and ".join(f"level {level}" for level in levels)
        raise ConfigError(
            f"scenario {scenario.name}: {scenario.workload} runs at {places}, not at level"
            f" {scenario.level}"
        )


def _noting_reads(scenario: Scenario, workload: Workload) -> Parameters:
    """Return the scenario's parameters, which note each read: an unread one is an error."""
    known = workload.parameters if isinstance(workload, Parametrised) else None
    try:
        return Parameters(scenario.parameters, known)
    except ConfigError as error:
        raise ConfigError(f"scenario {scenario.name}, [parameters]: {error}") from None
