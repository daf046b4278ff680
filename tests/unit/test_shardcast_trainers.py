"""One trainer leads a run: another one's same version changes nothing. Newcomers hear of
convictions."""

from __future__ import annotations

from p2p.shardcast.core import events as ev
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.manifest import Manifest
from p2p.wire import KI
from tests.unit.test_shardcast_core import RUN, Node, Policies, Swarm

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


def test_of_two_trainers_same_version_each_node_keeps_the_one_that_it_heard_of_first() -> None:
    """One trainer leads a run. A second one that signs a version convicts nobody, and takes
    nothing away from those that hold the first."""
    swarm = TwoTrainers(5)
    first = swarm.publish_by(0, 1)
    swarm.run(10)
    swarm.publish_by(1, 1)
    swarm.run(20)
    assert swarm.newest() == [first.digest] * 6
    for node in swarm.nodes.values():
        assert not any(isinstance(e, ev.Halt | ev.Penalise) for e in node.effects)
        assert [d.name for d in node.core.downloads if not d.is_whole] == []
