"""How services drive their cores."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import pytest
import trio

from p2p.driver import Driver
from p2p.errors import BadMessage
from p2p.world import World
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, open_swarm


class Countdown:
    """A core that says what it was told, and wants the time when it was asked to."""

    def __init__(self) -> None:
        self.deadline = math.inf
        self.handled: list[tuple[str, float]] = []

    @property
    def next_deadline(self) -> float:
        return self.deadline

    def handle(self, event: str, now: float) -> list[str]:
        self.handled.append((event, now))
        match event.split():
            case ["ring", "at", when]:
                self.deadline = float(when)
            case ["tick"]:
                self.deadline = math.inf
            case ["lie"]:
                raise BadMessage("as asked")
            case ["say", *words]:
                return list(words)
        return []


class Service:
    """The driver under test, around a `Countdown`."""

    def __init__(self, world: World, lateness: Callable[[], float] = float) -> None:
        self.core = Countdown()
        self.carried: list[str] = []
        self.driver = Driver(world, self.core, self.carry_out, self.on_deadline, lateness)

    def carry_out(self, effect: str) -> None:
        self.carried.append(effect)
        if effect == "echo":
            self.driver.feed("say echoed")

    def on_deadline(self) -> None:
        self.driver.feed("tick")


def play(course: Callable[[World], Awaitable[None]]) -> None:
    """Run ``course`` on a machine of its own, on virtual time that begins at 0."""

    async def main(simulation: Simulation) -> None:
        done = trio.Event()

        async def live(node: SimNode) -> None:
            await course(node.world)
            done.set()

        async with open_swarm(simulation) as swarm:
            swarm.add("n0", live)
            await done.wait()

    run_simulation(main, seed=1, horizon=1000)


def test_what_an_effect_causes_waits_for_the_effects_before_it() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        with service.driver.running():
            service.driver.feed("say echo first second")
        assert service.carried == ["echo", "first", "second", "echoed"]

    play(course)


def test_the_timer_follows_a_deadline_that_comes_nearer() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        with service.driver.running():
            service.driver.feed(f"ring at {world.now() + 50}")
            service.driver.feed(f"ring at {world.now() + 5}")
            began = world.now()
            await world.sleep(100)
        ticks = [when - began for event, when in service.core.handled if event == "tick"]
        assert ticks == [pytest.approx(5)]

    play(course)


def test_a_deadline_that_moved_away_is_told_once_and_in_time() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        began = world.now()
        with service.driver.running():
            service.driver.feed(f"ring at {began + 5}")
            service.driver.feed(f"ring at {began + 20}")
            await world.sleep(100)
        ticks = [when - began for event, when in service.core.handled if event == "tick"]
        assert ticks == [pytest.approx(20)]

    play(course)


def test_a_deadline_in_the_past_is_met_at_once_and_not_within_the_call() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        with service.driver.running():
            service.driver.feed("ring at -1")
            assert len(service.core.handled) == 1
            await world.sleep(1)
            assert len(service.core.handled) == 2

    play(course)


def test_a_peers_lie_reaches_the_caller_and_stops_nothing() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        with service.driver.running():
            with pytest.raises(BadMessage):
                service.driver.feed("lie")
            service.driver.feed("say truth")
        assert service.carried == ["truth"]

    play(course)


def test_what_waits_behind_a_lie_is_handled_with_the_next_event() -> None:
    async def course(world: World) -> None:
        service = Service(world)

        def carry_out(effect: str) -> None:
            service.carried.append(effect)
            if effect == "both":
                service.driver.feed("lie")
                service.driver.feed("say waited")

        service.driver = Driver(world, service.core, carry_out, service.on_deadline)
        with service.driver.running():
            with pytest.raises(BadMessage):
                service.driver.feed("say both")
            assert service.carried == ["both"]
            service.driver.feed("say next")
        assert service.carried == ["both", "waited", "next"]

    play(course)


def test_outside_its_block_a_driver_hears_nothing_and_rings_no_more() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        service.driver.feed("say early")
        with service.driver.running():
            service.driver.feed(f"ring at {world.now() + 5}")
        service.driver.feed("say late")
        service.driver.set_timer()
        await world.sleep(10)
        assert service.carried == []
        assert len(service.core.handled) == 1

    play(course)


def test_what_is_asked_is_answered_at_once_and_its_effects_wait_their_turn() -> None:
    async def course(world: World) -> None:
        service = Service(world)
        answers: list[list[str]] = []
        carry_out = service.carry_out

        def carry_out_and_ask(effect: str) -> None:
            carry_out(effect)
            if effect == "announce":
                service.driver.feed("say waited")
                answers.append(list(service.driver.ask("say pass-on")))
                with pytest.raises(BadMessage):
                    service.driver.ask("lie")

        service.driver = Driver(
            world, service.core, carry_out_and_ask, service.on_deadline, float
        )
        assert service.driver.ask("say nothing, since it does not run") == ()
        with service.driver.running():
            service.driver.feed("say announce second")
            assert answers == [["pass-on"]]
            assert service.carried == ["announce", "second", "pass-on", "waited"]
            assert service.driver.ask("say announce last") == ["announce", "last"]
        assert service.carried[4:] == ["announce", "last", "pass-on", "waited"]

    play(course)
