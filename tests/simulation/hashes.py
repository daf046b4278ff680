"""Prints the hashes of small storms as JSON: ``python -m tests.simulation.hashes KIND:SEED
...``.

Of the kinds ``canary`` and ``free`` it is the hash of an order that trio is free to choose,
with the simulator's switches and without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import trio

import sim.kernel.virtual_time
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from tests.simulation.storms import STORMS, load_storm
from tests.support.scenarios import FEW_NODES as nodes, few_volunteers as volunteers

SECONDS: Final = 35.0  # virtual seconds of each storm: some of its faults
BARE: Final = {
    "ten_thousand": {"chunks": 16, "chunk_bytes": 262_144, "deaths": 0.2, "deaths_until": 2.0},
    "intellect2": {"versions": 1, "deaths": 0.2, "relays": 3, "coarse": 1024},
}
"""Scenarios that run at L0, with more deaths than they have for many times the nodes."""
SMALL: Final = {
    "diloco": load_scenario("diloco"),
    "nodes": replace(nodes, duration=20.0),
    "volunteers": replace(volunteers(arrival=60), duration=420.0),
}
"""Scenarios of other workloads, for as long as they say."""
KINDS: Final = (*STORMS, "churn", *BARE, *SMALL)
TASKS: Final = 1000  # with 200 the order looked stable even without the first switch


def small(kind: str) -> Scenario:
    """One of `KINDS`, of a size that many can be run of."""
    if kind in STORMS:
        return replace(load_storm(kind), duration=SECONDS, expect=())
    if kind in SMALL:
        return replace(SMALL[kind], expect=())
    scenario = load_scenario(kind)
    if kind in BARE:
        parameters = {**scenario.parameters, **BARE[kind]}
        return replace(scenario, nodes=40, expect=(), parameters=parameters)
    return replace(scenario, nodes=15, duration=SECONDS, expect=())


def hashes(wanted: Iterable[str]) -> dict[str, str]:
    """Return the trace hash of each ``KIND:SEED``."""
    found = {}
    for name in wanted:
        kind, _, seed = name.partition(":")
        if kind in KINDS:
            found[name] = run_scenario(small(kind), int(seed)).trace_hash
        else:
            if kind == "free":
                sim.kernel.virtual_time.deterministic = nullcontext
            found[name] = str(run_simulation(order_of_tasks, seed=int(seed)).value)
    return found


async def order_of_tasks(simulation: Simulation) -> str:
    order = hashlib.sha256()
    world = SimWorld(simulation, "node")

    async def worker(number: int) -> None:
        rng = world.rng(f"worker/{number}")
        for _ in range(3):
            with trio.move_on_after(rng.choice([0.5, 1.0, 2.0])):
                await world.sleep(rng.choice([0.5, 1.0, 3.0]))
            order.update(number.to_bytes(2, "big"))

    async with trio.open_nursery() as nursery:
        for number in range(TASKS):
            nursery.start_soon(worker, number)
    return order.hexdigest()


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    sys.stdout.write(json.dumps(hashes(sys.argv[1:])))
