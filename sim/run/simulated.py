"""Levels 1 and 2: a scenario in a swarm on trio, on virtual time.

The workload decides which of the two it is by what it opens on a node: an authenticated host
(L1), or a raw network with real handshakes above it (L2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import outcome

from sim.faults.injector import FaultInjector
from sim.faults.plan import Fault, draw_plan, plan_to_json
from sim.kernel.queue import SECOND
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import Outcome, run_simulation
from sim.net.latency import RegionLatency
from sim.node.swarm import Swarm, open_swarm
from sim.run.observers import Observers, Progress
from sim.run.result import Result, plain_metrics
from sim.run.scenario import Scenario, Workload

HASHED_KEYS_FROM: Final = 200
"""Number of nodes from which on keyed hashes replace Ed25519: verifying takes most of the time
of a large simulation, while a small one runs the production code.
"""
REPORTS: Final = 200
"""Times that progress is reported in one run: once for each pixel or two of a terminal's
bar."""

Metrics = Mapping[str, float | int | str]


def play_swarm(
    scenario: Scenario, workload: Workload, seed: int, options: SimOptions, observers: Observers
) -> Result:
    """Play a scenario of level 1 or 2, with nodes on trio and the scenario's faults."""

    async def main(simulation: Simulation) -> Metrics:
        if observers.started is not None:
            observers.started(simulation)
        if observers.progress is not None:
            _report_progress(simulation, observers.progress, scenario.duration / REPORTS)
        async with open_swarm(simulation, RegionLatency(scenario.latency)) as swarm:
            if scenario.regions:
                swarm.draw_regions()
            _schedule_faults(swarm, scenario, observers.plan)
            # Captured, so that what the workload raises comes out bare and not in the nursery's
            # group.
            played = await outcome.acapture(workload.run, swarm, scenario)
        return played.unwrap()

    options = options_for(options, scenario)
    ended = run_simulation(main, seed=seed, horizon=scenario.horizon, options=options)
    return result_of(scenario, seed, ended, observers.plan)


def options_for(options: SimOptions, scenario: Scenario) -> SimOptions:
    """Options that follow from the scenario: which keys to use, and whether `World.buggify` may
    fire."""
    buggify = options.buggify or (scenario.draw is not None and scenario.draw.buggify)
    return replace(options, hashed_keys=scenario.nodes >= HASHED_KEYS_FROM, buggify=buggify)


def _schedule_faults(swarm: Swarm, scenario: Scenario, plan: list[Fault]) -> None:
    """Let the scenario's own faults happen, and draw the others once the nodes are known."""
    injector = FaultInjector(swarm)
    plan.extend(scenario.faults)
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
    """Report between events: the trace must not depend on whether a run is watched."""
    simulation.queue.watch(int(step * 1e9), lambda: progress(simulation.now, "playing"))


def result_of(
    scenario: Scenario, seed: int, ended: Outcome[Metrics], plan: list[Fault]
) -> Result:
    metrics = plain_metrics(ended.value or {})
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
        lives=ended.simulation.lives,
    )
