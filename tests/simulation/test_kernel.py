"""trio on virtual time: the clock, its ends and its watchdogs."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from sim.errors import SimDeadlock, SimForbidden, SimStuck
from sim.kernel import virtual_time as kernel
from sim.kernel.simulation import SimOptions, Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm
from sim.node.world import SimWorld


def with_world(
    body: Callable[[SimWorld], Awaitable[Any]], **options: Any
) -> kernel.Outcome[Any]:
    async def main(simulation: Simulation) -> Any:
        return await body(SimWorld(simulation, "node"))

    return run_simulation(main, seed=1, **options)


def test_random_sleeps_of_both_kinds_end_on_time() -> None:
    async def body(world: SimWorld) -> None:
        rng = world.rng("sleeps")
        for _ in range(2000):
            for sleep in (world.sleep_until, trio.sleep_until):
                deadline = world.now() + rng.random()
                await sleep(deadline)
                assert deadline <= world.now() < deadline + 1e-8

    with_world(body)


def test_events_beyond_the_end_leave_no_trace() -> None:
    def run(after: float) -> kernel.Outcome[Any]:
        async def body(world: SimWorld) -> None:
            world.call_at(20, lambda: None)
            try:
                await world.sleep(1000)
            finally:
                with trio.CancelScope(shield=True):
                    await world.sleep(after)

        return with_world(body, horizon=10)

    assert run(1).trace_hash == run(30).trace_hash


def test_a_world_in_which_all_wait_is_a_deadlock_with_names() -> None:
    async def body(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.Event().wait, name="the lazy one")

    with pytest.raises(SimDeadlock, match=r"the lazy one waits in Event\.wait"):
        with_world(body)


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


@pytest.mark.parametrize(
    ("cleanup", "failure", "words"),
    [
        (wait_for_ever, SimDeadlock, r"5\.0+ s; n1: keeper waits in wait_for_ever; n2: keeper"),
        (sleep_for_ever, SimStuck, r"3600 virtual seconds: n1: keeper waits in SimWorld"),
        (wait_and_wait, SimDeadlock, "n1: keeper waits in wait_and_wait"),
    ],
)
def test_cleanup_that_does_not_end_is_named(
    cleanup: Callable[[SimNode], Awaitable[None]], failure: type[Exception], words: str
) -> None:
    async def keep(node: SimNode) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await cleanup(node)

    async def live(node: SimNode) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, node, name="keeper")
            await trio.sleep_forever()

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            swarm.add("n1", live)
            swarm.add("n2", live)
            await swarm.sleep(5)

    with pytest.raises(failure, match=words):
        run_simulation(main, seed=1, horizon=100)


def test_a_task_that_spins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SPIN_PASSES", 500)

    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async def body(world: SimWorld) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.sleep, 1)
            nursery.start_soon(spin, name="the busy one")

    with pytest.raises(SimStuck, match="the busy one"):
        with_world(body)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda: threading.Thread(target=print).start(),
        lambda: socket.socket().connect(("127.0.0.1", 9)),
        lambda: socket.socket().bind(("127.0.0.1", 0)),
        lambda: subprocess.run(["true"], check=False),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_doors_to_real_time_are_closed(forbidden: Callable[[], object]) -> None:
    async def body(world: SimWorld) -> None:
        with pytest.raises(SimForbidden):
            forbidden()

    with_world(body)


def test_trio_threads_are_forbidden_and_the_door_opens_again() -> None:
    async def body(world: SimWorld) -> None:
        with pytest.raises(SimForbidden, match="run_blocking"):
            await trio.to_thread.run_sync(int)
        with pytest.raises(SimForbidden):
            world.open_worker(["x"], name="x")

    with_world(body)

    async def outside() -> int:
        return await trio.to_thread.run_sync(int)

    assert trio.run(outside) == 0


def test_clocks_can_lie() -> None:
    async def body(world: SimWorld) -> tuple[float, ...]:
        before = world.wall()
        world.clock.change(skew=600.0)
        skewed = world.wall() - before
        world.clock.change(rate=2.0)
        await world.sleep(10)  # ten of its own seconds
        true = world.simulation.now
        deadline = world.now() + 1 / 3
        await world.sleep_until(deadline)
        assert world.now() >= deadline
        return skewed, round(true, 6), round(world.now(), 6)

    assert with_world(body).value == (600.0, 5.0, 10.333333)


def test_buggify_fires_only_where_and_when_it_is_switched_on() -> None:
    async def body(world: SimWorld) -> list[str]:
        return [
            site for site in map(str, range(200)) if any(world.buggify(site) for _ in range(40))
        ]

    assert with_world(body).value == []
    active = with_world(body, options=SimOptions(buggify=True))
    assert 20 < len(active.value) < 80, "a quarter of the sites is active in a run"
    assert len(active.simulation.fired) == 200
    assert sorted(site for site, times in active.simulation.fired.items() if times) == sorted(
        active.value
    )


def test_each_node_and_purpose_draws_for_itself() -> None:
    async def main(simulation: Simulation) -> list[float]:
        worlds = [
            SimWorld(simulation, "a"),
            SimWorld(simulation, "b"),
            SimWorld(simulation, "a", life=1),
        ]
        return [world.rng(purpose).random() for world in worlds for purpose in ("x", "y")]

    drawn = run_simulation(main, seed=1).value
    assert drawn is not None
    assert len(dict.fromkeys(drawn)) == 6
    assert drawn == run_simulation(main, seed=1).value
    assert drawn != run_simulation(main, seed=2).value
