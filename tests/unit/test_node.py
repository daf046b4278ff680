"""The composition root: nodes in one process, over memory, with every service real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.errors import ConfigError
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.membership import Membership, MembershipConfig
from p2p.membership.heartbeat import PROTOCOL_ID
from p2p.multiaddr import Multiaddr
from p2p.node.admission import Capability
from p2p.node.cli import _parse, _report_run
from p2p.node.node import Node
from p2p.node.rundoc import RunConfig
from p2p.shardcast import NO_POLICY, PolicyVersion
from p2p.swarm.swarm import SwarmHost, open_host
from p2p.transport.memory import MemoryNetwork
from roles.contract.core.file import sign_run
from tests.support.nodes import CONFIG, WEIGHTS, member, swarm, wait_members
from tests.support.runs import OWNER, RUN, TERMS, TRAINER, VALIDATOR


async def test_nodes_with_one_address_get_the_run_and_each_other(tmp_path: Path) -> None:
    async with swarm(tmp_path, VALIDATOR, KeyPair(b"w" * 32)) as nodes:
        for node in nodes:
            assert node.run == RUN
            assert node.may(TRAINER.peer_id, Capability.PUBLISH)
            assert (
                tmp_path / str(nodes.index(node)) / "run.shoal"
            ).read_bytes() == RUN.document
        assert await nodes[1].locate(nodes[2].peer_id)
        assert not await nodes[1].locate(OWNER.peer_id)


async def test_officers_of_a_later_epoch_get_heartbeats_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An officer that is no neighbour, and not even running, is beaten to as soon as an edition
    names it.
    """
    worker, late = KeyPair(b"w" * 32), KeyPair(b"l" * 32)
    told: dict[PeerId, trio.Event] = {key.peer_id: trio.Event() for key in (TRAINER, worker)}
    send = SwarmHost.send

    def spied(host: SwarmHost, peer: PeerId, protocol: ProtocolId, message: bytes) -> bool:
        if peer == late.peer_id and protocol == PROTOCOL_ID:
            told[host.peer_id].set()
        return send(host, peer, protocol, message)

    monkeypatch.setattr(SwarmHost, "send", spied)
    config = replace(CONFIG, membership=MembershipConfig(interval=0.1))
    async with swarm(tmp_path, worker, config=config) as nodes:
        await nodes[0].world.sleep(0.2)
        assert not any(event.is_set() for event in told.values())
        audience = [node.membership._core._members.has_audience for node in nodes]
        assert audience == [True, False]  # of the first epoch, the trainer is an officer
        later = replace(TERMS, epoch=2, validators=(late.peer_id, worker.peer_id))
        for node in nodes:
            assert await node.book.offer(sign_run(later, OWNER).document)
        with trio.fail_after(60):
            for event in told.values():
                await event.wait()
        assert all(node.membership._core._members.has_audience for node in nodes)


async def test_a_policy_reaches_every_node_and_its_heartbeat(tmp_path: Path) -> None:
    async with swarm(tmp_path, VALIDATOR, KeyPair(b"w" * 32)) as nodes:
        trainer, *others = nodes
        assert [node.shardcast.newest for node in nodes] == [NO_POLICY] * 3
        await trainer.world.disk.write("weights", WEIGHTS)
        await trainer.shardcast.publish(PolicyVersion(0), "weights")
        with trio.fail_after(30):
            for node in others:
                assert await node.shardcast.wait_policy(PolicyVersion(0)) == 0
                path = node.shardcast.weights(PolicyVersion(0))
                assert await node.world.disk.read(path) == WEIGHTS
            for member in others:
                await wait_policy_heartbeat(trainer, member)
        assert trainer.health()["shardcast"]["newest"] == 0  # type: ignore[index]


async def wait_policy_heartbeat(node: Node, other: Node) -> None:
    changed = trio.Event()
    node.membership.on_change(lambda _: changed.set())
    while not any(m.peer == other.peer_id and m.policy == 0 for m in node.membership.members()):
        await changed.wait()
        changed = trio.Event()


async def test_what_the_run_demands_overrides_what_the_machine_says(tmp_path: Path) -> None:
    terms = replace(TERMS, delivery=replace(TERMS.delivery, chunk_bytes=8192))
    run = sign_run(terms, OWNER)
    async with member(MemoryNetwork(), tmp_path, TRAINER, document=run.document) as node:
        assert node.config.shardcast.chunk_bytes == 8192
        assert node.config.shardcast.folder == "store"


async def test_the_dht_is_a_second_way_to_find_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats lead nowhere from the bootstrap address: the run's records in the DHT do."""
    real = Membership.join
    network = MemoryNetwork()
    config = replace(CONFIG, run=RunConfig(refresh=0.05))

    async def join(self: Membership, addrs: Sequence[Multiaddr]) -> None:
        if addrs:  # the first node has nobody to join
            joins.append(tuple(addrs))
            if len(joins) == 1:
                await trio.sleep_forever()
            await real(self, addrs)

    joins: list[tuple[Multiaddr, ...]] = []
    with trio.fail_after(30):
        async with member(network, tmp_path / "0", TRAINER, document=RUN.document) as first:
            monkeypatch.setattr(Membership, "join", join)
            addrs = first.host.addrs
            async with member(
                network, tmp_path / "1", VALIDATOR, bootstrap=addrs, config=config
            ) as second:
                await wait_members(second, 1)
                # A busy machine asks the DHT more than once before the heartbeat comes.
                assert joins[:2] == [addrs, addrs]
                assert second.membership.members()[0].peer == first.peer_id


async def test_without_run_and_peers_the_remedy_is_named(tmp_path: Path) -> None:
    knows_none = "knows no run: give it --run FILE, or --bootstrap ADDR"
    with pytest.raises(ConfigError, match=knows_none):
        async with member(MemoryNetwork(), tmp_path, TRAINER):
            pass


async def test_a_node_that_listens_nowhere_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _parse(["--data", str(tmp_path)])
    async with open_host(network=MemoryNetwork(), key=KeyPair(b"q" * 32), listen=[]) as host:
        _report_run(options, RUN, host, has_run=True)
    assert "listens nowhere" in capsys.readouterr().out
