"""Gossip: what is delivered was said, once; what is said when the storm is over reaches
everybody.

Connections are kept by a stand-in for membership. A seen id is remembered for two minutes, and
a message cannot be under way for longer here: nothing is to be delivered twice to one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from p2p.errors import PeerUnreachable, WrongPeer
from p2p.gossip import GossipConfig, Validity, open_gossip
from p2p.identity import PeerId
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from tests.simulation.storms import Broken

TOPIC: Final = "storm"
FRIENDS: Final = 5
MEET: Final = 5.0  # seconds between looks whether enough friends are connected
SAY: Final = 6.0  # seconds between two messages of one node


class GossipStorm:
    """A `sim.run.scenario.Workload`."""

    def __init__(self) -> None:
        self._said: dict[bytes, tuple[PeerId, float]] = {}
        self._heard: dict[str, dict[bytes, None]] = {}
        self._liars: dict[str, None] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        for number in range(scenario.nodes):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        swarm.every(0.5, lambda: self._watch(swarm))
        await swarm.sleep_until(scenario.duration)
        return self._measure(swarm, scenario)

    def _watch(self, swarm: Swarm) -> None:
        for node in swarm.nodes.values():
            if node.endpoint.lies or node.endpoint.repeats:
                self._liars[node.name] = None

    async def _live(self, node: SimNode) -> None:
        heard = self._heard[node.name] = {}
        async with (
            node.open_host() as host,
            open_gossip(node.world, host, GossipConfig()) as gossip,
        ):
            gossip.subscribe(
                TOPIC, self._judge, lambda author, data: _deliver(node.name, heard, data)
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_meet_others, node, host)
                await node.world.sleep(node.world.rng("say").uniform(1, SAY))
                while True:
                    data = f"{node.name} at {node.simulation.now:.6f}".encode()
                    self._said[data] = node.peer_id, node.simulation.now
                    gossip.publish(TOPIC, data)
                    await node.world.sleep(SAY)

    def _judge(self, author: PeerId, data: bytes) -> Validity:
        said = self._said.get(data)
        if said is None or said[0] != author:
            raise Broken(f"{data!r} passed for a message of {author!r}, who never said it")
        return Validity.ACCEPT

    def _measure(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        start, end = scenario.parameter("whole_from", 90.0), scenario.duration - 10.0
        honest = {
            node.peer_id: node.name for node in swarm.alive if node.name not in self._liars
        }
        expected = reached = 0
        for data, (author, when) in self._said.items():
            if start <= when <= end and author in honest:
                others = [name for peer, name in honest.items() if peer != author]
                expected += len(others)
                reached += sum(data in self._heard[name] for name in others)
        return {
            "reached": round(reached / max(1, expected), 5),
            "expected": expected,
            "honest": len(honest),
        }


def _deliver(name: str, heard: dict[bytes, None], data: bytes) -> None:
    if data in heard:
        raise Broken(f"{name} was told {data!r} twice")
    heard[data] = None


async def _meet_others(node: SimNode, host: SimHost) -> None:
    """Keep about as many connections as membership would."""
    others = [other for other in node.siblings if other is not node]
    dice = node.world.rng("friends")
    while True:
        for friend in dice.sample(others, min(2 * FRIENDS, len(others))):
            if len(host.connected) >= FRIENDS:
                break
            host.add_addrs(friend.peer_id, [friend.addr])
            try:
                await host.connect(friend.peer_id)
            except (PeerUnreachable, WrongPeer):
                continue
        await node.world.sleep(MEET)
