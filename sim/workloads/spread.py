"""Does every policy reach every node, over real SHARDCAST nodes on simulated links? (L1)

One origin publishes a version each ``interval``; announcements go straight to all, because
gossip is another scenario's question. Faults come from the scenario.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

import trio

from p2p.errors import PeerUnreachable
from p2p.host import MAX_MESSAGE
from p2p.identity import PeerId, ProtocolId
from p2p.shardcast import PolicyVersion, RosterEntry, Shardcast, ShardcastConfig, open_shardcast
from sim.net.link import behind_nat, drawn_link
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario

ANNOUNCE = ProtocolId("/sim/announce/1.0.0")
RUN = b"simulated run"
ORIGIN = "origin"
FRIENDS = 4
"""Peers a newcomer connects to, besides the origin."""


class Spread:
    """One origin and many relaying receivers."""

    parameters: ClassVar[Sequence[str]] = (
        "nat_share",
        "up_low",
        "up_high",
        "down_factor",
        "versions",
        "interval",
        "chunk_bytes",
        "policy_bytes",
    )

    def __init__(self) -> None:
        self._services: dict[str, Shardcast] = {}
        self._published: dict[int, float] = {}
        self._arrived: dict[int, list[float]] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Publish, let it flow, and measure who got what when."""
        self._scenario = scenario
        swarm.add(ORIGIN, self._live, link=scenario.link)
        nat = scenario.parameter("nat_share", 0.0)
        dice = swarm.rng("links")
        for number in range(1, scenario.nodes):
            link = scenario.link
            if "up_low" in scenario.parameters:
                uplinks = (
                    scenario.parameter("up_low", 10.0),
                    scenario.parameter("up_high", 200.0),
                )
                link = drawn_link(dice, uplinks, scenario.parameter("down_factor", 4.0))
            swarm.add(
                f"n{number}", self._live, link=behind_nat(link) if dice.random() < nat else link
            )
        await swarm.sleep(1)
        versions, interval = (
            int(scenario.parameter("versions", 5)),
            scenario.parameter("interval", 20.0),
        )
        for version in range(1, versions + 1):
            await self._publish(swarm, version)
            await swarm.sleep(interval)
        await swarm.sleep_until(scenario.duration)
        return self._measure(swarm, versions)

    async def _live(self, node: SimNode) -> None:
        others = [other for other in node.siblings if other is not node]
        origin = node.siblings[0]
        async with node.open_host() as host:
            for other in others:
                host.add_addrs(other.peer_id, [other.addr])

            def announce(data: bytes) -> None:
                for other in node.siblings:
                    if other is not node and len(data) <= MAX_MESSAGE:
                        host.add_addrs(other.peer_id, [other.addr])
                        host.send(other.peer_id, ANNOUNCE, data)

            async with open_shardcast(
                node.world,
                host,
                ShardcastConfig(
                    chunk_bytes=int(self._scenario.parameter("chunk_bytes", 65536))
                ),
                run=RUN,
                may_publish=lambda peer: peer == origin.peer_id,
                roster=lambda: self._roster(node),
                announce=announce,
            ) as service:
                with host.receiving(ANNOUNCE, lambda peer, data: _hear(service, peer, data)):
                    self._services[node.name] = service
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_meet_others, node, host)
                        await self._note_arrivals(node, service)

    def _roster(self, origin: SimNode) -> Sequence[RosterEntry]:
        return [
            RosterEntry(other.peer_id, other.endpoint.spec.up * 1e6 / 8)
            for other in origin.siblings
            if other is not origin and other.alive
        ]

    async def _note_arrivals(self, node: SimNode, service: Shardcast) -> None:
        while True:
            newest = await service.wait_policy(PolicyVersion(service.newest + 1))
            published = self._published.get(newest)
            if node.name != ORIGIN and published is not None:
                self._arrived.setdefault(newest, []).append(node.simulation.now - published)

    async def _publish(self, swarm: Swarm, version: int) -> None:
        origin = swarm.nodes[ORIGIN]
        if not origin.alive:
            return
        path = f"weights-{version}.safetensors"
        size = int(self._scenario.parameter("policy_bytes", 2_000_000))
        await origin.world.disk.replace(
            path, make_weights(swarm.rng(f"weights/{version}"), size)
        )
        await self._services[ORIGIN].publish(PolicyVersion(version), path)
        self._published[version] = swarm.simulation.now

    def _measure(self, swarm: Swarm, versions: int) -> Mapping[str, float | int | str]:
        receivers = [node for node in swarm.alive if node.name != ORIGIN]
        newest = max(self._published, default=0)
        holders = [node for node in receivers if self._services[node.name].newest >= newest]
        seconds = sorted(self._arrived.get(newest, [])) or [math.inf]
        stats = [self._services[node.name].stats for node in receivers]
        from_peers = sum(stat.from_peers for stat in stats)
        from_origin = sum(stat.from_origin for stat in stats)
        policy = int(self._scenario.parameter("policy_bytes", 2_000_000))
        swarm.simulation.distributions["bytes sent, by node"] = [
            float(node.endpoint.sent) for node in swarm.nodes.values()
        ]
        return {
            "hold_newest": round(len(holders) / max(1, len(receivers)), 4),
            "published": len(self._published),
            "arrivals_share": round(
                sum(map(len, self._arrived.values()))
                / max(1, len(self._published) * len(receivers)),
                4,
            ),
            "seconds_median": round(statistics.median(seconds), 3),
            "seconds_last": round(seconds[-1], 3),
            "from_peers_share": round(from_peers / max(1, from_peers + from_origin), 4),
            "origin_policies_sent": round(
                swarm.nodes[ORIGIN].endpoint.sent / max(1, policy * len(self._published)), 3
            ),
            "chunks_bad": sum(stat.chunks_bad for stat in stats),
            "chunks_repaired": sum(stat.chunks_repaired for stat in stats),
        }


async def _meet_others(node: SimNode, host: SimHost) -> None:
    """Connect to the origin and to some others, as membership would have it."""
    others = [
        other for other in node.siblings if other is not node and not other.endpoint.spec.nat
    ]
    chosen = node.world.rng("friends").sample(others, min(FRIENDS, len(others)))
    for other in dict.fromkeys((node.siblings[0], *chosen)):
        if other is not node:
            try:
                host.add_addrs(other.peer_id, [other.addr])
                await host.connect(other.peer_id)
            except PeerUnreachable:
                continue  # it is away just now


def _hear(service: Shardcast, peer: PeerId, data: bytes) -> None:
    service.receive_announcement(peer, data)


def make_weights(rng: Random, size: int) -> bytes:
    """A safetensors file of about ``size`` bytes that does not compress."""
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + rng.randbytes(size)
