"""Spread of a policy over real services, some late, slow, lying or dead (L1).

The origin publishes a version each ``interval``, from a task of its own life, so that it dies
with it and goes on after a restart with the newest that is due. The roster is the workload's:
every node that has joined, with the upload that it claims. Announcements go straight to all,
since gossip is another scenario's question.

Who is late, slow or dishonest is in `sim.workloads.participants`; what a scenario's faults do
comes on top. Whether a liar or a dripper gets its policy is not asked. Versions may be skipped:
a node that holds a newer one has this.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import ClassVar, Final

import trio

from p2p.errors import PeerUnreachable
from p2p.host import MAX_MESSAGE, Host
from p2p.identity import PeerId, ProtocolId
from p2p.shardcast import (
    PolicyVersion,
    RosterEntry,
    Shardcast,
    ShardcastConfig,
    ShardcastStats,
    open_shardcast,
)
from p2p.shardcast.forest import Forest, Roster, build_forest
from p2p.shardcast.manifest import PROTOCOL_ID, decode_manifest_untrusted
from p2p.shardcast.messages import (
    Blame,
    PolicyNews,
    decode_message_untrusted,
    encode_message,
)
from sim.net.link import MBIT
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.participants import (
    ORIGIN,
    PARTICIPANT_PARAMETERS,
    Participant,
    dishonest_host,
    draw_participants,
)

ANNOUNCE: Final = ProtocolId("/sim/announce/1.0.0")
RUN: Final = b"simulated run"
FIRST_AT: Final = 1.0
"""Virtual second of the first publication."""
ACQUAINTANCES: Final = 3
"""Peers that a node dials when it joins, as its bootstrap would have told it."""
PERCENTILES: Final = (50, 90, 99, 100)
"""Shares of the receivers whose times a report names: half, most, and the last."""


class Policies:
    """One origin, many relaying receivers, and a few dishonest ones."""

    parameters: ClassVar[Sequence[str]] = (
        *PARTICIPANT_PARAMETERS,
        "policy_bytes",
        "chunk_bytes",
        "cache_bytes",
        "interval",
        "versions",
    )

    def __init__(self) -> None:
        self._participants: dict[str, Participant] = {}
        self._services: dict[str, Shardcast] = {}
        self._stats: list[ShardcastStats] = []
        self._published: dict[int, float] = {}
        self._arrivals: dict[str, list[tuple[float, int]]] = {}
        self._sent_before: dict[str, int] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Publish, let the policies spread, and measure their arrivals."""
        self._scenario = scenario
        self._size = int(scenario.parameter("policy_bytes", 2_000_000))
        self._participants = draw_participants(scenario, swarm.rng("links"))
        for name, participant in self._participants.items():
            swarm.add(
                name, self._live_origin if name == ORIGIN else self._live, link=participant.link
            )
        swarm.every(1.0, lambda: self._plot(swarm))
        late_at = max(participant.joins for participant in self._participants.values())
        await swarm.sleep_until(late_at)
        self._sent_before = {name: node.endpoint.sent for name, node in swarm.nodes.items()}
        await swarm.sleep_until(scenario.duration)
        return self._measure(swarm)

    # What a node does

    async def _live_origin(self, node: SimNode) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                self._live,
                node,
                lambda service: nursery.start_soon(self._publish, node, service),
            )

    async def _live(
        self, node: SimNode, opened: Callable[[Shardcast], object] = lambda service: None
    ) -> None:
        participant = self._participants[node.name]
        await node.world.sleep_until(participant.joins)
        origin = node.siblings[0]
        async with node.open_host() as host:

            def announce(data: bytes) -> None:
                for other in self._joined(node):
                    if len(data) <= MAX_MESSAGE:
                        host.add_addrs(other.peer_id, [other.addr])
                        host.send(other.peer_id, ANNOUNCE, data)

            for other in node.siblings:
                if other is not node:
                    host.add_addrs(other.peer_id, [other.addr])
            async with open_shardcast(
                node.world,
                dishonest_host(host, node.world, participant, self._chunk_bytes),
                self._configure(),
                run=RUN,
                may_publish=lambda peer: peer == origin.peer_id,
                roster=lambda: self._roster(node),
                announce=announce,
            ) as service:
                slanders = False

                def hear(peer: PeerId, data: bytes) -> None:
                    if slanders:
                        self._slander(service, node, host, peer, data)
                    else:
                        _hear(service, peer, data)

                with host.receiving(ANNOUNCE, hear):
                    await self._meet(node, host)
                    slanders = participant.slanders
                    self._services[node.name] = service
                    self._stats.append(service.stats)
                    opened(service)
                    await self._note_arrivals(node, service)

    @property
    def _chunk_bytes(self) -> int:
        return int(self._scenario.parameter("chunk_bytes", 65_536))

    def _configure(self) -> ShardcastConfig:
        """Return production's configuration, except for the length of chunks and the number of
        chunks in memory, since hundreds of nodes share one process here."""
        default = ShardcastConfig()
        cache = int(self._scenario.parameter("cache_bytes", default.cache_bytes))
        return replace(default, chunk_bytes=self._chunk_bytes, cache_bytes=cache)

    async def _meet(self, node: SimNode, host: Host) -> None:
        """Dial some present nodes, which tell new versions and serve them."""
        there = self._joined(node)
        others = [other for other in there if other.name != ORIGIN] or there
        for other in node.world.rng("meet").sample(others, min(ACQUAINTANCES, len(others))):
            try:
                await host.connect(other.peer_id)
            except PeerUnreachable:
                continue

    def _joined(self, node: SimNode) -> list[SimNode]:
        return [other for other in node.siblings if other is not node and self._is_in(other)]

    def _is_in(self, node: SimNode) -> bool:
        return node.alive and node.name in self._services

    def _roster(self, origin: SimNode) -> Sequence[RosterEntry]:
        return [
            RosterEntry(other.peer_id, self._participants[other.name].claim * MBIT / 8)
            for other in self._joined(origin)
        ]

    async def _publish(self, node: SimNode, service: Shardcast) -> None:
        interval = self._scenario.parameter("interval", 20.0)
        versions = int(self._scenario.parameter("versions", 5))
        for version in range(1, versions + 1):
            due = FIRST_AT + (version - 1) * interval
            overtaken = version < versions and node.world.now() >= due + interval
            if version <= service.newest or overtaken:
                continue
            await node.world.sleep_until(due)
            path = f"weights-{version}.safetensors"
            rng = node.simulation.rng(ORIGIN, f"weights/{version}")
            await node.world.disk.replace(path, make_weights(rng, self._size))
            self._published[version] = node.simulation.now
            await service.publish(PolicyVersion(version), path)

    async def _note_arrivals(self, node: SimNode, service: Shardcast) -> None:
        arrivals = self._arrivals.setdefault(node.name, [])
        newest = service.newest
        while True:
            arrivals.append((node.simulation.now, newest))
            newest = await service.wait_policy(PolicyVersion(newest + 1))

    def _slander(
        self, service: Shardcast, node: SimNode, host: Host, peer: PeerId, data: bytes
    ) -> None:
        """Take news of a policy, and report to the origin that every possible root lied."""
        _hear(service, peer, data)
        message = decode_message_untrusted(data)
        if isinstance(message, PolicyNews):
            policy = decode_manifest_untrusted(message.manifest, RUN, node.world.verify).digest
            for other in self._joined(node):
                if other.name != ORIGIN:
                    blame = encode_message(Blame(policy, other.peer_id))
                    host.send(peer, PROTOCOL_ID, blame)

    # What came of it

    def _receivers(self, swarm: Swarm) -> list[SimNode]:
        return [
            node
            for node in swarm.alive
            if node.name != ORIGIN and self._participants[node.name].honest
        ]

    def _plot(self, swarm: Swarm) -> None:
        newest = max(self._published, default=0)
        holders = [
            n
            for n in self._receivers(swarm)
            if self._is_in(n) and self._services[n.name].newest >= newest
        ]
        if newest:
            swarm.simulation.plot("honest nodes that hold the newest policy", len(holders))
        swarm.simulation.plot("bytes sent by the origin", swarm.nodes[ORIGIN].endpoint.sent)

    def _delays(self, receivers: Sequence[SimNode], version: int) -> list[float]:
        """Return the seconds until each present node had ``version`` or a newer version;
        infinite if never."""
        published = self._published[version]
        delays = []
        for node in receivers:
            if self._participants[node.name].joins <= published:
                came = (
                    when for when, held in self._arrivals.get(node.name, ()) if held >= version
                )
                delays.append(next(came, math.inf) - published)
        return sorted(delays)

    def _measure(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        receivers = self._receivers(swarm)
        newest = max(self._published, default=0)
        holders = [
            node
            for node in receivers
            if self._is_in(node) and self._services[node.name].newest >= newest
        ]
        by_version = {version: self._delays(receivers, version) for version in self._published}
        for percent in PERCENTILES:
            swarm.simulation.series[f"seconds to {percent} %, by version"] = [
                (self._published[version], value)
                for version, delays in by_version.items()
                if math.isfinite(value := percentile(delays, percent))
            ]
        times = {
            f"seconds_{percent}": round(
                statistics.median(
                    [percentile(delays, percent) for delays in by_version.values()]
                    or [math.inf]
                ),
                3,
            )
            for percent in PERCENTILES
        }
        pairs = [delay for delays in by_version.values() for delay in delays]
        return {
            "hold_newest": round(len(holders) / max(1, len(receivers)), 4),
            "published": len(self._published),
            "arrived_share": round(sum(map(math.isfinite, pairs)) / max(1, len(pairs)), 4),
            **times,
            "bound_seconds": round(self._bound(receivers), 3),
            **self._traffic(swarm),
            **self._late(receivers),
            "forest_depth": self._depth(swarm),
        }

    def _bound(self, receivers: Sequence[SimNode]) -> float:
        """Return the least seconds in which all receivers can get a policy (Kumar and Ross,
        HotWeb 2006).
        """
        links = [self._participants[node.name].link for node in receivers]
        origin = self._participants[ORIGIN].link.up
        total = origin + sum(link.up for link in links)
        slowest = min((link.down for link in links), default=math.inf)
        return 8 * self._size / MBIT * max(1 / origin, 1 / slowest, len(links) / total)

    def _traffic(self, swarm: Swarm) -> dict[str, float | int]:
        bytes_published = max(1, self._size * len(self._published))
        sent = {name: node.endpoint.sent for name, node in swarm.nodes.items()}
        swarm.simulation.distributions["policies sent, by node"] = [
            value / bytes_published for value in sent.values()
        ]
        relayed = sorted(
            value / bytes_published for name, value in sent.items() if name != ORIGIN
        )
        from_peers = sum(stats.from_peers for stats in self._stats)
        from_origin = sum(stats.from_origin for stats in self._stats)
        duplicates = sum(stats.duplicates for stats in self._stats)
        came = max(1, from_peers + from_origin)
        return {
            "origin_policies_sent": round(sent[ORIGIN] / bytes_published, 3),
            "upload_median_policies": round(statistics.median(relayed), 3),
            "upload_max_policies": round(relayed[-1], 3),
            "from_peers_share": round(from_peers / came, 4),
            "duplicate_share": round(duplicates / came, 4),
            "chunks_repaired": sum(stats.chunks_repaired for stats in self._stats),
            "chunks_bad": sum(stats.chunks_bad for stats in self._stats),
            "versions_skipped": sum(stats.versions_skipped for stats in self._stats),
        }

    def _late(self, receivers: Sequence[SimNode]) -> dict[str, float]:
        """Return the times in which late joiners got the newest version, and the senders'
        shares."""
        late = [node for node in receivers if self._participants[node.name].joins > 0]
        if not late:
            return {}
        joined = self._participants[late[0].name].joins
        version = max((v for v, when in self._published.items() if when <= joined), default=0)
        delays = sorted(
            next(
                (when for when, held in self._arrivals.get(node.name, ()) if held >= version),
                math.inf,
            )
            - joined
            for node in late
        )
        origin = late[0].siblings[0]
        return {
            "join_seconds_50": round(percentile(delays, 50), 3),
            "join_seconds_100": round(percentile(delays, 100), 3),
            "origin_policies_since_join": round(
                (origin.endpoint.sent - self._sent_before[ORIGIN]) / self._size, 3
            ),
        }

    def _depth(self, swarm: Swarm) -> int:
        """Return the hops from the origin to the farthest node in the forest of the last
        roster."""
        origin = swarm.nodes[ORIGIN]
        roster = Roster.sign(origin.world.signer, RUN, 1, self._roster(origin))
        return depth_of(build_forest(roster, PolicyVersion(max(self._published, default=1))))


def depth_of(forest: Forest) -> int:
    """Return the hops from the origin to the farthest peer of any stripe."""
    return max(
        (
            stripe.depth(place)
            for stripe in forest.stripes
            for place in range(len(stripe.parent))
        ),
        default=0,
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that ``percent`` of all do not exceed; infinity if there are
    none.
    """
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else math.inf


def _hear(service: Shardcast, peer: PeerId, data: bytes) -> None:
    service.receive_announcement(peer, data)


def make_weights(rng: Random, size: int) -> bytes:
    """Return a safetensors file of about ``size`` bytes that does not compress."""
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + rng.randbytes(size)
