"""Level 3: a scenario with real processes on shaped lines, of which nothing is left behind."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Final

import trio

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from sim.errors import SimulationError
from sim.faults.plan import plan_to_json
from sim.kernel.simulation import SimOptions
from sim.run.observers import Observers, Progress
from sim.run.result import Result, plain_metrics
from sim.run.scenario import Scenario, Workload
from sim.studies.lab.faults import check_faults
from sim.studies.lab.machines import EmulationConfig, open_emulation
from sim.studies.lab.namespaces import QUEUE, require_lab
from sim.studies.lab.processes import NodeProcesses

MAX_NODES: Final = 20
"""Processes that two cores can carry; more would measure the machine and not the lines."""
MAX_LATENCY: Final = 0.001
"""Seconds: what a bridge is anyway. More would need netem, which many kernels lack."""


def play(
    scenario: Scenario, workload: Workload, seed: int, options: SimOptions, observers: Observers
) -> Result:
    """Play `WholeNodes`, the only workload with level 3, by `NodeProcesses`.

    ``options`` are about simulations, and there is none.

    Must not be called where trio runs. Raises `ConfigError` for what level 3 cannot do,
    `LabUnavailable` where it may not, `LabError` if links or processes break.
    """
    if observers.started is not None:
        raise ConfigError(
            f"scenario {scenario.name}: the real world of level 3 leaves no trace"
        )
    check(scenario)
    config = EmulationConfig(seed=seed, queue=scenario.parameter("queue", QUEUE))
    require_lab()
    spent = _cpu_seconds_of_children()
    try:
        metrics, seconds = trio.run(_play, scenario, config, observers.progress)
    except BaseExceptionGroup as group:
        raise _reason(group) from group
    metrics = plain_metrics(metrics)
    return Result(
        scenario=scenario.name,
        seed=seed,
        level=scenario.level,
        nodes=scenario.nodes,
        trace_hash="",
        events=0,
        virtual_seconds=round(seconds, 3),
        cpu_seconds=round(_cpu_seconds_of_children() - spent, 3),
        metrics=metrics,
        expectations=[expectation.judge(metrics) for expectation in scenario.expect],
        faults=plan_to_json(scenario.faults),
        witnessed={},
        fired={},
        series={},
        distributions={},
    )


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _play(
    scenario: Scenario,
    config: EmulationConfig,
    progress: Progress | None,
) -> tuple[Mapping[str, float | int | str], float]:
    async with open_emulation(config, progress) as emulation:
        return await NodeProcesses(emulation, scenario).play(), emulation.now()


def check(scenario: Scenario) -> None:
    """Check that level 3 can play a scenario.

    Raises:
        ConfigError: It cannot. The message names the first obstacle.
    """
    link = scenario.link
    lacks = {
        f"more than {MAX_NODES} nodes": scenario.nodes > MAX_NODES,
        f"latency (it must be at most {MAX_LATENCY} s)": scenario.latency > MAX_LATENCY
        or scenario.regions,
        "jitter, loss or NAT": bool(link.jitter or link.loss or link.nat),
        "faults drawn from the seed": scenario.draw is not None,
    }
    for what, wanted in lacks.items():
        if wanted:
            raise ConfigError(f"scenario {scenario.name}: level 3 has no {what}")
    check_faults(scenario.faults)


def _reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error for the caller: an interrupt first, then the first error with a
    sentence, else the whole group."""
    for kind in (KeyboardInterrupt, ShoalError, SimulationError):
        for leaf in leaves(group):
            if isinstance(leaf, kind):
                return leaf
    return group
