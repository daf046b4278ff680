"""The parts of SHARDCAST, each alone: what they wait for, count and forget."""

from __future__ import annotations

import math

import pytest
import trio

from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.shardcast.bulk import Throttle
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.core.download import MAX_HOLDERS, Availability, LateChunks
from p2p.shardcast.core.pace import ChunkPace
from p2p.shardcast.core.upload import SendQueue
from p2p.shardcast.index import digest_of
from p2p.shardcast.messages import ChunkHeader
from p2p.wire import KI, MIB

ANN, BOB = (KeyPair(digest_of(name)).peer_id for name in (b"ann", b"bob"))
POLICY = bytes(32)


async def test_all_who_send_share_one_rate(autojump_clock) -> None:
    """Ten peers that each take a MiB get them in ten seconds at a MiB a second, not in one."""
    async with open_world() as world:
        throttle, began = Throttle(world, MIB), world.now()
        async with trio.open_nursery() as nursery:
            for _ in range(11):  # the first is the burst
                nursery.start_soon(throttle.charge, MIB)
        assert world.now() - began == pytest.approx(10.0)
        before = world.now()
        await Throttle(world, 0).charge(MIB)
        assert world.now() == before


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


def test_a_node_that_is_usually_behind_its_neighbours_waits_for_what_is_coming() -> None:
    """It pulled what was waiting on its own slow line, which so came twice."""
    pace = ChunkPace(64 * KI, 0.0, 0.5)
    for tenth in range(40):
        pace.note_lag(3.0)
        pace.note_arrival(tenth / 10, pushed=True)
    assert pace.patience(100) == pytest.approx(6.0, rel=0.01)
    assert pace.patience(4) == pace.silence(4) < 1.0, "its line is about to be idle"


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
    assert queue.has(POLICY, 4)
    assert not queue.has(POLICY, 9)
    queue.start(0.0)
    assert queue.head is None, "one chunk is under way at a time"
    assert queue.finish() == asked[0]
    assert (queue.owed, queue.head) == (2, asked[1])
    queue.drop()
    assert queue.owed == 1
    queue.start(0.5)
    assert queue.owed == 1
    assert list(queue.unconfirmed()) == [asked[0], asked[2]]
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
        sent.append(queue.finish())
    assert sent == [first, second, asked]
