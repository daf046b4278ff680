"""A topology played in a simulation: over authenticated hosts (L1) or raw byte streams (L2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import trio

from p2p.host import Stream
from p2p.multiaddr import Multiaddr
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import SimNode, Swarm, open_swarm
from sim.studies.lab.link_model.broadcast import PROTOCOL_ID, TreeBroadcast
from sim.studies.lab.link_model.topologies import Topology

LATENCY = 0.0001
"""Seconds one way: machines on one bridge, as in the lab."""
HORIZON = 3600.0
"""Virtual seconds after which a broadcast of some megabytes will not come to an end."""


def simulated_times(topology: Topology, level: int, seed: int = 1) -> dict[str, float]:
    """Virtual seconds until each machine (without the root) holds everything.

    ``level`` is 1 or 2. Must not be called where trio runs. Raises what `run_simulation` does.
    """
    kinds: dict[int, Callable[[Topology, Swarm], _SimulatedTree]] = {
        1: _TreeOverHosts,
        2: _TreeOverStreams,
    }
    outcome = run_simulation(partial(_play, topology, kinds[level]), seed=seed, horizon=HORIZON)
    assert outcome.value is not None
    return outcome.value


async def _play(
    topology: Topology,
    kind: Callable[[Topology, Swarm], _SimulatedTree],
    simulation: Simulation,
) -> dict[str, float]:
    async with open_swarm(simulation, lambda one, other: LATENCY) as swarm:
        tree = kind(topology, swarm)
        for member in topology.members:
            swarm.add(member.name, tree.live, link=member.link)
        return await tree.times()


class _SimulatedTree(ABC):
    """All machines of a topology in one simulation."""

    def __init__(self, topology: Topology, swarm: Swarm) -> None:
        self.topology = topology
        self._swarm = swarm
        self._ready = dict.fromkeys(topology.parents, False)
        self._start = trio.Event()
        self._broadcasts: dict[str, TreeBroadcast] = {}
        self._ended = {name: trio.Event() for name in topology.parents}

    async def times(self) -> dict[str, float]:
        """Wait until every machine has every chunk."""
        for ended in self._ended.values():
            await ended.wait()
        whole = {name: broadcast.whole_at for name, broadcast in self._broadcasts.items()}
        return _since_root(self.topology, whole)

    @abstractmethod
    async def live(self, node: SimNode) -> None:
        """Play one machine: connect, wait for the others, broadcast."""

    async def play(
        self, node: SimNode, up: trio.abc.Stream | None, down: list[trio.abc.Stream]
    ) -> None:
        """Play once all machines are connected."""
        self._ready[node.name] = True
        if all(self._ready.values()):
            self._start.set()
        await self._start.wait()
        topology = self.topology
        broadcast = TreeBroadcast(
            topology.chunks, topology.chunk_bytes, lambda: self._swarm.simulation.now
        )
        self._broadcasts[node.name] = broadcast
        await broadcast.run(up, down)
        self._ended[node.name].set()
        await trio.sleep_forever()  # a stream that closes takes with it what is on its way


class _TreeOverStreams(_SimulatedTree):
    """Level L2: raw byte streams, one wire each."""

    async def live(self, node: SimNode) -> None:
        async with AsyncExitStack() as stack:
            listener = await node.network.listen(Multiaddr((("memory", "0"),)))
            stack.push_async_callback(listener.aclose)
            parent = self.topology.parents[node.name]
            up = None
            if parent is not None:
                up = await stack.enter_async_context(
                    await node.network.dial(self._swarm.nodes[parent].addr)
                )
            down: list[trio.abc.Stream] = []
            for _ in self.topology.children(node.name):
                down.append(await stack.enter_async_context(await listener.accept()))
            await self.play(node, up, down)


class _TreeOverHosts(_SimulatedTree):
    """Level L1: streams between authenticated peers."""

    async def live(self, node: SimNode) -> None:
        children = len(self.topology.children(node.name))
        down: list[trio.abc.Stream] = []
        complete = trio.Event()

        async def take(stream: Stream) -> None:
            await stream.receive_some(1)
            down.append(stream)
            if len(down) == children:
                complete.set()
            await trio.sleep_forever()

        async with node.open_host() as host:
            host.set_handler(PROTOCOL_ID, take)
            parent, up = self.topology.parents[node.name], None
            if parent is not None:
                there = self._swarm.nodes[parent]
                host.add_addrs(there.peer_id, [there.addr])
                up = await host.open_stream(there.peer_id, PROTOCOL_ID)
                await up.send_all(b"!")  # a stream may be opened lazily
            if children:
                await complete.wait()
            await self.play(node, up, down)


def _since_root(topology: Topology, whole: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds from the root's start to each other machine's end, in the topology's order."""
    times: dict[str, float] = {}
    root, *others = topology.parents
    start = whole[root]
    assert start is not None
    for name in others:
        at = whole[name]
        assert at is not None
        times[name] = at - start
    return times
