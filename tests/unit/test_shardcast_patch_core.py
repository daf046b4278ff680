"""Swarms of cores on a heap that pass patches on: who takes what, and what if it is gone."""

from __future__ import annotations

from random import Random

import pytest

from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.core import events as ev
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.wire import KI, MIB
from tests.shardcast_policies import pack_policy
from tests.sweeps import swept
from tests.unit.test_shardcast_core import RUN, Node, Swarm, bound

POLICY = 16 * MIB
PATCH = 320 * KI


def v(number: int) -> PolicyVersion:
    return PolicyVersion(number)


class PatchingSwarm(Swarm):
    """Drivers make of a patch and its base what it leads to, but for the spans in ``wrong``."""

    wrong: ChunkSet = ChunkSet.of([])
    fails = False

    def publish_on(self, version: int, size: int = 0) -> Manifest:
        """A version with a patch of so many bytes on the one before."""
        rng, before = Random(version), self.policies.last
        index, wires = pack_policy(rng.randbytes(POLICY), 128 * KI)
        patches = [pack_policy(rng.randbytes(size), 32 * KI)] if size else []
        manifest = self.policies.last = Manifest(
            self.trainer.peer_id,
            RUN,
            v(version),
            before.version if before else NO_POLICY,
            before.digest if before else b"",
            index.digest,
            POLICY,
            (
                Encoding.anchor(index, sum(map(len, wires))),
                *(Encoding.patch(patch, v(version - 1)) for patch, _ in patches),
            ),
        ).sign(self.trainer)
        for name, chunks in [
            (manifest.digest, wires),
            *((patch.digest, chunks) for patch, chunks in patches),
        ]:
            self.origin.chunks |= {(name, number): wire for number, wire in enumerate(chunks)}
        self.indexes[manifest.digest] = index
        patch = patches[0][0] if patches else None
        self.give(self.origin, ev.Publish(manifest, index, self.roster, patch))
        self.roster = None
        return manifest

    def _apply(self, node: Node, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Patch):
            self.at(self.now + 0.01, lambda: self._make(node, effect.patch))
        elif isinstance(effect, ev.Finish) and effect.policy not in self.indexes:
            self.at(self.now + 0.002, lambda: self.give(node, ev.Stored(effect.policy)))
        else:
            super()._apply(node, effect)

    def _make(self, node: Node, patch: bytes) -> None:
        if self.fails:
            self.give(node, ev.Patched(patch))
            return
        (download,) = [d for d in node.core.downloads if d.name == patch]
        policy = download.manifest.digest
        index = self.indexes[policy]
        right = ChunkSet.below(len(index)) - self.wrong
        for number in right:
            node.chunks[policy, number] = self.origin.chunks[policy, number]
        self.give(node, ev.Patched(patch, index, right))


def came(node: Node) -> int:
    return node.core.stats.from_origin + node.core.stats.from_peers


def brought_up(count: int, **options: object) -> PatchingSwarm:
    """A swarm in which everyone holds version 1."""
    swarm = PatchingSwarm(count, **options)  # type: ignore[arg-type]
    swarm.publish_on(1)
    swarm.run(100)
    assert all(1 in node.whole for node in swarm.peers if node.alive)
    return swarm


@pytest.mark.parametrize("count", swept([1, 8, 20], 2))
def test_an_update_takes_the_time_of_its_patch(count: int) -> None:
    swarm = brought_up(count)
    sent, before = swarm.origin.sent, [came(node) for node in swarm.peers]
    start = swarm.now
    manifest = swarm.publish_on(2, PATCH)
    swarm.run(swarm.now + 30)
    assert swarm.time_to_all(2) - start <= 0.25 + 3 * bound(PATCH, swarm)
    assert swarm.origin.sent - sent <= 1.2 * PATCH
    for node, count_before in zip(swarm.peers, before, strict=True):
        assert came(node) - count_before <= manifest.patches[0].wire + 100


def test_wrong_spans_are_pulled_from_the_anchor() -> None:
    swarm = brought_up(8)
    before = [came(node) for node in swarm.peers]
    swarm.wrong = ChunkSet.of([3, 4, 77])
    swarm.publish_on(2, PATCH)
    swarm.run(swarm.now + 30)
    for node, count in zip(swarm.peers, before, strict=True):
        assert 2 in node.whole
        assert came(node) - count <= 1.1 * PATCH + 3 * 129 * KI


def straggler(swarm: PatchingSwarm) -> Node:
    """A node that was away while versions 2 and 3 came."""
    node = swarm.peers[-1]
    node.alive = False
    swarm.publish_on(2, PATCH)
    swarm.run(swarm.now + 10)
    swarm.publish_on(3, PATCH)
    swarm.run(swarm.now + 10)
    return node


def back(swarm: PatchingSwarm, node: Node) -> int:
    before = came(node)
    node.alive = True
    for other in [swarm.origin, *swarm.peers]:
        if other is not node:
            swarm.give(node, ev.PeerDown(other.peer))
            swarm.give(other, ev.PeerDown(node.peer))
            swarm.give(node, ev.PeerUp(other.peer))
            swarm.give(other, ev.PeerUp(node.peer))
    swarm.run(swarm.now + 60)
    return came(node) - before


def test_who_was_away_hears_of_the_versions_between() -> None:
    swarm = brought_up(5)
    node = straggler(swarm)
    took = back(swarm, node)
    assert 3 in node.whole
    assert took <= 1.1 * (2 * PATCH)


def test_a_patch_that_no_peer_has_any_more_is_gone_round() -> None:
    swarm = brought_up(5)
    node = straggler(swarm)
    (gone,) = swarm.policies.last.patches
    swarm.publish_on(4, PATCH)
    swarm.run(swarm.now + 10)
    for other in [swarm.origin, *swarm.peers]:
        if other is not node:
            swarm.give(other, ev.Unusable(gone.index))
    took = back(swarm, node)
    assert 4 in node.whole
    assert took <= 1.05 * (POLICY + 2 * PATCH)
