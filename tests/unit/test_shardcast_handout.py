"""A hand-out alone: which root is given which chunk, what is given again, who is demoted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p.identity import KeyPair, PeerId
from p2p.shardcast.core.handout import GiftEvent, GiftStage, HandOut
from p2p.shardcast.core.queue import MAX_CREDIT, Lines
from p2p.shardcast.forest import Forest, Roster, RosterEntry, build_forest
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import Encoding, PolicyVersion
from p2p.wire import KI
from tests.shardcast_policies import index_of

KEYS = [KeyPair(digest_of(b"%d" % number)) for number in range(41)]


def forest_of(peers: int, upload: float = 1e6, epoch: int = 1) -> Forest:
    entries = [RosterEntry(pair.peer_id, upload) for pair in KEYS[1 : peers + 1]]
    return build_forest(Roster.sign(KEYS[0], b"run", epoch, entries), PolicyVersion(1))


def hand_out(forest: Forest, chunks: int = 200, lines: Lines | None = None) -> HandOut:
    anchored = Encoding.anchor(index_of([b"%d" % n for n in range(chunks)]), chunks * 64 * KI)
    return HandOut(PolicyVersion(1), anchored, forest, 0.0, 0.5, lines=lines or Lines())


def homes(upload: float, chunks: int = 200, peers: int = 7) -> HandOut:
    return hand_out(forest_of(peers, upload), chunks)


def give_all(handout: HandOut, now: float) -> dict[PeerId, list[int]]:
    """Give until no root has credit, and let all of it leave; returns what each root got."""
    given: dict[PeerId, list[int]] = {}
    while (step := handout.give(lambda _: True, now)) is not None:
        handout.note_left(step[0], now)
        given.setdefault(step[0], []).append(step[2])
    return given


def nobody_is_gone(_: PeerId) -> bool:
    return False


@pytest.mark.parametrize(
    "fail",
    [lambda handout, _: handout.expire(1.0), lambda handout, bad: handout.lose(bad)],
    ids=["times out", "is lost"],
)
def test_a_chunk_that_another_root_has_confirmed_is_not_given_a_third_time(
    fail: Callable[[HandOut, PeerId], None],
) -> None:
    """Five books knew parts of a chunk's fate: two chunks that were given again at 0.2 s and
    confirmed at 0.3 s were given once more when their first root failed later."""
    handout = homes(1.5e6, chunks=12, peers=6)
    given = give_all(handout, 0.0)
    bad, *good = handout.forest.roots
    assert given[bad] == [0, 6]
    for peer in good:
        assert handout.confirm(peer, 2, 99, 0.1)
    for chunk in given[bad]:
        assert not handout.ask(chunk, good[0], 0.2), "one may only be impatient"
        assert handout.ask(chunk, good[1], 0.2)
    again = give_all(handout, 0.2)
    assert sorted(chunk for chunks in again.values() for chunk in chunks) == [0, 6]
    assert bad not in again
    for peer, chunks in again.items():
        assert handout.confirm(peer, 2 + len(chunks), 99, 0.3)
    fail(handout, bad)
    assert give_all(handout, 1.0) == {}
    assert handout.exhausted


def test_a_root_that_lets_a_deadline_pass_gets_nothing_until_it_has_confirmed_all() -> None:
    handout = homes(5e6)
    given = give_all(handout, 0.0)
    slow, *quick = handout.forest.roots
    for peer in quick:
        handout.confirm(peer, len(given[peer]), 999, 0.4)
    handout.expire(0.5)
    again = give_all(handout, 0.5)
    assert set(given[slow]) <= {chunk for chunks in again.values() for chunk in chunks}
    assert slow not in again
    handout.confirm(slow, 1, 999, 0.6)
    assert handout.give(lambda peer: peer == slow, 0.6) is None
    handout.confirm(slow, len(given[slow]), 999, 0.7)
    assert handout.give(lambda peer: peer == slow, 0.7) is not None


def test_no_root_is_reported_while_its_children_are_still_being_dialled() -> None:
    """A hundred peers that pulled at once made three of their four roots lose their stripes."""
    handout = hand_out(forest_of(20, 5e6))
    given = give_all(handout, 0.0)
    for peer, chunks in given.items():
        assert handout.confirm(peer, len(chunks), 99, 0.05)
    root, by = handout.forest.roots[0], handout.forest.roster.peers[3]
    chunk = given[root][0]
    assert handout.suspect(chunk, by, 1.4) is None, "the first roster: all lines are new"
    assert handout.suspect(chunk, by, 1.9) == root
    handout.regroup(forest_of(20, 5e6, epoch=2), nobody_is_gone, 5.0)
    assert handout.suspect(chunk, by, 5.1) == root, "it brings no new peer"
    handout.regroup(forest_of(40, 5e6, epoch=3), nobody_is_gone, 6.0)
    assert handout.suspect(chunk, by, 7.4) is None
    assert handout.suspect(chunk, by, 7.9) == root
    assert handout.suspect(chunk, KEYS[40].peer_id, 9.0) is None, "it came later"


def test_a_root_that_claims_any_upload_is_not_given_all_chunks() -> None:
    """One that relays nothing wastes what it is given."""
    handout = homes(1e15, chunks=1000)
    assert {len(chunks) for chunks in give_all(handout, 0.0).values()} == {MAX_CREDIT}


def test_a_root_that_was_lost_is_fed_again_when_it_is_back_but_once() -> None:
    """One that came and went would leave chunks behind each time."""
    handout = homes(500e3)
    root = handout.forest.roots[3]

    def is_fed() -> bool:
        return handout.give(lambda peer: peer == root, 0.0) is not None

    assert is_fed()
    handout.lose(root)
    assert not is_fed()
    handout.admit(root)
    assert is_fed()
    assert handout.confirm(root, 9, 9, 1.0), "it may count what it got before"
    handout.lose(root)
    handout.admit(root)
    assert not is_fed()


def last_given_to_a_slow_root(handout: HandOut, granted: int) -> float:
    """Play a hand-out in which one root's word takes a second and that of all others a tenth;
    returns when it was last given a chunk. The others ask for ``granted`` chunks in all."""
    slow, *quick = handout.forest.roots
    counts, last, idle = dict.fromkeys(handout.forest.roots, 0), 0.0, 0
    for tenth in range(10_000):
        now = tenth / 10
        for peer in quick if tenth else ():
            handout.confirm(peer, counts[peer], granted, now)
        if tenth % 10 == 9:
            handout.confirm(slow, counts[slow], 999, now)
        idle += 1
        while (step := handout.give(lambda _: True, now)) is not None:
            handout.note_left(step[0], now)
            counts[step[0]] += 1
            idle = 0
            last = now if step[0] == slow else last
        if idle > 20:
            break
    assert sum(counts.values()) > 100
    return last


def test_a_slow_root_is_passed_over_when_it_would_be_the_last_to_confirm() -> None:
    """It had confirmed all that it owed, and so came first: all waited for its last chunk."""
    handout = homes(2.5e6, chunks=9000)
    last = last_given_to_a_slow_root(handout, 99_999)
    assert handout.exhausted
    assert 5.0 < last < handout.progress - 0.8, "its word takes a second"


def test_a_slow_root_gets_the_rest_if_no_other_asks_for_more() -> None:
    """Roots that confirm all at once and grant nothing make every honest one a slow one."""
    handout = homes(2.5e6, chunks=120)
    assert last_given_to_a_slow_root(handout, 18) == handout.progress
    assert handout.exhausted


@pytest.mark.parametrize("event", GiftEvent)
def test_what_is_to_be_given_again_is_until_it_is_given(event: GiftEvent) -> None:
    ended, begun = event.value
    assert event is GiftEvent.GIVE or GiftStage.AGAIN not in ended
    assert event is not GiftEvent.GIVE or begun is GiftStage.GIVEN
