"""Membership as nodes use it, on the simulated host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio

from p2p.host import AddrSource
from p2p.identity import KeyPair, PeerId
from p2p.membership import Change, MemberEvent, Membership, MembershipConfig, open_membership
from p2p.membership.service import ANCHORS_PATH
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm, open_swarm

CONFIG = MembershipConfig(interval=1.0)


class Stage:
    """Nodes with membership; the first one is everybody's bootstrap."""

    def __init__(self, swarm: Swarm, size: int) -> None:
        self.swarm = swarm
        self.services: dict[str, Membership] = {}
        self.events: dict[str, list[MemberEvent]] = {}
        self.refused: set[PeerId] = set()
        self.leaving: dict[str, trio.Event] = {}
        for number in range(size):
            swarm.add(f"n{number}", self.live)

    async def live(self, node: SimNode) -> None:
        self.leaving[node.name] = trio.Event()
        async with (
            node.open_host() as host,
            open_membership(
                node.world, host, CONFIG, may=lambda peer: peer not in self.refused
            ) as service,
        ):
            self.services[node.name] = service
            self.events[node.name] = []
            service.on_change(self.events[node.name].append)
            service.me.update(
                roles=("trainer",) if node.name == "n0" else ("inference",), version="1"
            )
            await service.join([self.swarm.nodes["n0"].addr])
            await self.leaving[node.name].wait()
            await self.swarm.sleep(0)

    def peers(self, name: str) -> set[str]:
        names = {node.peer_id: node.name for node in self.swarm.nodes.values()}
        return {names[member.peer] for member in self.services[name].members()}

    def changes(self, name: str, of: str) -> list[Change]:
        peer = self.swarm.nodes[of].peer_id
        return [event.change for event in self.events[name] if event.member.peer == peer]


def play(body: Callable[[Stage], Awaitable[Any]], size: int = 6) -> str:
    async def main(simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            stage = Stage(swarm, size)
            await swarm.sleep(6)
            await body(stage)

    return run_simulation(main, seed=1, horizon=1000).trace_hash


async def everybody_knows_everybody(stage: Stage) -> None:
    names = {node.name for node in stage.swarm.alive}
    for name in sorted(names):
        assert stage.peers(name) == names - {name}


def test_nodes_join_and_find_each_other_by_role() -> None:
    async def body(stage: Stage) -> None:
        await everybody_knows_everybody(stage)
        (trainer,) = stage.services["n3"].find("trainer")
        assert trainer.peer == stage.swarm.nodes["n0"].peer_id
        assert trainer.addrs == (stage.swarm.nodes["n0"].addr,)
        assert len(stage.services["n0"].find("inference")) == 5
        assert stage.services["n0"].neighbours
        assert not any(stage.services["n0"].counters.values())

    play(body)


def test_a_node_that_ends_cleanly_has_left() -> None:
    async def body(stage: Stage) -> None:
        stage.leaving["n2"].set()
        await stage.swarm.sleep(2)
        for name in ("n0", "n1", "n3", "n4", "n5"):
            assert stage.changes(name, "n2") == [Change.JOINED, Change.LEFT]

    play(body)


def test_a_node_alone_joins_at_once_and_one_without_a_swarm_waits() -> None:
    async def body(stage: Stage) -> None:
        assert stage.peers("n0") == {"n1"}
        stage.swarm.kill("n0")
        stage.swarm.kill("n1")
        stage.swarm.add("n2", stage.live)
        await stage.swarm.sleep(30)
        assert stage.peers("n2") == set()
        stage.swarm.restart("n0")
        await stage.swarm.sleep(70)
        assert stage.peers("n2") == {"n0"}

    play(body, size=2)


def test_who_is_refused_disappears() -> None:
    async def body(stage: Stage) -> None:
        stage.refused.add(stage.swarm.nodes["n4"].peer_id)
        assert "n4" not in stage.peers("n0") | stage.peers("n1")
        await stage.swarm.sleep(13)
        assert stage.changes("n0", "n4")[-1] is Change.FORGOTTEN

    play(body)


def test_interest_is_a_direct_line() -> None:
    async def body(stage: Stage) -> None:
        peer = stage.swarm.nodes["n0"].peer_id
        stage.services["n5"].interest([peer])
        await stage.swarm.sleep(3)
        (member,) = [
            each
            for each in stage.services["n0"].find("inference")
            if each.addrs == (stage.swarm.nodes["n5"].addr,)
        ]
        assert stage.swarm.simulation.now - member.seen < 1.5

    play(body)


def test_a_peer_is_located_by_asking_who_knows_it() -> None:
    """On the rosters of those that many send their heartbeats to, peers find peers that they do
    not know: of forty that have just come few know each other."""

    async def body(stage: Stage) -> None:
        swarm = stage.swarm
        knows = swarm.nodes["n0"].peer_id
        stage.services["n0"].interest([])
        for number in range(1, 41):
            swarm.add(f"late{number}", stage.live)
        await swarm.sleep(0.8)
        asker = stage.services["late1"]
        known = {member.peer for member in asker.members()}
        unknown = [
            member.peer
            for member in stage.services["n0"].members()
            if member.peer not in known and member.peer != swarm.nodes["late1"].peer_id
        ]
        assert len(unknown) > 5
        began = swarm.simulation.now
        await asker.locate(unknown[0], [knows])
        assert unknown[0] in asker
        assert swarm.simulation.now - began < 0.5
        nobody = KeyPair(bytes(32)).peer_id
        await asker.locate(nobody, [knows])
        assert swarm.simulation.now - began > 2.0
        began = swarm.simulation.now
        await asker.locate(nobody, [unknown[-1]])  # no connection: there is nobody to ask
        await asker.locate(unknown[0], [knows])
        assert swarm.simulation.now == began

    play(body)


def test_a_members_address_is_told_again_and_as_its_own_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[PeerId, AddrSource]] = []
    add = SimHost.add_addrs

    def note(
        host: SimHost, peer: PeerId, addrs: Any, source: AddrSource = AddrSource.OWNER
    ) -> None:
        told.append((host.peer_id, source))
        add(host, peer, addrs, source)

    async def body(stage: Stage) -> None:
        told.clear()
        await stage.swarm.sleep(24)
        again = [source for host, source in told if host == stage.swarm.nodes["n1"].peer_id]
        assert len(again) >= 5  # before: never again
        assert set(again) == {AddrSource.SIGNED}

    monkeypatch.setattr(SimHost, "add_addrs", note)
    play(body)


def test_neighbours_are_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    protected: dict[PeerId, Sequence[PeerId]] = {}

    def note(host: SimHost, purpose: str, peers: Sequence[PeerId]) -> None:
        if purpose == "neighbours":
            protected[host.peer_id] = peers

    async def body(stage: Stage) -> None:
        for name, service in stage.services.items():
            peer = stage.swarm.nodes[name].peer_id
            assert set(protected[peer]) == set(service.neighbours)

    monkeypatch.setattr(SimHost, "protect", note)
    play(body)


def test_anchors_are_on_disk_and_bring_a_node_back_without_its_bootstrap() -> None:
    async def body(stage: Stage) -> None:
        swarm = stage.swarm
        await swarm.sleep(60)
        node = swarm.nodes["n3"]
        written = (await node.world.disk.read(ANCHORS_PATH)).decode().splitlines()
        assert 1 <= len(written) <= 2
        swarm.kill("n3")
        if str(swarm.nodes["n0"].addr) not in written:
            swarm.kill("n0")
        await swarm.sleep(20)
        swarm.restart("n3")
        await swarm.sleep(3)
        assert stage.services["n3"].neighbours

    play(body)
