"""A hand-out alone: which root is given which chunk, what is given again, who is demoted."""

from __future__ import annotations

import pytest

from p2p.identity import KeyPair, PeerId
from p2p.shardcast.core.handout import GiftEvent, GiftStage, HandOut
from p2p.shardcast.core.queue import Lines
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


def test_an_origin_with_a_busy_line_does_not_answer_for_what_it_is_about_to_give() -> None:
    """A hundred peers that came when the hand-out began asked for all of it, and kept the line
    from the roots for a minute."""
    handout = homes(500e3)
    give_all(handout, 0.0)
    last, by = 199, handout.forest.roster.peers[3]
    assert handout.ask(last, by, 0.1, lanes=7)
    assert not handout.ask(last, KEYS[40].peer_id, 0.1, lanes=7), "no stripe brings it that"
    assert not handout.ask(last, by, 0.1, lanes=1), "the line has room for it"
    assert handout.ask(last, by, 5.0, lanes=7), "the line is no less busy"
    assert not handout.ask(0, by, 0.1, lanes=7), "it was given: a stripe may have failed"


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


@pytest.mark.parametrize("event", GiftEvent)
def test_what_is_to_be_given_again_is_until_it_is_given(event: GiftEvent) -> None:
    ended, begun = event.value
    assert event is GiftEvent.GIVE or GiftStage.AGAIN not in ended
    assert event is not GiftEvent.GIVE or begun is GiftStage.GIVEN
