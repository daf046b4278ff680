"""Nodes on the simulated network: who hears what, when, and what dies with whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage, PeerUnreachable
from p2p.host import PeerEvent, PeerState, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.wire import MIB
from sim.errors import NodeFailed
from sim.kernel.queue import SECOND
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.net.fabric import IDLE_TIMEOUT
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm, open_swarm

ECHO = ProtocolId("/test/echo/1.0.0")
NEWS = ProtocolId("/test/news/1.0.0")
LATENCY = 0.05


class Stage:
    """Some nodes with open hosts that record what they hear."""

    def __init__(self, swarm: Swarm, names: str, **options: Any) -> None:
        self.swarm = swarm
        self.hosts: dict[str, SimHost] = {}
        self.heard: list[tuple[str, str, float]] = []
        self.events: list[tuple[str, PeerState, float]] = []
        for name in names:
            swarm.add(name, self.live, **options)

    async def live(self, node: SimNode) -> None:
        async with node.open_host() as host:
            self.hosts[node.name] = host
            host.set_handler(ECHO, serve_requests(self._answer))
            with (
                host.receiving(NEWS, lambda peer, data: self._hear(node.name, data)),
                host.watching(lambda event: self._note(node.name, event)),
            ):
                await trio.sleep_forever()

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        return data[::-1]

    def _hear(self, name: str, data: bytes) -> None:
        if data == b"bad":
            raise BadMessage("as asked")
        if data == b"bug":
            raise ZeroDivisionError("as asked")
        self.heard.append((name, data.decode(), self.swarm.simulation.now))

    def _note(self, name: str, event: PeerEvent) -> None:
        self.events.append((name, event.state, round(self.swarm.simulation.now, 6)))

    def introduce(self, one: str, other: str) -> PeerId:
        node = self.swarm.nodes[other]
        self.hosts[one].add_addrs(node.peer_id, [node.addr])
        return node.peer_id


def play(
    body: Callable[[Stage], Awaitable[Any]],
    names: str = "abc",
    strict: bool = True,
    **options: Any,
) -> Any:
    async def main(simulation: Simulation) -> Any:
        async with open_swarm(simulation, lambda one, other: LATENCY, strict=strict) as swarm:
            stage = Stage(swarm, names, **options)
            await swarm.sleep(0.001)
            return await body(stage)

    return run_simulation(main, seed=1, horizon=1000).value


def on_stage(body: Callable[[Stage], Awaitable[None]]) -> Callable[[], None]:
    """Turn a coroutine function into a test on a stage with three nodes."""

    def test() -> None:
        play(body)

    test.__name__ = body.__name__
    return test


@on_stage
async def test_first_contact_costs_four_round_trips_and_a_message_one_way(stage: Stage) -> None:
    peer = stage.introduce("a", "b")
    start = stage.swarm.simulation.now
    assert stage.hosts["a"].send(peer, NEWS, b"first")
    await stage.swarm.sleep(1)
    assert stage.hosts["a"].send(peer, NEWS, b"second")
    await stage.swarm.sleep(1)
    (_, _, first), (_, _, second) = stage.heard
    assert first - start == pytest.approx(9 * LATENCY, abs=1e-3)
    assert second - start == pytest.approx(1 + LATENCY, abs=1e-3)


@on_stage
async def test_a_killed_process_is_noticed_at_once_and_a_vanished_machine_later(
    stage: Stage,
) -> None:
    for other in "bc":
        await stage.hosts["a"].connect(stage.introduce("a", other))
    start = stage.swarm.simulation.now
    stage.swarm.kill("b")
    stage.swarm.kill("c", silent=True)
    await stage.swarm.sleep(IDLE_TIMEOUT / SECOND + 1)
    gone = [
        at - start
        for name, state, at in stage.events
        if name == "a" and state is PeerState.DISCONNECTED
    ]
    assert gone == pytest.approx([LATENCY, IDLE_TIMEOUT / SECOND], abs=1e-3)
    assert stage.hosts["a"].connected == ()
    start = stage.swarm.simulation.now
    with pytest.raises(PeerUnreachable):
        await stage.hosts["a"].connect(stage.swarm.nodes["b"].peer_id)
    assert stage.swarm.simulation.now - start == pytest.approx(2 * LATENCY, abs=5.1), (
        "refused, not timed out"
    )


@on_stage
async def test_a_restarted_node_has_its_key_its_address_and_its_disk(stage: Stage) -> None:
    node = stage.swarm.nodes["b"]
    peer = stage.introduce("a", "b")
    await stage.hosts["a"].connect(peer)
    await node.world.disk.replace("kept", b"1")
    await node.world.disk.write("lost", b"2")
    old = node.world
    stage.swarm.kill("b")
    await stage.swarm.sleep(20)
    stage.swarm.restart("b")
    await stage.swarm.sleep(0.1)
    assert node.world is not old
    assert node.peer_id == peer
    assert await node.world.disk.list("") == ["kept"]
    assert await request(stage.hosts["a"], peer, ECHO, b"ab") == b"ba"
    stage.swarm.restart("b", wipe=True)
    assert await node.world.disk.list("") == []


def test_nothing_of_a_dead_node_runs_or_is_heard() -> None:
    ticks: list[float] = []

    async def body(stage: Stage) -> None:
        peer = stage.introduce("a", "b")
        await stage.hosts["a"].connect(peer)
        node = stage.swarm.nodes["a"]

        async def last_words(node: SimNode) -> None:
            async with node.open_host() as host:
                node.world.call_at(node.world.now() + 2, lambda: ticks.append(1))
                await host.connect_addr(stage.swarm.nodes["b"].addr)
                try:
                    await node.world.sleep(1e6)
                finally:
                    host.send(peer, NEWS, b"good-bye")
                    with trio.CancelScope(shield=True):
                        await node.world.sleep(1)
                        ticks.append(2)

        node.main = last_words
        stage.swarm.restart("a")
        await stage.swarm.sleep(1)
        stage.swarm.kill("a", silent=True)
        await stage.swarm.sleep(30)
        assert [text for _, text, _ in stage.heard] == []
        assert ticks == [2], "shielded cleanup ends, timers do not fire"

    play(body)


def test_blocking_work_dies_with_its_node() -> None:
    async def body(stage: Stage) -> float:
        async def work(node: SimNode) -> None:
            await node.world.run_blocking(int, cost=500.0)

        node = stage.swarm.add("w", work)
        await stage.swarm.sleep(1)
        stage.swarm.kill("w")
        await node._ended.wait()
        return stage.swarm.simulation.now

    assert play(body) < 2


@on_stage
async def test_a_short_partition_delays_and_a_long_one_disconnects(stage: Stage) -> None:
    peer = stage.introduce("a", "b")
    await stage.hosts["a"].connect(peer)
    cuts = stage.swarm.partition("a", "bc")
    stage.hosts["a"].send(peer, NEWS, b"one")
    stage.hosts["a"].send(peer, NEWS, b"two")
    await stage.swarm.sleep(5)
    assert stage.heard == []
    stage.swarm.repair(cuts)
    await stage.swarm.sleep(1)
    assert [text for _, text, _ in stage.heard] == ["one", "two"]
    stage.swarm.partition("a", "bc")
    await stage.swarm.sleep(IDLE_TIMEOUT / SECOND + 1)
    assert peer not in stage.hosts["a"].connected
    assert stage.hosts["b"].connected == ()
    with pytest.raises(PeerUnreachable):
        await stage.hosts["a"].connect(peer)
    stage.swarm.repair()
    await stage.swarm.sleep(6)
    await stage.hosts["a"].connect(peer)


@on_stage
async def test_a_one_way_partition_cuts_one_way(stage: Stage) -> None:
    peer = stage.introduce("a", "b")
    await stage.hosts["a"].connect(peer)
    stage.swarm.partition("a", "b", one_way=True)
    stage.hosts["a"].send(peer, NEWS, b"lost")
    stage.hosts["b"].send(stage.swarm.nodes["a"].peer_id, NEWS, b"heard")
    await stage.swarm.sleep(5)
    assert [text for _, text, _ in stage.heard] == ["heard"]


@on_stage
async def test_a_paused_node_does_everything_at_once_when_it_wakes(stage: Stage) -> None:
    peer = stage.introduce("a", "b")
    await stage.hosts["a"].connect(peer)
    start = stage.swarm.simulation.now
    stage.swarm.pause("b", 3)
    for text in ("one", "two"):
        stage.hosts["a"].send(peer, NEWS, text.encode())
        await stage.swarm.sleep(0.5)
    await stage.swarm.sleep(5)
    assert [(text, round(at - start, 3)) for _, text, at in stage.heard] == [
        ("one", 3.0),
        ("two", 3.0),
    ]


def test_nothing_of_a_paused_node_runs() -> None:
    """Neither its deadlines, nor what a reader makes room for, nor what dials it."""
    woken: list[float] = []

    async def live(node: SimNode) -> None:
        listener = await node.network.listen(Multiaddr.parse("/memory/0"))
        stream = await listener.accept()

        async def accept() -> None:
            await listener.accept()
            woken.append(node.world.now())

        async def send() -> None:
            await stream.send_all(bytes(64 * MIB))
            woken.append(node.world.now())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            nursery.start_soon(send)
            while True:
                with trio.move_on_after(0.5):
                    await trio.sleep_forever()
                woken.append(node.world.now())

    async def read(node: SimNode) -> None:
        async with await node.network.dial(Multiaddr.parse("/memory/1")) as stream:
            await node.world.sleep(1)
            async with await node.network.dial(Multiaddr.parse("/memory/1")):
                async for _ in stream:
                    await trio.lowlevel.checkpoint()

    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation, lambda one, other: LATENCY) as swarm:
            swarm.add("paused", live)
            swarm.add("reader", read)
            await swarm.sleep(1)
            swarm.pause("paused", 5)
            await swarm.sleep(3)
            swarm.pause("paused", 1)  # a shorter one within makes it no shorter
            await swarm.sleep(4)

    run_simulation(main, seed=1)
    assert not [when for when in woken if 1 < when < 6]
    assert woken.count(6) >= 2  # the deadline and the dial
    assert max(woken) > 7


@on_stage
async def test_peers_give_up_what_is_paused_for_too_long(stage: Stage) -> None:
    """It finds that out when it goes on, behind what they had sent."""
    for name in "bc":
        await stage.hosts["a"].connect(stage.introduce("a", name))
    await stage.swarm.sleep(1)
    start, idle = round(stage.swarm.simulation.now, 6), IDLE_TIMEOUT / SECOND
    stage.events.clear()
    stage.swarm.pause("b", idle + 5)
    stage.swarm.pause("c", idle - 1)
    stage.hosts["a"].send(stage.swarm.nodes["b"].peer_id, NEWS, b"hello")
    await stage.swarm.sleep(2 * idle)
    assert stage.heard == [("b", "hello", pytest.approx(start + idle + 5))]
    assert stage.events == [
        ("a", PeerState.DISCONNECTED, pytest.approx(start + idle)),
        ("b", PeerState.DISCONNECTED, pytest.approx(start + idle + 5)),
    ]


def test_a_bug_in_a_task_names_its_node_or_counts_as_a_crash() -> None:
    async def crash(node: SimNode) -> None:
        await node.world.sleep(1)
        raise LookupError("mine")

    async def body(stage: Stage) -> tuple[bool, str]:
        node = stage.swarm.add("x", crash)
        await stage.swarm.sleep(5)
        return node.alive, str(stage.swarm.failures[0])

    alive, failure = play(body, strict=False)
    assert not alive
    assert "node x failed at 1.001" in failure
    with pytest.raises(BaseExceptionGroup) as caught:
        play(body)
    assert caught.group_contains(NodeFailed, match="node x failed")
