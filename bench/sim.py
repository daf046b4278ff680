"""``python -m bench sim``: how fast the simulator is, and what a node costs.

Cases: `kernel` (sleeps a CPU second), `L1` (whole membership nodes under churn: events a CPU
second, resident KiB a node), `L0 timers` (on the bare heap), `L0 broadcast` (64 chunks to
10,000 nodes with deaths). All rates are per CPU second, each in a process of its own, relative
to a calibration loop where a bound is set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, Final

import trio

from bench.report import Report
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_bare, run_simulation
from sim.node.world import SimWorld
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario

Figures = dict[str, float]


def kernel(nodes: int) -> Figures:
    """Measure the kernel with tasks that sleep."""

    async def main(simulation: Simulation) -> None:
        async def sleeper(world: SimWorld) -> None:
            rng = world.rng("sleeps")
            for _ in range(200_000 // nodes):
                await world.sleep(rng.random())

        async with trio.open_nursery() as nursery:
            for number in range(nodes):
                nursery.start_soon(sleeper, SimWorld(simulation, f"n{number}"))

    outcome = run_simulation(main, seed=1)
    return {"events": outcome.events, "cpu": outcome.cpu_seconds}


def bare_heap(nodes: int) -> Figures:
    """Measure the heap with timers that set timers, without trio."""

    def main(simulation: Simulation) -> None:
        worlds = [SimWorld(simulation, f"n{number}") for number in range(nodes)]

        def again(world: SimWorld, left: int) -> None:
            if left:
                delay = world.rng("timers").random()
                world.call_at(world.now() + delay, lambda: again(world, left - 1))

        for world in worlds:
            again(world, 400_000 // nodes)
        simulation.queue.run()

    outcome = run_bare(main, seed=1)
    return {"events": outcome.events, "cpu": outcome.cpu_seconds}


def whole_nodes(nodes: int, seconds: float = 120.0) -> Figures:
    """Measure membership with churn at L1, for ``seconds`` of virtual time."""
    before = _resident()
    scenario = replace(load_scenario("thousand"), nodes=nodes, duration=seconds)
    result = run_scenario(scenario, 1)
    return {
        "events": result.events,
        "cpu": result.cpu_seconds,
        "kib_per_node": (_resident() - before) / nodes,
        "virtual": result.virtual_seconds,
        "bytes_per_second": float(result.metrics["bytes_per_second"]),
        "deaths_known_share": float(result.metrics["deaths_known_share"]),
    }


def broadcast(nodes: int) -> Figures:
    """64 chunks down the forest."""
    result = run_scenario(replace(load_scenario("ten_thousand"), nodes=nodes), 1)
    return {"events": result.events, "cpu": result.cpu_seconds}


CASES: dict[str, tuple[Callable[[int], Figures], Sequence[int]]] = {
    "kernel": (kernel, (100, 1000)),
    "L0 timers": (bare_heap, (100, 1000)),
    "L0 broadcast": (broadcast, (1000, 10_000)),
    "L1 membership": (whole_nodes, (100, 1000)),
    "L1 hour": (lambda nodes: whole_nodes(nodes, 3600.0), (1000,)),
}
LONG: Final = frozenset({"L1 hour"})
"""Cases that take minutes: only when asked for."""


def _resident() -> float:
    return float(getrusage(RUSAGE_SELF).ru_maxrss)


def _calibrate() -> float:
    """Return millions of simple loop steps a CPU second, a measure of this machine's present
    speed."""
    started, total = time.process_time(), 0
    for number in range(3_000_000):
        total += number & 7
    return 3.0 / (time.process_time() - started)


def _measure(case: str, nodes: int) -> Figures:
    """Measure one case in a process of its own."""
    code = f"from bench.sim import child; child({case!r}, {nodes})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def child(case: str, nodes: int) -> None:
    """Run one case, in its process."""
    figures: dict[str, Any] = {"calibration": _calibrate(), **CASES[case][0](nodes)}
    sys.stdout.write(json.dumps(figures))


def run(arguments: Sequence[str]) -> int:
    """Measure every case, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(prog="bench sim")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--largest", type=int, default=10_000, help="leave out larger cases")
    parser.add_argument(
        "--hour", action="store_true", help="also 1,000 nodes for an hour (8 minutes)"
    )
    options = parser.parse_args(arguments)
    report = Report("sim")
    for case, (_, sizes) in CASES.items():
        for nodes in sizes:
            if nodes > options.largest or (case in LONG and not options.hour):
                continue
            runs = [_measure(case, nodes) for _ in range(options.repeat)]
            subject = f"{nodes} nodes"
            rates = [figures["events"] / figures["cpu"] for figures in runs]
            report.add(case, subject, "events per CPU second", "1/s", rates)
            report.add(case, subject, "CPU time", "s", [figures["cpu"] for figures in runs])
            relative = [
                rate / figures["calibration"] for rate, figures in zip(rates, runs, strict=True)
            ]
            report.add(case, subject, "events per million loop steps", "1", relative)
            for name in ("kib_per_node", "bytes_per_second", "deaths_known_share"):
                if name in runs[0]:
                    report.add(case, subject, name, "", [figures[name] for figures in runs])
            print(
                f"{case:15} {nodes:6} nodes  {rates[0]:10,.0f} events/s  {runs[0]['cpu']:7.1f}"
                " CPU s"
            )
    report.write(options.json)
    return 0
