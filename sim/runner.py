"""Runs a scenario and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sim.fabric import Endpoint
from sim.kernel import run_simulation
from sim.scenario import Scenario
from sim.simulation import SimOptions, Simulation
from sim.swarm import open_swarm

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

    @property
    def ok(self) -> bool:
        """Whether every expectation was met."""
        return all(entry["ok"] for entry in self.expectations)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def run_scenario(
    scenario: Scenario, seed: int, *, options: SimOptions | None = None, progress: Progress | None = None
) -> Result:
    """Run one scenario with one seed. Raises what the simulation raises."""
    options = options or SimOptions(hashed_keys=scenario.nodes >= HASHED_KEYS_FROM)
    workload = scenario.open_workload()

    def latency(one: Endpoint, other: Endpoint) -> float:
        return scenario.latency

    async def main(simulation: Simulation) -> Mapping[str, float | int | str]:
        if progress is not None:
            _report_progress(simulation, progress, scenario.duration / 200)
        async with open_swarm(simulation, latency) as swarm:
            return await workload.run(swarm, scenario)

    outcome = run_simulation(main, seed=seed, horizon=scenario.horizon, options=options)
    metrics = outcome.value if outcome.value is not None else {}
    return Result(
        scenario=scenario.name,
        seed=seed,
        level=scenario.level,
        nodes=scenario.nodes,
        trace_hash=outcome.trace_hash,
        events=outcome.events,
        virtual_seconds=round(outcome.virtual_seconds, 9),
        cpu_seconds=round(outcome.cpu_seconds, 3),
        metrics=metrics,
        expectations=[expectation.judge(metrics) for expectation in scenario.expect],
    )


def _report_progress(simulation: Simulation, progress: Progress, step: float) -> None:
    """Report between events. The heap's own trace must not depend on who watches."""
    simulation.queue.watch(int(step * 1e9), lambda: progress(simulation))
