"""Runs a scenario and says what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import outcome

from p2p.errors import ConfigError
from sim.faults.injector import FaultInjector
from sim.faults.plan import Fault, draw_plan, plan_to_json
from sim.kernel.queue import SECOND
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import Outcome, run_bare, run_simulation
from sim.net.latency import RegionLatency
from sim.node.swarm import Swarm, open_swarm
from sim.run.real import RealWorkload, play
from sim.run.scenario import (
    BareWorkload,
    Levelled,
    Parameters,
    Parametrised,
    Scenario,
    Workload,
)

HASHED_KEYS_FROM = 200
"""Nodes from which keyed hashes stand for Ed25519."""

Progress = Callable[[float, str], None]
"""Told from time to time how many seconds of the scenario are over, and what is being done."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the JSON of a simulation holds."""

    scenario: str
    seed: int
    level: int
    nodes: int
    trace_hash: str
    """Empty at level 3: the world leaves no trace that could be repeated."""
    events: int
    virtual_seconds: float
    """At level 3 they are real."""
    cpu_seconds: float
    metrics: Mapping[str, float | int | str]
    expectations: list[dict[str, object]]
    faults: list[dict[str, Any]]
    """What went wrong on purpose, as a plan that can be replayed."""
    witnessed: Mapping[str, int]
    """How often each `sometimes` claim held."""
    fired: Mapping[str, int]
    """How often each `buggify` site misbehaved; 0 for those that were reached and never did."""
    series: Mapping[str, list[tuple[float, float]]]
    """Curves over virtual seconds, for reports."""
    distributions: Mapping[str, list[float]]
    """One value per node, for reports."""

    @property
    def ok(self) -> bool:
        """Whether every expectation was met."""
        return all(entry["ok"] for entry in self.expectations)

    def to_json(self) -> dict[str, Any]:
        """As plain values, without what only reports show."""
        values = asdict(self)
        del values["series"], values["distributions"]
        return values


@dataclass(frozen=True, slots=True)
class _Watchers:
    """Who is told of a run, and what."""

    progress: Progress | None
    started: Callable[[Simulation], None] | None
    plan: list[Fault]


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    options: SimOptions | None = None,
    progress: Progress | None = None,
    started: Callable[[Simulation], None] | None = None,
    plan: list[Fault] | None = None,
) -> Result:
    """Run one scenario with one seed. Raises what the simulation raises, at level 3 what the lab does.

    ``started`` is given the simulation before anything happens, ``progress`` now and then on the way;
    ``plan`` is filled with the faults, also those drawn from the seed, and is there if the run fails.
    """
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    scenario = replace(scenario, parameters=_watched(scenario, workload))
    plan = [] if plan is None else plan
    result = _run(scenario, workload, seed, options or SimOptions(), _Watchers(progress, started, plan))
    assert isinstance(scenario.parameters, Parameters)
    scenario.parameters.check_read()
    return result


def check_scenario(scenario: Scenario) -> None:
    """Raise `ConfigError` for what can be known before a run: no such workload, level or parameter."""
    workload = scenario.open_workload()
    _check_level(scenario, workload)
    _watched(scenario, workload)


def _watched(scenario: Scenario, workload: Workload) -> Parameters:
    known = workload.parameters if isinstance(workload, Parametrised) else None
    try:
        return Parameters(scenario.parameters, known)
    except ConfigError as error:
        raise ConfigError(f"scenario {scenario.name}, [parameters]: {error}") from None


def _run(
    scenario: Scenario,
    workload: Workload,
    seed: int,
    options: SimOptions,
    watchers: _Watchers,
) -> Result:
    progress, started, plan = watchers.progress, watchers.started, watchers.plan
    if scenario.level == 3:
        if started is not None:
            raise ConfigError(f"scenario {scenario.name}: the real world of level 3 leaves no trace")
        return _run_real(scenario, workload, seed, progress)
    options = replace(options, hashed_keys=scenario.nodes >= HASHED_KEYS_FROM)
    if scenario.draw is not None and scenario.draw.buggify:
        options = replace(options, buggify=True)
    latency = RegionLatency(scenario.latency)

    async def main(simulation: Simulation) -> Mapping[str, float | int | str]:
        if started is not None:
            started(simulation)
        if progress is not None:
            _report_progress(simulation, progress, scenario.duration / 200)
        async with open_swarm(simulation, latency) as swarm:
            if scenario.regions:
                swarm.draw_regions()
            _schedule_faults(swarm, scenario, plan)
            # Captured, so that what the workload raises comes out bare and not in the nursery's group.
            played = await outcome.acapture(workload.run, swarm, scenario)
        return played.unwrap()

    if scenario.level == 0:
        ended = run_bare(partial(_play_bare, workload, scenario, started), seed=seed, options=options)
    else:
        ended = run_simulation(main, seed=seed, horizon=scenario.horizon, options=options)
    return _result(scenario, seed, ended, plan)


def _result(
    scenario: Scenario, seed: int, ended: Outcome[Mapping[str, float | int | str]], plan: list[Fault]
) -> Result:
    metrics = {name: _finite(value) for name, value in (ended.value or {}).items()}
    return Result(
        scenario=scenario.name,
        seed=seed,
        level=scenario.level,
        nodes=scenario.nodes,
        trace_hash=ended.trace_hash,
        events=ended.events,
        virtual_seconds=round(ended.virtual_seconds, 9),
        cpu_seconds=round(ended.cpu_seconds, 3),
        metrics=metrics,
        expectations=[expectation.judge(metrics) for expectation in scenario.expect],
        faults=plan_to_json(plan),
        witnessed=ended.simulation.witnessed,
        fired=ended.simulation.fired,
        series=ended.simulation.series,
        distributions=ended.simulation.distributions,
    )


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
            f"scenario {scenario.name}: {scenario.workload} runs at {places}, not at level {scenario.level}"
        )


def _run_real(scenario: Scenario, workload: Workload, seed: int, progress: Progress | None) -> Result:
    """Level 3."""
    assert isinstance(workload, RealWorkload), "it says that it runs at level 3"
    played = play(scenario, workload, seed, progress or _tell_nobody)
    metrics = {name: _finite(value) for name, value in played.metrics.items()}
    return Result(
        scenario=scenario.name,
        seed=seed,
        level=scenario.level,
        nodes=scenario.nodes,
        trace_hash="",
        events=0,
        virtual_seconds=round(played.seconds, 3),
        cpu_seconds=round(played.cpu_seconds, 3),
        metrics=metrics,
        expectations=[expectation.judge(metrics) for expectation in scenario.expect],
        faults=plan_to_json(scenario.faults),
        witnessed={},
        fired={},
        series={},
        distributions={},
    )


def _tell_nobody(seconds: float, doing: str) -> None:
    """Nobody watches."""


def _finite(value: float | int | str) -> float | int | str:
    """JSON knows no infinity; what did not happen happened ``never``."""
    return value if isinstance(value, str) or math.isfinite(value) else "never"


def _play_bare(
    workload: Workload,
    scenario: Scenario,
    started: Callable[[Simulation], None] | None,
    simulation: Simulation,
) -> Mapping[str, float | int | str]:
    assert isinstance(workload, BareWorkload), "it says that it runs at level 0"
    if started is not None:
        started(simulation)
    return workload.run_bare(simulation, scenario)


def _schedule_faults(swarm: Swarm, scenario: Scenario, plan: list[Fault]) -> None:
    """Let the scenario's own faults happen, and draw the others once the nodes are known."""
    plan.extend(scenario.faults)
    injector = FaultInjector(swarm)
    injector.apply(scenario.faults)
    draw = scenario.draw
    if draw is None:
        return

    def begin() -> None:
        rng = swarm.simulation.rng("swarm", "faults")
        drawn = draw_plan(rng, list(swarm.nodes), draw.start, draw.end, draw.kinds, draw.spare)
        plan.extend(drawn)
        injector.apply(drawn)

    def end() -> None:
        swarm.simulation.misbehaves = False

    queue = swarm.simulation.queue
    queue.schedule(int(draw.start * SECOND), queue.kernel, "faults", begin)
    queue.schedule(int(draw.end * SECOND), queue.kernel, "faults over", end)


def _report_progress(simulation: Simulation, progress: Progress, step: float) -> None:
    """Report between events. The heap's own trace must not depend on who watches."""
    simulation.queue.watch(int(step * 1e9), lambda: progress(simulation.now, "playing"))
