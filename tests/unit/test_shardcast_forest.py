"""The laws of the forest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId, verify
from p2p.shardcast.forest import (
    FOREST_RULE,
    MESH,
    Forest,
    OtherForestRule,
    Roster,
    RosterEntry,
    build_forest,
    decode_roster_untrusted,
)
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import PROTOCOL_ID, PolicyVersion
from p2p.wire import pack

ORIGIN = KeyPair(digest_of(b"origin"))
PEERS = [KeyPair(digest_of(b"peer %d" % number)).peer_id for number in range(300)]
UPLOADS = st.sampled_from([0.0, 50e3, 1e6, 1e6, 5e6, 40e6])


def roster_of(uploads: list[float], epoch: int = 1) -> Roster:
    entries = [RosterEntry(peer, upload) for peer, upload in zip(PEERS, uploads, strict=False)]
    return Roster.sign(ORIGIN, b"run", epoch, entries)


def reached(forest: Forest, number: int, gone: frozenset[PeerId] = frozenset()) -> list[PeerId]:
    root = forest.roots[number]
    found, waiting = [root], [root]
    while waiting:
        children = forest.children(number, waiting.pop(), gone.__contains__)
        found += children
        waiting += children
    return found


@given(st.lists(UPLOADS, min_size=1, max_size=120), st.integers(0, 10**6))
def test_each_stripe_spans_all_and_each_peer_is_interior_once(
    uploads: list[float], version: int
) -> None:
    forest = build_forest(roster_of(uploads), PolicyVersion(version))
    interior: list[int] = []
    for number, stripe in enumerate(forest.stripes):
        assert sorted(reached(forest, number)) == sorted(forest.roster.peers)
        for place, children in stripe.children.items():
            assert len(children) <= stripe.slots[place]
            assert all(stripe.parent[child] == place for child in children)
        interior += stripe.children
        deepest = max(stripe.depth(place) for place in range(len(uploads)))
        assert deepest <= (2 if len(uploads) <= MESH else 2 + math.log2(len(uploads)))
    assert len(interior) == len(set(interior))


@pytest.mark.parametrize(
    ("count", "stripes"), [(1, 1), (8, 8), (16, 16), (17, 4), (128, 4), (129, 8), (300, 8)]
)
def test_stripes_and_fan_out_of_equals(count: int, stripes: int) -> None:
    forest = build_forest(roster_of([1e6] * count), PolicyVersion(1))
    assert len(forest.stripes) == stripes
    if count > MESH:
        assert max(max(stripe.slots.values()) for stripe in forest.stripes) <= stripes + 2
        depth = max(s.depth(place) for s in forest.stripes for place in range(count))
        assert depth <= 2 + math.ceil(math.log(count, stripes))


@pytest.mark.parametrize(("idle", "fives"), [(1, 3), (2, 6), (3, 9)])
def test_a_share_over_a_whole_number_does_not_give_every_relay_a_child_more(
    idle: int, fives: int
) -> None:
    forest = build_forest(roster_of([0.0] * idle + [1e6] * (40 - idle)), PolicyVersion(1))
    fan_outs = [len(below) for s in forest.stripes for below in s.children.values()]
    assert len(fan_outs) == 40 - idle
    assert max(fan_outs) <= 5
    assert fan_outs.count(5) == fives


@given(st.integers(50, 300), st.randoms(use_true_random=False))
def test_with_two_in_a_hundred_dead_every_living_peer_is_still_reached(
    count: int, random
) -> None:
    forest = build_forest(roster_of([1e6] * count), PolicyVersion(1))
    gone = frozenset(random.sample(forest.roster.peers, count // 50))
    alive = [number for number, root in enumerate(forest.roots) if root not in gone]
    assert alive
    for number in alive:
        assert set(reached(forest, number, gone)) == set(forest.roster.peers) - gone


@given(st.integers(1, 300))
def test_neighbours_are_few_mutual_and_connected(count: int) -> None:
    roster = roster_of([1e6] * count)
    table = {peer: roster.neighbours(peer) for peer in roster.peers}
    assert all(len(table[peer]) <= (MESH - 1 if count <= MESH else 8) for peer in table)
    assert all(peer in table[other] for peer in table for other in table[peer])
    seen, waiting = {roster.peers[0]}, [roster.peers[0]]
    while waiting:
        news = [peer for peer in table[waiting.pop()] if peer not in seen]
        seen.update(news)
        waiting += news
    assert len(seen) == count
    assert roster.neighbours(ORIGIN.peer_id) == ()


@given(st.lists(st.sampled_from([0.0, 1e5, 1e6, 16e6]), min_size=1, max_size=200))
def test_feeders_are_the_parents_and_for_the_dead_those_above(uploads: list[float]) -> None:
    forest = build_forest(roster_of(uploads), PolicyVersion(1))
    peers = forest.roster.peers
    for place, peer in enumerate(peers):
        parents = {stripe.parent[place] for stripe in forest.stripes} - {-1}
        assert set(forest.parents(peer, lambda _: False)) == {
            peers[parent] for parent in parents
        }
        assert all(
            forest.relays(n, peer) == (place in s.children)
            for n, s in enumerate(forest.stripes)
        )
        dead = {peers[parent] for parent in parents}
        above = forest.parents(peer, dead.__contains__)
        assert not dead & set(above)
        assert all(
            any(forest.is_above(n, other, peer) for n in range(len(forest.stripes)))
            for other in above
        )
    assert forest.parents(ORIGIN.peer_id, lambda _: False) == ()


def test_rosters_survive_the_wire_and_refuse_what_is_wrong() -> None:
    roster = roster_of([1e6] * 5)
    decoded = decode_roster_untrusted(roster.encode(), b"run", verify)
    assert decoded == roster
    assert decoded.peers == roster.peers
    with pytest.raises(BadMessage, match="another run"):
        decode_roster_untrusted(roster.encode(), b"other", verify)
    forged = Roster.sign(ORIGIN, b"run", 2, [RosterEntry(PEERS[0])])
    with pytest.raises(BadMessage, match="signature"):
        decode_roster_untrusted(forged.encode()[:-1] + b"\0", b"run", lambda *_: False)


@given(st.integers(3, 60), st.integers(0, 10**6))
def test_only_open_peers_feed_those_that_can_punch_with_nobody(count: int, seed: int) -> None:
    """A third is open, a third punches, a third does neither, as far as slots go round."""
    entries = [
        RosterEntry(peer, 0.0 if number % 3 == 2 else 1e6, number % 3 != 0)
        for number, peer in enumerate(PEERS[:count])
    ]
    signed = Roster.sign(ORIGIN, b"run", 1, entries)
    roster = decode_roster_untrusted(signed.encode(), b"run", verify)
    assert (roster.classes, roster.closed) == (signed.classes, signed.closed)
    kind = [PEERS.index(peer) % 3 for peer in roster.peers]
    forest = build_forest(roster, PolicyVersion(seed))
    for number, stripe in enumerate(forest.stripes):
        assert sorted(reached(forest, number)) == sorted(roster.peers)
        room = sum(stripe.slots.get(place, 0) for place in range(count) if kind[place] == 0)
        fed = [kind[stripe.parent[place]] for place in range(count) if kind[place] == 2]
        assert 2 not in fed
        assert fed.count(0) >= min(len(fed), room - sum(k == 0 for k in kind))


@pytest.mark.parametrize("rule", [0, 1, FOREST_RULE + 1, 10**6])
def test_a_roster_for_another_rule_of_the_forest_is_refused_before_its_layout_is_read(
    rule: int,
) -> None:
    """The rule changed under one protocol id: nodes of two versions built two forests, and each
    half waited for pushes from the other."""
    content = pack([rule, "laid out otherwise"])
    signed = pack([content, ORIGIN.sign(PROTOCOL_ID, content)])
    with pytest.raises(OtherForestRule, match=f"forest rule {rule} and this node follows rule"):
        decode_roster_untrusted(signed, b"run", verify)
