"""Reads of a DHT whose nodes come, go and lie (L1).

Every node publishes a new edition of its own record each ``publish`` seconds until
``publish_until``, and between them reads the records of others. What comes back must have been
said by its publisher, in that edition; nothing that a liar or a crash does may change this.
When all is quiet, every honest node reads every other's record, and must find the newest
edition. Who ever lied may be refused by its peers, and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import trio

from p2p.dht import Dht, DhtConfig, open_dht
from p2p.dht.record import Record
from p2p.identity import PeerId
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario

NAMESPACE: Final = "edition"
SEEDS: Final = 3
"""Nodes through which the others join."""
STAMP_BITS: Final = 4
"""Difficulty of work stamps in all workloads, in bits. A stamp is real work, which virtual time
cannot shorten, so here it is symbolic: 16 hashes in the mean, in production a million."""
CONFIG: Final = DhtConfig(
    difficulty=STAMP_BITS,
    refresh_interval=30.0,
    republish_interval=10.0,
)
"""Production refreshes in minutes; here a scenario of minutes shall see many rounds of each."""


class Editions:
    """Nodes that publish editions of a record, read those of others, and are judged by what
    they read."""

    parameters: ClassVar[Sequence[str]] = (
        "last_reading",
        "lifetime",
        "publish_until",
        "publish",
        "read",
    )

    def __init__(self) -> None:
        self._open: dict[str, Dht] = {}
        self._said: dict[tuple[PeerId, bytes], int] = {}  # and the edition's number
        self._newest: dict[PeerId, int] = {}
        self._signed: dict[tuple[PeerId, int], bytes] = {}
        self._liars: dict[str, None] = {}
        self._wrong: list[str] = []
        self._read = 0

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Publish and read until the duration is nearly over; then let every node read every
        record."""
        self._scenario = scenario
        swarm.on_death.append(self._died)
        for number in range(scenario.nodes):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        swarm.every(0.5, lambda: self._watch(swarm))
        await swarm.sleep_until(scenario.duration - scenario.parameter("last_reading", 20.0))
        honest = [node for node in swarm.alive if self._is_honest(node)]
        async with trio.open_nursery() as nursery:
            answers: list[tuple[int, int]] = []
            for node in honest:
                nursery.start_soon(self._read_all, node, honest, answers)
        found, newest = (
            (sum(column) for column in zip(*answers, strict=True)) if answers else (0, 0)
        )
        pairs = max(1, len(honest) * (len(honest) - 1))
        return {
            "wrong": len(self._wrong),
            "first_wrong": self._wrong[0] if self._wrong else "nothing",
            "read": self._read,
            "found_share": round(found / pairs, 4),
            "newest_share": round(newest / pairs, 4),
            "honest": len(honest),
        }

    def _died(self, node: SimNode) -> None:
        self._open.pop(node.name, None)

    def _watch(self, swarm: Swarm) -> None:
        for node in swarm.nodes.values():
            if node.endpoint.lies or node.endpoint.repeats:
                self._liars[node.name] = None

    def _is_honest(self, node: SimNode) -> bool:
        return node.name not in self._liars and node.name in self._open

    async def _live(self, node: SimNode) -> None:
        async with node.open_host() as host, open_dht(node.world, host, CONFIG) as dht:
            self._open[node.name] = dht
            await dht.bootstrap(
                [other.addr for other in node.siblings[:SEEDS] if other is not node]
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish, node, dht)
                nursery.start_soon(self._keep_reading, node, dht)

    async def _publish(self, node: SimNode, dht: Dht) -> None:
        lifetime = self._scenario.parameter("lifetime", 60.0)
        while node.simulation.now < self._scenario.parameter("publish_until", 90.0):
            edition = self._newest[node.peer_id] = self._newest.get(node.peer_id, 0) + 1
            value = f"{node.name}, edition {edition}".encode()
            self._said[node.peer_id, value] = edition
            await dht.put(NAMESPACE, node.peer_id.digest, value, lifetime)
            await node.world.sleep(self._scenario.parameter("publish", 8.0))
        await trio.sleep_forever()

    async def _keep_reading(self, node: SimNode, dht: Dht) -> None:
        dice = node.world.rng("readings")
        while True:
            await node.world.sleep(
                dice.uniform(0.5, 1.5) * self._scenario.parameter("read", 4.0)
            )
            await self._edition(node, dht, dice.choice(node.siblings))

    async def _edition(self, node: SimNode, dht: Dht, of: SimNode) -> int:
        """Return the edition of a peer's record that ``node`` finds; 0 if none."""
        found = await dht.get(NAMESPACE, of.peer_id.digest)
        self._read += 1
        for record in found:
            self._judge(node, of, record)
        mine = [self._said.get((of.peer_id, record.value), 0) for record in found]
        return max(mine, default=0)

    def _judge(self, node: SimNode, of: SimNode, record: Record) -> None:
        """Count impossible records: of another name, never published, or two under one
        number."""
        first = self._signed.setdefault((record.publisher, record.seqno), record.value)
        if (
            (record.publisher, record.value) not in self._said
            or record.name != of.peer_id.digest
            or first != record.value
        ):
            self._wrong.append(f"{node.name} read {record!r} at {node.simulation.now:.3f} s")

    async def _read_all(
        self, node: SimNode, honest: list[SimNode], answers: list[tuple[int, int]]
    ) -> None:
        """Count the records of others that ``node`` finds, and how many of them are the
        newest."""
        dht = self._open[node.name]
        editions = {
            other.peer_id: await self._edition(node, dht, other)
            for other in honest
            if other is not node
        }
        found = sum(edition > 0 for edition in editions.values())
        newest = sum(edition == self._newest[peer] for peer, edition in editions.items())
        answers.append((found, newest))
