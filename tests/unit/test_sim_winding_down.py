"""How a simulation ends when something in it will not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from sim.errors import SimDeadlock, SimStuck
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm


def play(cleanup: Callable[[SimNode], Awaitable[None]], *, fails: bool = False) -> None:
    """Two nodes with a task each that cleans up like this, shielded; one of them may fail."""

    async def keep(node: SimNode) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await cleanup(node)

    async def live(node: SimNode) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, node, name="keeper")
            await node.world.sleep(2)
            if fails and node.name == "n2":
                raise ValueError("first of all")
            await trio.sleep_forever()

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            swarm.add("n1", live)
            swarm.add("n2", live)
            await swarm.sleep(5)

    run_simulation(main, seed=1, horizon=100)


async def wait_for_ever(node: SimNode) -> None:
    await trio.sleep_forever()


async def sleep_for_ever(node: SimNode) -> None:
    while True:
        await node.world.sleep(60)


async def wait_and_wait(node: SimNode) -> None:
    for _ in range(10):
        with trio.CancelScope(shield=True):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                continue


def test_cleanup_that_waits_for_nobody_is_a_deadlock_with_names() -> None:
    with pytest.raises(
        SimDeadlock, match=r"5\.0+ s; n1: keeper waits in wait_for_ever; n2: keeper"
    ):
        play(wait_for_ever)


def test_cleanup_that_takes_too_long_is_stuck_with_names() -> None:
    with pytest.raises(SimStuck, match=r"3600 virtual seconds: n1: keeper waits in SimWorld"):
        play(sleep_for_ever)


def test_what_no_cancellation_ends_is_still_named() -> None:
    with pytest.raises(SimDeadlock, match="n1: keeper waits in wait_and_wait"):
        play(wait_and_wait)
