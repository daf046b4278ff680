"""Standing is earned by checked work, lost by one lie, and never taken by strangers."""

from __future__ import annotations

import json

import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId
from roles.protocol.core.standing import HALF_LIFE, MISSES_APART, MOST_EARNED, Standings
from roles.run.core.trust import TrustTerms, leak

TERMS = TrustTerms()
K, W = TERMS.probation, TERMS.window


def name(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


ANNA = name(1)


def proven(
    *names: PeerId, most: int = 100, now: float = 0.0, terms: TrustTerms = TERMS
) -> Standings:
    standings = Standings(terms, most=most)
    for one in names:
        standings.note_accepted(one, terms.probation, now)
    return standings


def test_a_newcomer_is_checked_whole_until_its_probation_is_in() -> None:
    standings = Standings(TERMS)
    for _ in range(K // W):
        assert not standings.is_proven(ANNA, 0.0)
        assert standings.share_of(ANNA, 0.0) == 1.0
        standings.note_accepted(ANNA, W, 0.0)
    assert standings.is_proven(ANNA, 0.0)
    assert standings.share_of(ANNA, 0.0) == TERMS.share


def test_one_lie_makes_a_newcomer_of_it() -> None:
    standings = proven(ANNA)
    standings.note_rejected(ANNA)
    standings.note_accepted(ANNA, K - 1, 0.0)
    assert not standings.is_proven(ANNA, 0.0)
    assert standings.share_of(ANNA, 0.0) == 1.0


def test_a_doubt_has_a_window_checked_whole_and_takes_nothing_else() -> None:
    standings = proven(ANNA)
    standings.note_doubt(ANNA)
    assert standings.is_proven(ANNA, 0.0)
    assert standings.share_of(ANNA, 0.0) == 1.0
    standings.note_accepted(ANNA, W, 0.0)
    assert standings.share_of(ANNA, 0.0) == TERMS.share


def test_one_window_left_out_is_forgiven_and_a_second_soon_after_is_not() -> None:
    """A worker that could leave out windows at will handed in its best ones."""
    for between, stands in ((MISSES_APART, True), (MISSES_APART - 1, False)):
        standings = proven(ANNA)
        assert standings.note_window(ANNA, 0, 0.0)
        assert standings.note_window(ANNA, 5, 0.0)  # 1 was due
        assert standings.is_proven(ANNA, 0.0)
        assert standings.share_of(ANNA, 0.0) == 1.0
        for number in range(6, 5 + between):
            standings.note_window(ANNA, number, 0.0)
        standings.note_window(ANNA, 1_000, 0.0)
        assert standings.is_proven(ANNA, 0.0) is stands


def test_a_slow_worker_that_says_so_leaves_nothing_out() -> None:
    standings = proven(ANNA)
    for number in range(0, 300, 3):
        standings.note_window(ANNA, number, 0.0, due=number + 3)
    assert standings.is_proven(ANNA, 0.0)
    assert standings.share_of(ANNA, 0.0) == TERMS.share


def test_no_window_counts_twice_and_no_miss_does() -> None:
    standings = proven(ANNA)
    standings.note_window(ANNA, 7, 0.0)
    assert not standings.note_window(ANNA, 7, 0.0)
    assert not standings.note_window(ANNA, 3, 0.0)
    for _ in range(3):
        standings.note_missed(ANNA, 8)
    assert standings.note_window(ANNA, 9, 0.0)
    assert standings.is_proven(ANNA, 0.0)


def test_standing_fades_with_silence_and_must_be_earned_anew() -> None:
    standings = proven(ANNA)
    assert standings.is_proven(ANNA, HALF_LIFE)
    assert not standings.is_proven(ANNA, 1.01 * HALF_LIFE)
    standings.note_accepted(ANNA, 1, 1.01 * HALF_LIFE)
    assert not standings.is_proven(ANNA, 1.01 * HALF_LIFE), "half is kept, not regained"
    standings.note_accepted(ANNA, 1_000 * K, 2 * HALF_LIFE)
    assert standings.earned(ANNA, 2 * HALF_LIFE) == MOST_EARNED * K
    assert not standings.is_proven(ANNA, 4.01 * HALF_LIFE), "a year's work fades as fast"


def test_strangers_do_not_push_out_who_works() -> None:
    """Whatever they earn: no more than as much as the least of those in standing."""
    workers = [name(number) for number in range(8)]
    standings = proven(*workers, most=8)
    for one in workers:
        standings.note_accepted(one, K, 0.0)
    for number in range(100, 110):
        standings.note_accepted(name(number), 10 * K, 0.0)
    assert all(standings.is_proven(one, 0.0) for one in workers)
    late = 0.5 * HALF_LIFE
    for one in workers[1:]:
        standings.note_accepted(one, K, late)
    standings.note_accepted(name(100), 10 * K, late)
    assert standings.is_proven(name(100), late), "one that pauses gives way"
    assert [standings.is_proven(one, late) for one in workers] == [False] + 7 * [True]


def test_refused_work_fills_no_table() -> None:
    standings = Standings(TERMS)
    for number in range(1_000):
        standings.note_rejected(name(number))
        standings.note_window(name(number), 1, 0.0)
        standings.note_missed(name(number), 2)
        standings.note_doubt(name(number))
    assert standings.to_list() == []


def test_standings_survive_a_restart() -> None:
    standings = proven(ANNA, now=5.0)
    standings.note_accepted(name(2), 3, 6.0)
    standings.note_window(ANNA, 4, 7.0)
    again = Standings(TERMS)
    again.restore(json.loads(json.dumps(standings.to_list())))
    assert again.to_list() == standings.to_list()
    assert again.is_proven(ANNA, 7.0)
    assert not again.is_proven(name(2), 7.0)
    damaged: list[object] = [None, [[]], [["x", True, 1, 1, 1, 1, 1, 1]]]
    damaged.append([[str(ANNA), True, 1e999, 1, 1, 1, 1, 1]])
    for rows in damaged:
        with pytest.raises(BadMessage):
            Standings(TERMS).restore(rows)


def test_the_leak_is_what_the_best_turncoat_gets_through() -> None:
    """The closed form against shared/reference/trust.md's simulation of 20,000 identities."""
    for share, window, lies, places, of_work in (
        (0.1, 8, 8, 6.1, 0.078),
        (0.1, 16, 16, 3.8, 0.045),
        (0.1, 16, 4, 7.7, 0.070),
        (0.1, 16, 1, 9.1, 0.040),
        (0.2, 16, 4, 2.8, 0.031),
    ):
        terms = TrustTerms(share=share, window=window)
        assert terms.slip(lies) == pytest.approx((places, of_work), rel=0.1), (
            share,
            window,
            lies,
        )
    assert TERMS.worth() == pytest.approx(19.6 - K - W, abs=0.1)
    assert TrustTerms(probation=1).worth() > 0 > TrustTerms(share=1.0).worth()
    assert 0.003 < leak(TERMS, 0.05) < 0.004
    assert leak(TrustTerms(share=1.0), 0.05) == 0
    assert leak(TERMS, 0.05, detection=0.5) > leak(TERMS, 0.05)
