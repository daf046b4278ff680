"""The link model against exact max-min sharing, on the six topologies that were measured on real links."""

from __future__ import annotations

import statistics

import pytest
import trio

from p2p.host import Stream
from p2p.identity import ProtocolId
from sim.kernel import run_simulation
from sim.link import LinkSpec
from sim.simulation import Simulation
from sim.swarm import SimNode, open_swarm
from tests.simulation.maxmin import Line, Topology, finish_times

FEED = ProtocolId("/test/feed/1.0.0")


def lines(count: int, up: float = 20.0, down: float = 20.0) -> dict[str, Line]:
    return {f"n{number}": Line(up, down) for number in range(count)}


def tree(count: int, fan_out: int = 2) -> list[tuple[str, str]]:
    return [(f"n{(child - 1) // fan_out}", f"n{child}") for child in range(1, count)]


def star_with_a_slow_one() -> Topology:
    topology = Topology(lines(5), [("n0", f"n{child}") for child in range(1, 5)])
    topology.lines["n4"] = Line(20.0, 2.0)
    return topology


def mixed() -> Topology:
    topology = Topology(lines(13), tree(13, 3))
    for number, name in enumerate(topology.lines):
        topology.lines[name] = Line(*[(20.0, 40.0), (8.0, 30.0), (50.0, 50.0), (4.0, 16.0)][number % 4])
    return topology


TOPOLOGIES = {
    "one flow": Topology(lines(2), [("n0", "n1")]),
    "star of 4": Topology(lines(5), [("n0", f"n{child}") for child in range(1, 5)]),
    "star, one slow": star_with_a_slow_one(),
    "chain of 5": Topology(lines(5), [(f"n{child - 1}", f"n{child}") for child in range(1, 5)]),
    "binary tree of 15": Topology(lines(15), tree(15)),
    "mixed tree of 13": mixed(),
}


@pytest.fixture(autouse=True)
def even_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sharing is even; streams as uneven as TCP's are held against real links (bench links)."""
    monkeypatch.setattr("sim.stream.WINDOW_PIECES", (4,))


class Cascade:
    """The same as the oracle's, over hosts and streams of the simulator, without latency."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.done: dict[str, float] = {}
        self.have = dict.fromkeys(topology.lines, 0)
        self.changed = {name: trio.Event() for name in topology.lines}
        self.started = trio.Event()

    def gain(self, node: SimNode, count: int) -> None:
        self.have[node.name] += count
        self.changed[node.name].set()
        self.changed[node.name] = trio.Event()
        if self.have[node.name] == self.topology.chunks and count == 1:
            self.done[node.name] = node.simulation.now

    async def live(self, node: SimNode) -> None:
        async with node.open_host() as host, trio.open_nursery() as nursery:

            async def receive(stream: Stream) -> None:
                got = 0
                while data := await stream.receive_some():
                    got += len(data)
                    while got >= self.topology.chunk_bytes:
                        got -= self.topology.chunk_bytes
                        self.gain(node, 1)

            host.set_handler(FEED, receive)
            await node.world.sleep(1)
            for parent, child in self.topology.feeds:
                if parent == node.name:
                    other = next(other for other in node.siblings if other.name == child)
                    host.add_addrs(other.peer_id, [other.addr])
                    nursery.start_soon(self.feed, node, await host.open_stream(other.peer_id, FEED))
            await trio.sleep_forever()

    async def feed(self, node: SimNode, stream: Stream) -> None:
        await self.started.wait()
        for chunk in range(self.topology.chunks):
            while self.have[node.name] <= chunk:
                await self.changed[node.name].wait()
            await stream.send_all(bytes(self.topology.chunk_bytes))

    async def play(self, simulation: Simulation) -> dict[str, float]:
        async with open_swarm(simulation, lambda one, other: 0.0) as swarm:
            for name, line in self.topology.lines.items():
                swarm.add(name, self.live, link=LinkSpec(up=line.up, down=line.down))
            await swarm.sleep(5)
            self.gain(swarm.nodes[self.topology.feeds[0][0]], self.topology.chunks)
            self.started.set()
            while len(self.done) < len(self.topology.lines) - 1:
                await swarm.sleep(1)
            return {name: at - 5 for name, at in self.done.items()}


def simulated_times(topology: Topology) -> dict[str, float]:
    times = run_simulation(Cascade(topology).play, seed=1, horizon=3600).value
    assert times is not None
    return times


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_the_last_node_is_done_when_exact_sharing_says(name: str) -> None:
    exact, ours = finish_times(TOPOLOGIES[name]), simulated_times(TOPOLOGIES[name])
    assert max(ours.values()) == pytest.approx(max(exact.values()), rel=0.08)


def test_over_all_topologies_nodes_are_done_when_exact_sharing_says() -> None:
    errors = []
    for topology in TOPOLOGIES.values():
        exact, ours = finish_times(topology), simulated_times(topology)
        errors.append(statistics.fmean(abs(ours[name] / exact[name] - 1) for name in exact))
    assert statistics.fmean(errors) < 0.03
