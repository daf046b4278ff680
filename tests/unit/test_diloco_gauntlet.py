"""Trials of updates: who tries whose, what counts as harm, and whom a majority names."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId
from roles.diloco.core import events as ev
from roles.diloco.core.gauntlet import (
    MOST_DOUBTED,
    PERSISTENT,
    Gauntlet,
    bounds,
    doubted,
    lot,
    oversized,
)
from roles.diloco.core.messages import (
    Doubled,
    Harm,
    HarmScores,
    Outcome,
    Plan,
    Record,
    decode_message_untrusted,
    encode_message,
)
from roles.diloco.core.round import RoundCore, genesis
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import CONFIG, GRID, RUN, digest

PEERS = sorted(peer_named(n) for n in range(5))
ME, LIAR = PEERS[1], PEERS[4]
BEFORE = genesis(RUN, PEERS)
HELP, HARM, UNCLEAR = (1.0, 1.1, 0.9), (-0.2, -0.21, -0.19), (-0.5, 0.6, -0.2)


def record_of(name: bytes, peers: list[PeerId] = PEERS) -> Record:
    plan = Plan(
        1, BEFORE.digest, tuple((one, digest(one.digest)) for one in peers), tuple(peers)
    )
    return Record(0, Outcome(plan, digest(name), digest(name)), ())


def test_every_update_is_tried_by_one_other_and_nobody_chooses_whom() -> None:
    tried_by: dict[PeerId, set[PeerId]] = {}
    for number in range(60):
        record = record_of(b"%d" % number)
        ring = {peer: lot(record, peer) for peer in PEERS}
        assert sorted(ring.values()) == PEERS
        assert all(peer != other for peer, other in ring.items())
        tried_by.setdefault(ring[ME], set()).add(ME)
        for peer, other in ring.items():
            tried_by.setdefault(other, set()).add(peer)
    assert all(tried_by[peer] == {*PEERS} - {peer} for peer in PEERS)
    assert lot(record_of(b"x", [ME]), ME) is None
    assert lot(record_of(b"x", PEERS[2:]), ME) is None  # it has no update to compare with


def test_harm_in_two_rounds_is_persistent_and_help_makes_good() -> None:
    made = Gauntlet()
    made.judge(ME, {ME: HELP, LIAR: HARM}, ())
    assert made.scores == {LIAR: 1.0}
    made.judge(ME, {ME: HELP, LIAR: HARM}, ())
    assert made.scores[LIAR] >= PERSISTENT
    made.judge(ME, {ME: HELP, LIAR: HELP}, ())
    assert 1.0 <= made.scores[LIAR] < 1.2  # help counts by its lower bound
    for _ in range(12):
        made.judge(ME, {ME: HELP}, ())
    assert made.scores == {}


def test_what_may_be_chance_or_everybodys_fault_does_not_count() -> None:
    made = Gauntlet()
    made.judge(ME, {ME: HELP, LIAR: UNCLEAR}, ())
    made.judge(ME, {ME: UNCLEAR, LIAR: HARM}, ())
    made.judge(ME, {ME: HARM, LIAR: HARM}, ())
    made.judge(ME, {LIAR: HARM}, ())
    made.judge(ME, {ME: HELP, LIAR: (float("nan"),) * 8}, ())
    made.judge(ME, {ME: HELP, LIAR: (-1.0,)}, ())
    assert made.scores == {}
    assert bounds(HARM)[1] < 0 < bounds(HELP)[0]


def test_an_update_far_too_large_is_harm_without_a_trial() -> None:
    norms = {peer: 1.0 + place / 10 for place, peer in enumerate(PEERS)}
    assert oversized(norms) == []
    assert oversized({**norms, LIAR: 1000.0}) == [LIAR]
    assert oversized(dict.fromkeys(PEERS[:3], 0.0) | {LIAR: 1.0}) == []
    made = Gauntlet()
    made.judge(ME, {ME: HELP, LIAR: HELP}, [LIAR])
    made.judge(ME, {}, [LIAR, ME])
    assert made.scores == {LIAR: PERSISTENT}


def test_an_honest_member_is_named_as_seldom_as_the_arithmetic_says() -> None:
    """One trial in ten is wrong, for all members alike: far more often than measured."""
    dice, named, rounds = Random(1), 0, 200_000
    made = Gauntlet()
    for _ in range(rounds):
        made.judge(ME, {ME: HELP, LIAR: HARM if dice.random() < 0.1 else HELP}, ())
        if made.scores.get(LIAR, 0.0) >= PERSISTENT:
            named += 1
            made.scores.clear()
    assert named / rounds < 0.1**2 * 1.1


# What a core makes of scores.


def said(author: PeerId, found: dict[PeerId, float], step: int = 1) -> HarmScores:
    made = HarmScores(step, 0, tuple(sorted(found.items())), author=author)
    return made.signed(RUN, FakeSigner(author))


def core() -> RoundCore:
    return RoundCore(
        FakeSigner(ME), CONFIG, GRID, run=RUN, records=[BEFORE], held=0, kept=None,
        verify=fake_verify, may_join=lambda peer: peer in PEERS, anchor=None, now=0.0,
    )  # fmt: skip


def test_a_majority_names_and_a_minority_does_not() -> None:
    made = core()
    for peer in PEERS[2:4]:
        made.handle(ev.Received(peer, said(peer, {LIAR: 3.0, PEERS[0]: 1.0})), 1.0)
    made.handle(ev.Received(PEERS[0], said(PEERS[0], {LIAR: 1.9})), 1.0)
    assert not made.convicted
    stranger = peer_named(9)
    made.handle(ev.Received(stranger, said(stranger, {LIAR: 3.0})), 1.0)
    assert not made.convicted
    made.handle(ev.Received(PEERS[0], said(PEERS[0], {LIAR: 2.0})), 1.0)
    assert set(made.convicted) == {LIAR}
    fault = made.convicted[LIAR]
    assert decode_message_untrusted(encode_message(fault)) == fault
    other = core()
    effects = other.handle(ev.Received(PEERS[0], fault), 1.0)
    assert ev.Convict(fault) in effects


TOLD = tuple(said(peer, {LIAR: 2.0}) for peer in (PEERS[0], *PEERS[2:4]))


@pytest.mark.parametrize(
    "told",
    [
        (),
        TOLD[:2],
        (*TOLD[:2], said(PEERS[3], {LIAR: 1.5})),
        (*TOLD[:2], said(PEERS[3], {PEERS[2]: 5.0})),
        (*TOLD[:2], said(peer_named(9), {LIAR: 2.0})),
        (*TOLD[:2], replace(TOLD[2], signature=bytes(64))),
        (*TOLD[:2], said(PEERS[3], {LIAR: 2.0}, step=0)),
        (*TOLD[:2], said(PEERS[3], {LIAR: 2.0}, step=9)),
        tuple(said(peer, {LIAR: 2.0}, step=2**40) for peer in PEERS[:3]),
    ],
)
def test_evidence_of_harm_without_a_majority_of_its_time_proves_nothing(
    told: tuple[HarmScores, ...],
) -> None:
    made = core()
    steps = {one.step for one in told}
    made.handle(ev.Received(PEERS[0], Harm(LIAR, told)), 1.0)
    assert (LIAR in made.convicted) == (steps == {0, 1} and len(told) == 3)
    made.handle(ev.Received(PEERS[0], Harm(LIAR, TOLD)), 1.0)
    assert LIAR in made.convicted


def test_scores_may_be_said_again_and_their_forgers_are_found() -> None:
    one, other = said(LIAR, {ME: 1.0}), said(LIAR, {ME: 2.0})
    with pytest.raises(BadMessage, match="may be made again"):
        decode_message_untrusted(encode_message(Doubled(one, other)))
    made = core()
    made.handle(ev.Received(LIAR, one), 1.0)
    made.handle(ev.Received(LIAR, other), 1.0)
    assert not made.convicted
    assert made.scores[LIAR] == other
    with pytest.raises(BadMessage, match="not signed"):
        made.handle(ev.Received(LIAR, replace(one, signature=bytes(64))), 1.0)


def test_who_doubts_everybody_costs_no_more_than_two_trials() -> None:
    flood = said(LIAR, {peer_named(n): 9.0 for n in range(30)})
    assert len(doubted([flood])) == MOST_DOUBTED
    two = [said(peer, {LIAR: 1.0}) for peer in PEERS[:2]]
    assert doubted([flood, *two])[0] == LIAR


@pytest.mark.parametrize("odd", [1.7e308, -1.7e308, math.inf, math.nan])
def test_a_gain_beyond_all_reason_says_nothing(odd: float) -> None:
    """Two finite ones overflowed in their sum, and ended the member that had measured them."""
    assert bounds([0.1, odd, odd, 0.1]) == (-math.inf, math.inf)
