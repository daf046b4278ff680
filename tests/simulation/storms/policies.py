"""SHARDCAST: what arrives is what was published, what is whole stays whole, nobody honest is
convicted.

The origin publishes in its own life, so it may die at any moment of it; the content of a
version is a function of its number. Whoever flipped bits or repeated old messages need not have
the last policy: it may still be refused by its peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Final

import trio

from p2p.errors import PeerUnreachable, StorageError, WrongPeer
from p2p.identity import PeerId, ProtocolId
from p2p.shardcast import PolicyVersion, RosterEntry, Shardcast, ShardcastConfig, open_shardcast
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.policies import make_weights
from tests.simulation.storms import Broken

ANNOUNCE: Final = ProtocolId("/storm/announce/1.0.0")
RUN: Final = b"storm"
ORIGIN: Final = "origin"
MEET: Final = 5.0  # seconds between attempts to reach those friends that are away
RESTART: Final = 1.0  # seconds until a process that could not write is started again
POLICY_BYTES: Final = 150_000
CHUNK_BYTES: Final = 8192


FRESH_EVERY: Final = 4
"""One version in so many has nothing in common with those before, and no patch is offered."""


@cache
def weights_of(version: int) -> bytes:
    if version % FRESH_EVERY == 0:
        return make_weights(Random(version), POLICY_BYTES)
    weights, rng = bytearray(weights_of(version - 1)), Random(version)
    for _ in range(int(0.01 * POLICY_BYTES)):
        weights[rng.randrange(POLICY_BYTES // 2, POLICY_BYTES)] ^= rng.randrange(1, 256)
    return bytes(weights)


class PoliciesStorm:
    """A `sim.run.scenario.Workload`."""

    def __init__(self) -> None:
        self._open: dict[str, Shardcast] = {}
        self._whole: dict[str, int] = {}
        self._liars: dict[str, None] = {}
        self._until = 0.0

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        self._until = scenario.parameter("publish_until", 80.0)
        swarm.on_death.append(lambda node: self._open.pop(node.name, None) and None)
        swarm.add(ORIGIN, self._live, link=scenario.link)
        for number in range(1, scenario.nodes):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        swarm.every(0.5, lambda: self._watch(swarm))
        await swarm.sleep_until(scenario.duration)
        return self._measure(swarm)

    def _watch(self, swarm: Swarm) -> None:
        for node in swarm.nodes.values():
            if node.endpoint.lies or node.endpoint.repeats:
                self._liars[node.name] = None
        for name, service in self._open.items():
            if service.halted:
                raise Broken(f"{name} convicted the origin, which is honest")

    async def _live(self, node: SimNode) -> None:
        """One life of the machine: its process is started again when the disk fails it."""
        while True:
            try:
                await self._run_process(node)
            except* StorageError:
                self._open.pop(node.name, None)
            await node.world.sleep(RESTART)

    async def _run_process(self, node: SimNode) -> None:
        origin = node.siblings[0]
        async with node.open_host() as host:
            for other in node.siblings:
                host.add_addrs(other.peer_id, [other.addr])
            async with open_shardcast(
                node.world,
                host,
                ShardcastConfig(chunk_bytes=CHUNK_BYTES),
                run=RUN,
                may_publish=lambda peer: peer == origin.peer_id,
                roster=lambda: _roster(node),
                announce=lambda data: _announce(node, host, data),
            ) as service:
                with host.receiving(ANNOUNCE, lambda peer, data: _hear(service, peer, data)):
                    self._check_kept(node, service)
                    _check_assembly(node, service)
                    self._open[node.name] = service
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_meet_others, node, host)
                        nursery.start_soon(self._check_arrivals, node, service)
                        if node is origin:
                            nursery.start_soon(self._publish, node, service)

    def _check_kept(self, node: SimNode, service: Shardcast) -> None:
        before = self._whole.get(node.name, -1)
        if service.newest < before:
            raise Broken(
                f"{node.name} had version {before} and came back with {service.newest}"
            )

    async def _check_arrivals(self, node: SimNode, service: Shardcast) -> None:
        version = service.newest
        while True:
            if version >= 0:
                with service.pin(version) as path:
                    data = await node.world.disk.read(path)
                if data != weights_of(version):
                    raise Broken(f"{node.name} took something else for version {version}")
                self._whole[node.name] = max(version, self._whole.get(node.name, -1))
            version = await service.wait_policy(PolicyVersion(service.newest + 1))

    async def _publish(self, node: SimNode, service: Shardcast) -> None:
        while node.simulation.now < self._until:
            version = PolicyVersion(service.newest + 1)
            path = f"weights-{version}.safetensors"
            await node.world.disk.replace(path, weights_of(version))
            await service.publish(version, path)
            await node.world.sleep(10.0)

    def _measure(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        honest = [node.name for node in swarm.nodes.values() if node.name not in self._liars]
        newest = max((service.newest for service in self._open.values()), default=-1)
        holders = [
            name for name in honest if name in self._open and self._open[name].newest == newest
        ]
        share = len(holders) / max(1, len(honest))
        return {
            # An origin that lies is refused by everybody it lied to.
            "hold_newest": round(share, 4) if ORIGIN not in self._liars else 1.0,
            "newest": newest,
            "honest": len(honest),
            "chunks_bad": sum(service.stats.chunks_bad for service in self._open.values()),
            "chunks_repaired": sum(
                service.stats.chunks_repaired for service in self._open.values()
            ),
        }


def _check_assembly(node: SimNode, service: Shardcast) -> None:
    """What was verified chunk by chunk must be what the manifest says."""
    store, finish = service._store, service._store.finish

    async def checked(policy: bytes) -> bool:
        entry = store.entry(policy)
        whole = await finish(policy)
        if not whole and entry is not None and store.entry(policy) is entry:
            raise Broken(
                f"{node.name} passed on chunks that are not those of version {entry.version}"
            )
        return whole

    store.finish = checked


def _roster(origin: SimNode) -> Sequence[RosterEntry]:
    others = [other for other in origin.siblings if other is not origin and other.alive]
    return [RosterEntry(other.peer_id, other.endpoint.spec.up * 1e6 / 8) for other in others]


def _announce(node: SimNode, host: SimHost, data: bytes) -> None:
    for other in node.siblings:
        if other is not node:
            host.send(other.peer_id, ANNOUNCE, data)


def _hear(service: Shardcast, peer: PeerId, data: bytes) -> None:
    service.receive_announcement(peer, data)


async def _meet_others(node: SimNode, host: SimHost) -> None:
    """Stay connected to some others, as membership would have it."""
    others = [other for other in node.siblings if other is not node]
    friends = node.world.rng("friends").sample(others, min(4, len(others)))
    while True:
        for friend in friends:
            try:
                await host.connect(friend.peer_id)
            except (PeerUnreachable, WrongPeer):
                continue
        await node.world.sleep(MEET)
