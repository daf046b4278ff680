"""The parts of SHARDCAST's core, each alone: what they wait for, count and forget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from p2p.identity import KeyPair
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.core.download import MAX_HOLDERS, Availability, LateChunks, Request
from p2p.shardcast.core.pace import SLOW_LINK, ChunkPace, Patience, SmoothedAverage
from p2p.shardcast.core.queue import CREDIT, MAX_CREDIT, UNKNOWN_ROUND_TRIP, Line, SendQueue
from p2p.shardcast.core.repair import Source
from p2p.shardcast.core.upload import MAX_INDEXES, SPARE_ANSWERS, Allowance
from p2p.shardcast.index import digest_of
from p2p.shardcast.messages import ChunkHeader
from p2p.wire import KI

ANN, BOB = (KeyPair(digest_of(name)).peer_id for name in (b"ann", b"bob"))
POLICY = bytes(32)


def test_an_average_is_where_its_paragraph_says() -> None:
    average = SmoothedAverage(0.1)
    seen = []
    for _ in range(4):
        average.observe(0.4)
        seen.append(round(average.value, 3))
    assert seen == [0.175, 0.231, 0.273, 0.305]


def test_a_steady_line_is_late_sooner_than_an_uneven_one() -> None:
    steady, uneven = Patience(), Patience()
    for number in range(40):
        steady.observe(0.3)
        uneven.observe(0.2 if number % 2 else 0.4)
    assert steady.wait() == pytest.approx(0.3, rel=0.01)
    assert 0.6 < uneven.wait() < 0.8
    uneven.reset(1.0)
    assert uneven.wait() == pytest.approx(3.0)


def test_patience_has_a_floor_and_a_ceiling() -> None:
    quick, slow = Patience(0.01, 0.5, 2.0), Patience(9.0, 0.5, 2.0)
    assert (quick.wait(), slow.wait()) == (0.5, 2.0)
    assert slow.wait(floor=3.0) == 3.0, "what the asker needs at least"
    unknown = Patience(0.0, 0.5)
    unknown.observe(4.0)
    assert unknown.wait() == pytest.approx(12.0), "the first sample counts, give or take a half"


def test_a_round_trip_falls_at_once_and_rises_slowly() -> None:
    line = Line()
    assert line.round_trip == UNKNOWN_ROUND_TRIP
    line.note_round_trip(0.5)
    line.note_round_trip(0.2)
    assert line.round_trip == 0.2
    line.note_round_trip(1.0)
    assert line.round_trip == pytest.approx(0.3)


def test_a_credit_is_what_the_line_holds_and_two_more() -> None:
    line = Line()
    line.note_round_trip(0.15)
    assert line.credit(0.0) == CREDIT
    assert line.credit(76.0) == CREDIT + 11
    assert line.credit(1e9) == MAX_CREDIT


def test_silence_grows_with_the_chunk_time_and_shrinks_towards_the_end() -> None:
    pace = ChunkPace(0.05 * SLOW_LINK, 0.0, 0.5)
    assert pace.silence(100) == pytest.approx(16 * 0.05)
    assert pace.silence(3) == 0.5, "five chunk times, but never less than the shortest wait"
    assert ChunkPace(SLOW_LINK, 0.0, 0.5).silence(3) == pytest.approx(5.0)


def test_a_long_pause_teaches_little() -> None:
    pace = ChunkPace(0.1 * SLOW_LINK, 0.0, 0.5)
    for number in range(20):
        pace.note_arrival(0.1 * (number + 1), pushed=True)
    pace.note_arrival(62.0, pushed=True)  # the origin was gone for a minute
    assert pace.chunk_time < 0.6


def test_the_usual_lag_is_waited_for_but_not_by_the_last_chunks() -> None:
    pace = ChunkPace(64 * KI, 0.0, 0.5)
    for _ in range(50):
        pace.note_lag(1.5)
    assert pace.patience(100) == pytest.approx(3.0, rel=0.01)
    assert pace.patience(8) == pytest.approx(pace.silence(8))


def test_what_was_passed_over_is_overdue_when_the_origin_has_given_many_more() -> None:
    late = LateChunks(0.0, 0.5)
    late.note_pushed(9, ChunkSet.of([3]), 1.0)
    assert late.due(1.0) == pytest.approx(1.0 + 48 * 0.1)
    late.mark_late(5.7, 1.0)
    assert not late.overdue
    late.mark_late(5.9, 1.0)
    assert late.overdue == ChunkSet.of([3])
    late.note_arrival(3, 6.0)
    assert not late.overdue


def test_what_is_seen_becomes_late_and_what_is_withheld_is_urgent_at_once() -> None:
    late = LateChunks(0.0, 0.5)
    late.note_seen(1, ANN, 1.0)
    late.note_seen(1, BOB, 2.0)
    late.note_withheld(2)
    assert late.urgent == ChunkSet.of([2])
    assert late.due(1.0) == 2.0
    late.mark_late(1.9, 1.0)
    assert late.urgent == ChunkSet.of([2])
    late.mark_late(2.0, 1.0)
    assert late.urgent == ChunkSet.of([1, 2])
    assert late.due(1.0) == math.inf


def test_what_a_lost_peer_was_first_to_have_is_urgent_unless_asked_for() -> None:
    late = LateChunks(0.0, 0.5)
    for chunk in range(3):
        late.note_seen(chunk, BOB if chunk else ANN, 1.0)
    late.lose(BOB, ChunkSet.of([2]))
    assert late.urgent == ChunkSet.of([1])
    seen = late.note_arrival(1, 1.5)
    assert (seen and seen.peer, bool(late.urgent)) == (BOB, False)


def test_a_holder_that_did_not_deliver_is_none_until_it_says_so_again() -> None:
    others = Availability()
    assert others.note_held(ANN, ChunkSet.of([1, 2])) == ChunkSet.of([1, 2])
    assert others.note_held(ANN, ChunkSet.of([2, 3])) == ChunkSet.of([3])
    others.note_undelivered(ANN, 2)
    assert others.holders[ANN] == ChunkSet.of([1, 3])
    assert others.needs(ANN, 2)
    others.note_taken(ANN, ChunkSet.of([2]))
    assert not others.needs(ANN, 2)
    others.note_wanted(ANN, 2)
    assert others.needs(ANN, 2)


@given(st.lists(st.integers(0, 255), max_size=9))
def test_rare_is_what_at_most_half_of_the_holders_hold(masks: list[int]) -> None:
    others = Availability()
    for number, mask in enumerate(masks):
        others.note_held(KeyPair(digest_of(b"%d" % number)).peer_id, ChunkSet(mask))
    rare = others.rare(8)
    for chunk in range(8):
        assert (chunk in rare) == others.is_rare(chunk)
        assert (chunk in rare) == (2 * sum(mask >> chunk & 1 for mask in masks) <= len(masks))


def test_beyond_enough_holders_a_have_list_only_spares_a_push() -> None:
    others = Availability()
    for number in range(MAX_HOLDERS):
        others.note_held(KeyPair(digest_of(b"%d" % number)).peer_id, ChunkSet.of([0]))
    assert not others.note_held(ANN, ChunkSet.of([0]))
    assert ANN not in others.holders
    assert not others.needs(ANN, 0)


def test_a_queue_owes_what_was_asked_for_until_it_left_or_was_dropped() -> None:
    queue = SendQueue()
    asked = [ChunkHeader(POLICY, number) for number in (1, 3, 4)]
    for header in asked:
        queue.push(header)
    assert (queue.owed, queue.backlog) == (3, 0)
    assert queue.promote(POLICY, 4)
    assert not queue.promote(POLICY, 9)
    queue.start(0.0)
    assert queue.head is None, "one chunk is under way at a time"
    assert queue.finish(0.5) == asked[2]
    assert (queue.owed, queue.head) == (2, asked[0])
    queue.drop()
    assert queue.owed == 1
    queue.start(0.5)
    assert queue.owed == 1
    assert list(queue.unconfirmed()) == [asked[2], asked[1]]
    queue.push(asked[0])
    queue.purge(POLICY)
    assert (queue.owed, queue.backlog) == (1, 0), "what is under way leaves all the same"


def test_what_goes_along_a_stripe_passes_what_was_asked_for() -> None:
    """A peer that came during a hand-out waits for what it asked for: the chunks that it was
    to pass on stood behind that, and its stripe stood still."""
    queue = SendQueue()
    asked = ChunkHeader(POLICY, 1)
    first, second = (ChunkHeader(POLICY, number, 1, 0) for number in (2, 3))
    for header in (asked, first, second):
        queue.push(header)
    assert (queue.backlog, queue.owed) == (2, 1)
    sent = []
    while queue.head is not None:
        queue.start(0.0)
        sent.append(queue.finish(0.5))
    assert sent == [first, second, asked]


def test_a_queue_knows_how_long_chunks_take_to_be_told_of() -> None:
    queue = SendQueue()
    for number in range(3):
        queue.push(ChunkHeader(POLICY, number, 1, 0))
        queue.start(0.1 * number)
        queue.finish(0.1 * number)
    assert queue.acknowledge(bytes(31) + b"x", ChunkSet.of([0]), 0.3) is None
    assert queue.acknowledge(POLICY, ChunkSet.of([0, 1, 9]), 0.3) == pytest.approx(0.2)
    assert queue.acknowledge(POLICY, ChunkSet.of([0, 1]), 0.3) is None, "once"


def test_news_goes_ahead_once() -> None:
    queue = SendQueue()
    assert [queue.note_news(b"roster"), queue.note_news(b"roster")] == [True, False]


def test_a_peer_gets_twice_the_version_and_a_few_indexes() -> None:
    allowance = Allowance(10)
    assert sum(allowance.take_answer(ANN) for _ in range(1000)) == 20 + SPARE_ANSWERS
    assert allowance.take_answer(BOB)
    assert sum(allowance.take_index(ANN) for _ in range(1000)) == MAX_INDEXES


def test_a_source_is_tried_with_one_chunk_and_judged_by_what_it_brings() -> None:
    source = Source(0.2, 2.0)
    assert source.room == 1
    source.owed += 1
    assert source.room == 0
    source.release()
    source.deliver(Request(ANN, 1.0, 2.0), 1.6)
    assert source.chunk_time == pytest.approx(0.3)
    assert source.room == 4
    assert source.late == pytest.approx(0.3 + 4 * 0.175)
    source.miss(Request(ANN, 2.0, 3.0), 3.0)
    assert source.chunk_time == pytest.approx(1.0), "as long as it has taken so far"
    source.miss(Request(ANN, 2.0, 3.0), 3.0)
    assert source.chunk_time == pytest.approx(2.0), "twice as long each time"
    assert source.late == 2.0, "and never waited for longer than a slow link needs"
    for _ in range(2000):
        source.miss(Request(ANN, 2.0, 3.0), 3.0)
    assert source.chunk_time == 32.0
