"""A member's heartbeat restores its address; anchors outlive a restart; the small
ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from unittest.mock import patch

import trio

from p2p.host import AddrSource
from p2p.identity import PeerId
from p2p.membership import Membership, MembershipConfig, open_membership
from p2p.membership.core.core import ANCHOR_BEATS, READDRESS_BEATS
from p2p.membership.service import ANCHORS_PATH
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from tests.support.simulated import on_swarm

CONFIG = MembershipConfig(interval=1.0)


class Town:
    """Nodes with membership; the first is everybody's bootstrap."""

    def __init__(self, swarm: Swarm, size: int) -> None:
        self.swarm = swarm
        self.services: dict[str, Membership] = {}
        self.names: dict[PeerId, str] = {}
        self.told: list[tuple[str, AddrSource]] = []
        self.protected: dict[str, dict[str, tuple[Any, ...]]] = {}
        for number in range(size):
            swarm.add(f"n{number}", self.live)

    async def live(self, node: SimNode) -> None:
        async with node.open_host() as host:
            self.names[host.peer_id] = node.name
            async with open_membership(
                node.world, host, CONFIG, may=lambda peer: True
            ) as service:
                self.services[node.name] = service
                await service.join([self.swarm.nodes["n0"].addr])
                await trio.sleep_forever()


def play(body: Callable[[Town], Awaitable[Any]], size: int = 6) -> None:
    async def main(swarm: Swarm) -> None:
        town = Town(swarm, size)
        add, protect = SimHost.add_addrs, SimHost.protect

        def note_addrs(
            host: SimHost, peer: PeerId, addrs: Any, source: AddrSource = AddrSource.OWNER
        ) -> None:
            town.told.append((town.names[host.peer_id], source))
            add(host, peer, addrs, source)

        def note_protected(host: SimHost, purpose: str, peers: Iterable[PeerId]) -> None:
            peers = tuple(peers)
            town.protected.setdefault(town.names[host.peer_id], {})[purpose] = peers
            protect(host, purpose, peers)

        with (
            patch.object(SimHost, "add_addrs", note_addrs),
            patch.object(SimHost, "protect", note_protected),
        ):
            await body(town)

    on_swarm(main)


def test_a_members_address_is_told_again_and_as_its_own_word() -> None:
    async def body(town: Town) -> None:
        await town.swarm.sleep(10)
        town.told.clear()
        await town.swarm.sleep(2 * READDRESS_BEATS)
        again = [source for name, source in town.told if name == "n1"]
        assert len(again) >= 5  # before: never again
        assert set(again) == {AddrSource.SIGNED}

    play(body)


def test_neighbours_are_protected() -> None:
    async def body(town: Town) -> None:
        await town.swarm.sleep(20)
        for name, service in town.services.items():
            assert set(town.protected[name]["neighbours"]) == set(service.neighbours)

    play(body)


def test_anchors_are_on_disk_and_bring_a_node_back_without_its_bootstrap() -> None:
    async def body(town: Town) -> None:
        await town.swarm.sleep(ANCHOR_BEATS + 5)
        node = town.swarm.nodes["n3"]
        written = (await node.world.disk.read(ANCHORS_PATH)).decode().splitlines()
        assert 1 <= len(written) <= 2
        town.swarm.kill("n3")
        if str(town.swarm.nodes["n0"].addr) not in written:
            town.swarm.kill("n0")
        await town.swarm.sleep(20)
        town.swarm.restart("n3")
        await town.swarm.sleep(3)
        assert town.services["n3"].neighbours

    play(body)
