"""A load whose order trio is free to choose: run by test_canary.py in plain processes, never
imported.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import contextmanager

import trio

import sim.kernel.virtual_time
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld

TASKS = 1000
"""With 200 the order looked stable even without the first switch."""


async def main(simulation: Simulation) -> str:
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


@contextmanager
def free(seed: int):
    yield


if __name__ == "__main__":
    if sys.argv[1] == "free":
        sim.kernel.virtual_time.deterministic = free
    outcome = run_simulation(main, seed=int(sys.argv[2]))
    sys.stdout.write(f"{outcome.value} {outcome.trace_hash}\n")
