"""Receipts, claims of upload, and what honest peers are not blamed for.

The scenarios `black_hole`, `black_hole_roots`, `boaster`, `overclaim`, `slander`, `after_push`,
`crowd` and `late_joiners` play whole swarms with liars and latecomers.
"""

from __future__ import annotations

import pytest

from p2p.identity import verify
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.receipts import Capacities, ReceiptBook, note_pushed, receipt_of
from p2p.shardcast.core.statements import MAX_MANIFESTS, Statements
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import PolicyVersion
from p2p.shardcast.messages import ChunkHeader, Receipt
from p2p.wire import KI, MIB
from sim.workloads.soak import limit_of, walk
from tests.unit.shardcast_liars import LiarSwarm
from tests.unit.test_shardcast_core import MBIT, RUN, Policies, key


def test_every_relay_dials_its_children_when_a_version_is_announced() -> None:
    """Each hop dialled when its first chunk came, one after the other. The chunks of
    60 honest peers were so late that all four roots were taken for liars."""
    swarm = LiarSwarm(60)
    roster = swarm.roster
    assert roster is not None
    swarm.gossip_delay = swarm.latency  # sooner than a chunk
    swarm.publish(1, 4 * MIB, 64 * KI)
    swarm.run(swarm.gossip_delay)
    forest = build_forest(roster, PolicyVersion(1))
    for node in swarm.peers:
        fed = {
            child
            for stripe in range(len(forest.stripes))
            for child in forest.children(stripe, node.peer, lambda _: False)
        }
        assert {one.peer for one in node.effects if isinstance(one, ev.Connect)} == fed
        assert not node.core.stats.from_peers, "no relay has had anything to pass on"


def test_claims_count_for_four_times_the_median_at_most() -> None:
    peers = [key(n).peer_id for n in range(1, 6)]
    entries = [RosterEntry(peer, 1e6) for peer in peers[:4]] + [RosterEntry(peers[4], 1e12)]
    capacities = Capacities()
    assert [entry.upload for entry in capacities.believe(entries)] == [1e6] * 4 + [4e6]
    capacities.note_carried(peers[4], [1.5e6, 1.4e6, 9e9], 1.5e6)
    assert capacities.believe(entries)[4].upload == 1.5e6
    capacities.note_carried(peers[4], [1.5e6], None)
    assert capacities.believe(entries)[4].upload == 1.25 * 1.5e6
    capacities.note_demoted(peers[0])
    assert capacities.believe(entries)[0].upload == 0
    for _ in range(8):
        capacities.note_version()
    assert capacities.believe(entries)[0].upload == 1e6


def test_receipts_tell_who_is_overloaded_and_its_children_are_not_blamed() -> None:
    entries = [RosterEntry(key(n).peer_id, 5e6) for n in range(1, 41)]
    roster = Roster.sign(key(0), RUN, 1, entries)
    forest = build_forest(roster, PolicyVersion(1))
    stripe = forest.stripes[0]
    lazy = next(p for p in stripe.children if p != stripe.root and len(stripe.children[p]) > 1)
    below = {p for p in range(40) if lazy in stripe.ancestors(p)}
    book = ReceiptBook(64 * KI)
    for place, peer in enumerate(roster.peers):
        got = 5 if place in below else 20
        book.note(peer, Receipt(b"", 1000, ((1, 0, got),)))
        book.note(peer, Receipt(b"", 1, ((1, 0, 20),)))  # its first one counts
    verdicts = {c.peer: c for c in book.judge({1: forest}, {(1, 0): 20})}
    overloaded = {peer for peer, carried in verdicts.items() if carried.limit is not None}
    assert overloaded == {roster.peers[lazy]}
    slots = len(stripe.children[lazy])
    assert set(verdicts[roster.peers[lazy]].rates) == {5 * 64 * KI * slots}


def test_a_receipt_counts_stripes_and_is_given_by_members_only() -> None:
    member = key(1).peer_id
    manifest, _, _ = Policies(key(0)).make(1, 192, 64)
    roster = Roster.sign(key(0), RUN, 1, [RosterEntry(member, 5e6)])
    download = Download(manifest, 0.0, 0.5)
    assert receipt_of(download, member, roster, 0.0) is None
    for second in range(3):
        header = ChunkHeader(manifest.digest, second, 1, second % 2)
        download.accept(second, key(3).peer_id, float(second), pushed=True)
        note_pushed(download, header)
    rows = ((1, 0, 2), (1, 1, 1))
    assert receipt_of(download, member, roster, 2.0) == Receipt(manifest.digest, 2000, rows)
    assert receipt_of(download, key(2).peer_id, roster, 2.0) is None


@pytest.mark.deep
def test_pulls_that_are_answered_slowly_do_not_teach_patience_with_black_holes() -> None:
    """A pull that took 1.5 s made each chunk that was held elsewhere wait for 3 s more."""
    took = []
    for holes in ((1, 2), (3, 5), (2, 7), (4, 6)):
        swarm = LiarSwarm(7, up=lambda n: (4 if n else 16) * MBIT, holes=holes, drip=1.5)
        swarm.publish(1, 4 * MIB, 64 * KI)
        swarm.run(60)
        took.append(sorted(node.whole[1] for node in swarm.honest)[2])
    assert sum(took) / len(took) <= 13.5


def test_of_each_trainer_the_newest_manifests_are_remembered() -> None:
    """A soak of three days saw this table grow from 4 to 9 entries, one with each policy; its
    type says where that ends."""
    policies = Policies(key(1))
    statements = Statements(RUN, lambda _: True, verify)
    for version in range(1, MAX_MANIFESTS + 9):
        manifest, _, _ = policies.make(version, 64, 64)
        assert statements.record(manifest) is None
    versions = [manifest.version for manifest in statements.manifests(key(1).peer_id)]
    assert versions == list(range(9, MAX_MANIFESTS + 9))
    late, _, _ = policies.make(8, 64, 64)
    statements.record(late)  # of two version 8: a contradiction, and older than all that stay
    assert len(statements.manifests(key(1).peer_id)) == MAX_MANIFESTS
    tables = dict(walk("statements", statements, set()))
    assert limit_of(tables["statements._by_version[]"]) == MAX_MANIFESTS + 1
