"""Plays a scenario for real (L3): from a checked scenario to its metrics, with nothing left behind."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import trio

from p2p.errors import ConfigError, ShoalError
from sim.errors import SimulationError
from sim.lab.faults import check_faults
from sim.lab.machines import Tell, Testbed, TestbedConfig, open_testbed
from sim.lab.namespaces import CUBIC, QUEUE, require_lab
from sim.run.scenario import Scenario

MAX_NODES: Final = 20
"""Processes that two cores can carry; more would measure the machine and not the lines."""
MAX_LATENCY: Final = 0.001
"""Seconds: what a bridge is anyway. More would need netem, which many kernels lack."""


@runtime_checkable
class RealWorkload(Protocol):
    """A workload that also runs at level 3: processes on shaped lines."""

    async def run_real(self, testbed: Testbed, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play the scenario with real processes and return the metrics of the other levels."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of it."""

    metrics: Mapping[str, float | int | str]
    seconds: float
    """Of the scenario: from its second 0 to its end."""
    cpu_seconds: float
    """Of all processes together."""


def play(scenario: Scenario, workload: RealWorkload, seed: int, tell: Tell) -> Played:
    """Play with real processes on shaped lines. ``tell`` is told how far it is.

    Must not be called where trio runs. Raises `ConfigError` for what level 3 cannot do, `LabUnavailable`
    where it may not, `LabError` if links or processes break.
    """
    check(scenario)
    config = TestbedConfig(
        seed=seed,
        congestion=str(scenario.parameters.get("congestion", CUBIC)),
        queue=scenario.parameter("queue", QUEUE),
    )
    require_lab()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        metrics, seconds = trio.run(_play, scenario, workload, config, tell)
    except BaseExceptionGroup as group:
        raise _reason(group) from group
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime
    return Played(metrics=metrics, seconds=seconds, cpu_seconds=cpu_seconds)


async def _play(
    scenario: Scenario, workload: RealWorkload, config: TestbedConfig, tell: Tell
) -> tuple[Mapping[str, float | int | str], float]:
    async with open_testbed(config, tell) as testbed:
        return await workload.run_real(testbed, scenario), testbed.now()


def check(scenario: Scenario) -> None:
    """Raises `ConfigError` naming the first thing of ``scenario`` that level 3 does not have."""
    link = scenario.link
    lacks = {
        f"more than {MAX_NODES} nodes": scenario.nodes > MAX_NODES,
        f"latency (it must be at most {MAX_LATENCY} s)": scenario.latency > MAX_LATENCY or scenario.regions,
        "jitter, loss or NAT": bool(link.jitter or link.loss or link.nat),
        "faults drawn from the seed": scenario.draw is not None,
    }
    for what, wanted in lacks.items():
        if wanted:
            raise ConfigError(f"scenario {scenario.name}: level 3 has no {what}")
    check_faults(scenario.faults)


def _reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell the caller: an interrupt first, then the first error with a sentence, else all of it."""
    for kind in (KeyboardInterrupt, ShoalError, SimulationError):
        found: BaseException | None = group.subgroup(kind)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            return found
    return group
