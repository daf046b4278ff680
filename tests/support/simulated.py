"""What a test does among simulated nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import Swarm, open_swarm

T = TypeVar("T")


def on_swarm(
    body: Callable[[Swarm], Awaitable[T]], *, seed: int = 1, horizon: float = 3600.0
) -> T:
    """Play ``body`` on a swarm without nodes as yet, and give what it returns."""

    async def main(simulation: Simulation) -> T:
        async with open_swarm(simulation) as swarm:
            return await body(swarm)

    return run_simulation(main, seed=seed, horizon=horizon).value
