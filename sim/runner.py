"""Runs a scenario and says what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import outcome

from p2p.errors import ConfigError
from sim.faults import Fault, apply_plan, draw_plan, plan_to_json
from sim.kernel import Outcome, run_bare, run_simulation
from sim.latency import RegionLatency
from sim.queue import SECOND
from sim.scenario import BareWorkload, Scenario, Workload
from sim.simulation import SimOptions, Simulation
from sim.swarm import Swarm, open_swarm

HASHED_KEYS_FROM = 200
"""Nodes from which keyed hashes stand for Ed25519."""

Progress = Callable[[Simulation], None]
"""Told from time to time how far the simulation is."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the JSON of a simulation holds."""

    scenario: str
    seed: int
    level: int
    nodes: int
    trace_hash: str
    events: int
    virtual_seconds: float
    cpu_seconds: float
    metrics: Mapping[str, float | int | str]
    expectations: list[dict[str, object]]
    faults: list[dict[str, Any]]
    """What went wrong on purpose, as a plan that can be replayed."""
    witnessed: Mapping[str, int]
    """How often each `sometimes` claim held."""
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


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    options: SimOptions | None = None,
    progress: Progress | None = None,
    started: Callable[[Simulation], None] | None = None,
) -> Result:
    """Run one scenario with one seed. Raises what the simulation raises.

    ``started`` is given the simulation before anything happens, ``progress`` now and then on the way.
    """
    options = replace(options or SimOptions(), hashed_keys=scenario.nodes >= HASHED_KEYS_FROM)
    if scenario.draw is not None and scenario.draw.buggify:
        options = replace(options, buggify=True)
    workload = scenario.open_workload()
    plan: list[Fault] = []

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
        series=ended.simulation.series,
        distributions=ended.simulation.distributions,
    )


def _finite(value: float | int | str) -> float | int | str:
    """JSON knows no infinity; what did not happen happened ``never``."""
    return value if isinstance(value, str) or math.isfinite(value) else "never"


def _play_bare(
    workload: Workload,
    scenario: Scenario,
    started: Callable[[Simulation], None] | None,
    simulation: Simulation,
) -> Mapping[str, float | int | str]:
    if not isinstance(workload, BareWorkload):
        raise ConfigError(f"scenario {scenario.name}: {scenario.workload} does not run at level 0")
    if started is not None:
        started(simulation)
    return workload.run_bare(simulation, scenario)


def _schedule_faults(swarm: Swarm, scenario: Scenario, plan: list[Fault]) -> None:
    """Let the scenario's own faults happen, and draw the others once the nodes are known."""
    plan.extend(scenario.faults)
    apply_plan(swarm, scenario.faults)
    draw = scenario.draw
    if draw is None:
        return

    def begin() -> None:
        rng = swarm.simulation.rng("swarm", "faults")
        drawn = draw_plan(rng, list(swarm.nodes), draw.start, draw.end, draw.kinds)
        plan.extend(drawn)
        apply_plan(swarm, drawn)

    queue = swarm.simulation.queue
    queue.schedule(int(draw.start * SECOND), queue.kernel, "faults", begin)


def _report_progress(simulation: Simulation, progress: Progress, step: float) -> None:
    """Report between events. The heap's own trace must not depend on who watches."""
    simulation.queue.watch(int(step * 1e9), lambda: progress(simulation))
