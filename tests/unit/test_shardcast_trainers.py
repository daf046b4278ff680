"""Two trainers of one run: of their same version one is chosen, everywhere, and convicted ones
are told of to newcomers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from p2p.shardcast.core import events as ev
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.manifest import Manifest, PolicyVersion
from p2p.shardcast.messages import Evidence, Hello, PolicyNews
from p2p.wire import KI
from tests.unit.test_shardcast_core import RUN, Node, Policies, Swarm
from tests.unit.test_shardcast_service import Town

SIZE = 420_000


class TwoTrainers(Swarm):
    """Nodes 0 and 1 are trainers."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        trainers = {key.peer_id for key in self.keys[:2]}
        self.makers = [Policies(key) for key in self.keys[:2]]
        for node in self.nodes.values():
            node.core.statements._may_publish = trainers.__contains__

    @property
    def trainers(self) -> list[Node]:
        return list(self.nodes.values())[:2]

    def publish_by(self, number: int, version: int, seed: int = 0) -> Manifest:
        key, maker = self.keys[number], self.makers[number]
        manifest, index, wires = maker.make(version, SIZE, 32 * KI, seed=seed)
        for chunk, wire in enumerate(wires):
            self.trainers[number].chunks[manifest.digest, chunk] = wire
        entries = [RosterEntry(k.peer_id, 5e6) for k in self.keys if k is not key]
        roster = Roster.sign(key, RUN, version * 10 + seed + 1, entries)
        self.give(self.trainers[number], ev.Publish(manifest, index, roster))
        return manifest

    def newest(self) -> list[bytes]:
        return [node.core.newest.digest for node in self.nodes.values() if node.core.newest]


@pytest.mark.parametrize("delay", [0.0, 0.03, 5.0])
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_trainers_same_version_the_lower_digest_is_chosen_everywhere(
    delay: float, first: int
) -> None:
    """At once, in the middle of the hand-out, and when the other is everywhere already."""
    swarm = TwoTrainers(7)
    made = [swarm.publish_by(first, 1)]
    swarm.run(delay)
    made.append(swarm.publish_by(1 - first, 1))
    swarm.run(20)
    chosen = min(manifest.digest for manifest in made)
    assert swarm.newest() == [chosen] * 8
    names = {d.name for node in swarm.nodes.values() for d in node.core.downloads}
    assert names == {chosen}, "the loser's chunks are dropped"
    assert not any(
        isinstance(e, ev.Halt) for node in swarm.nodes.values() for e in node.effects
    )
    assert not any(
        isinstance(e, ev.Penalise) for node in swarm.nodes.values() for e in node.effects
    )


def test_after_such_a_tie_the_next_version_goes_on() -> None:
    swarm = TwoTrainers(5)
    swarm.publish_by(0, 1)
    swarm.publish_by(1, 1)
    swarm.run(10)
    after = [swarm.publish_by(number, 2 + number) for number in (0, 1)]
    swarm.run(20)
    assert swarm.newest() == [after[1].digest] * 6
    assert not any(
        isinstance(e, ev.Halt) for node in swarm.nodes.values() for e in node.effects
    )


def test_two_halves_that_chose_apart_agree_when_they_meet() -> None:
    swarm = TwoTrainers(2)
    one, other = (swarm.publish_by(number, 1) for number in (0, 1))
    low, high = sorted((one, other), key=lambda manifest: manifest.digest)
    holder = swarm.nodes[low.trainer]
    [answer] = [
        e.message
        for e in holder.core.handle(ev.Heard(high.trainer, Hello(1, high.digest)), 0.0)
        if isinstance(e, ev.Send) and isinstance(e.message, PolicyNews)
    ]
    assert answer.manifest == low.encode()
    knows = holder.core.handle(ev.Heard(swarm.peers[1].peer, Hello(1, low.digest)), 0.0)
    assert not any(isinstance(e, ev.Send) for e in knows)


def test_a_conviction_lets_the_other_trainer_s_version_in() -> None:
    """The one that was chosen was half here when its trainer was convicted."""
    swarm = TwoTrainers(5)
    made = [swarm.publish_by(number, 1) for number in (0, 1)]
    swarm.run(0.03)
    winner = min((0, 1), key=lambda number: made[number].digest)
    swarm.makers[winner].last = None
    other, index, _ = swarm.makers[winner].make(1, SIZE, 32 * KI, seed=9)
    news = PolicyNews(other.encode(), index.data)
    victim = swarm.peers[3]
    swarm.give(victim, ev.Heard(swarm.peers[2].peer, news))
    swarm.run(40)
    assert [e for e in victim.effects if isinstance(e, ev.Halt)]
    assert victim.core.newest is not None
    assert victim.core.newest.digest == made[1 - winner].digest


def test_a_newcomer_is_told_of_convictions_once_and_only_of_those_that_it_lacks() -> None:
    swarm = TwoTrainers(3)
    swarm.publish_by(0, 1)
    swarm.makers[0].last = None
    other, index, _ = swarm.makers[0].make(1, SIZE, 32 * KI, seed=1)
    node = swarm.peers[1]
    swarm.run(1)
    swarm.give(node, ev.Heard(swarm.peers[2].peer, PolicyNews(other.encode(), index.data)))
    newcomer = swarm.peers[2].peer

    def told(hello: Hello) -> list[Evidence]:
        effects = node.core.handle(ev.Heard(newcomer, hello), 100.0)
        return [
            e.message
            for e in effects
            if isinstance(e, ev.Send) and isinstance(e.message, Evidence)
        ]

    trainer = swarm.keys[0].peer_id
    assert told(Hello(1, bytes(32), (trainer,))) == []
    [evidence] = told(Hello(1))
    assert told(Hello(1)) == [], "once per connection"
    fresh = TwoTrainers(1).peers[0].core
    fresh.handle(ev.Heard(node.peer, evidence), 0.0)
    assert not fresh.statements.is_trusted(trainer)
    [hello] = [
        e.message
        for e in fresh.handle(ev.PeerUp(node.peer), 0.0)
        if isinstance(e, ev.Send) and isinstance(e.message, Hello)
    ]
    assert hello == Hello(-1, b"", (trainer,))


class TwoTrainerTown(Town):
    """Members 0 and 1 may publish."""

    def may_publish(self, peer: object) -> bool:
        return peer in {key.peer_id for key in self.keys[:2]}


async def test_a_tie_on_disk_one_copy_stays_and_readers_get_the_chosen_one(
    tmp_path: Path,
) -> None:
    """Two trainers that had not heard of each other meet, with a node that holds the loser."""
    town = TwoTrainerTown(tmp_path)
    made: list[Manifest] = []
    for number in (0, 1):
        async with town.member(number) as trainer:
            await trainer.world.disk.write("w", bytes([number]) * 420_000)
            made.append(await trainer.shardcast.publish(PolicyVersion(1), "w"))
    winner = min((0, 1), key=lambda number: made[number].digest)
    with trio.fail_after(30):
        async with town.member(1 - winner), town.member(2) as reader:
            await reader.shardcast.wait_policy(PolicyVersion(1))
            assert reader.shardcast.manifest(PolicyVersion(1)) == made[1 - winner]
            async with town.member(winner):
                while reader.shardcast.manifest(PolicyVersion(1)) != made[winner]:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                loser = made[1 - winner]
                assert reader.shardcast.was_signed(PolicyVersion(1), loser.weights_digest)
                assert reader.shardcast.held == (1,)
                while len(list((tmp_path / "2").glob("policies/*/*.safetensors"))) > 1:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                path = reader.shardcast.weights(PolicyVersion(1))
                data = await reader.world.disk.read(path)
                assert data == bytes([winner]) * 420_000
        # the loser's trainer still knows what it has signed
        async with town.member(1 - winner) as trainer:
            assert trainer.shardcast.signed == 1


def test_a_hello_of_the_same_version_by_an_old_node_tells_nothing() -> None:
    swarm = TwoTrainers(1)
    swarm.publish_by(0, 1)
    effects = swarm.trainers[0].core.handle(ev.Heard(swarm.peers[0].peer, Hello(1)), 0.0)
    assert not any(isinstance(e, ev.Send) for e in effects)
