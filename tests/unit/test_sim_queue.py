"""The heap: order, owners, cancellation, hashing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from sim.errors import SimStuck
from sim.kernel import queue as queue_module
from sim.kernel.keys import KeyRing
from sim.kernel.queue import IO, SLEEP, TIMER, EventQueue, Owner, nanoseconds
from sim.kernel.trace import BLOCK_EVENTS, EVERYTHING, Trace


@given(st.floats(0, 1e7, allow_nan=False))
def test_a_deadline_in_nanoseconds_is_the_first_that_compares_as_reached(
    seconds: float,
) -> None:
    when = nanoseconds(seconds)
    assert when / 1e9 >= seconds
    assert when == 0 or (when - 2) / 1e9 < seconds


@given(st.lists(st.integers(0, 20), max_size=50))
def test_events_run_in_order_of_time_then_of_asking(times: list[int]) -> None:
    queue = EventQueue(Trace())
    ran: list[tuple[int, int]] = []
    for number, when in enumerate(times):
        queue.schedule(when, queue.kernel, "event", ran.append, (when, number))
    queue.run()
    assert ran == sorted((when, number) for number, when in enumerate(times))
    assert queue.events == len(times)


def test_the_dead_get_no_events_and_the_paused_get_them_later() -> None:
    queue = EventQueue(Trace())
    dead, paused = Owner("dead"), Owner("paused")
    seen: list[tuple[str, int]] = []
    for when in (1, 2):
        queue.schedule(when, dead, "event", seen.append, ("dead", when))
        queue.schedule(
            when, paused, "event", lambda when=when: seen.append(("paused", queue.now))
        )
    dead.alive = False
    paused.paused_until = 10
    queue.run()
    assert seen == [("paused", 10), ("paused", 10)]


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_process_runs_all_its_timers_and_then_reads_in_order(seed: int) -> None:
    """Timers that its timers set for now are among them; what another owns is never late."""
    rng, queue = Random(seed), EventQueue(Trace())
    paused, other = Owner("paused"), Owner("other")
    plan = [(rng.randrange(100), rng.choice((SLEEP, TIMER, IO, "message"))) for _ in range(40)]
    seen: list[tuple[int, str]] = []

    def run(when: int, label: str) -> None:
        seen.append((when, label))
        if label == TIMER:
            queue.schedule(queue.now, paused, SLEEP, seen.append, (when, "set by a timer"))

    for when, label in plan:
        queue.schedule(when, paused, label, run, when, label)
        queue.schedule(when, other, label, lambda when=when: seen.append((queue.now, "other")))
    paused.paused_until = 100
    queue.run()
    ticks = sorted(when for when, label in plan if label in (SLEEP, TIMER))
    reads = sorted(when for when, label in plan if label not in (SLEEP, TIMER))
    more = sorted(when for when, label in plan if label == TIMER)
    assert seen[:40] == [(when, "other") for when, _ in sorted(plan)]
    assert [when for when, _ in seen[40:]] == ticks + more + reads
    assert queue.now == 100


def test_events_that_breed_at_one_instant_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_SAME_INSTANT", 100)
    queue = EventQueue(Trace())
    node = Owner("n3")

    def breed() -> None:
        queue.schedule(queue.now, node, "echo", breed)

    breed()
    with pytest.raises(SimStuck, match="n3: echo"):
        queue.run()


def test_watching_does_not_change_the_trace() -> None:
    digests = []
    for step in (0, 5):
        queue = EventQueue(Trace())
        seen: list[int] = []
        if step:
            queue.watch(step, lambda queue=queue, seen=seen: seen.append(queue.now))
        for when in range(20):
            queue.schedule(when, queue.kernel, "event", len, ())
        queue.run()
        digests.append(queue.trace.digest)
        assert bool(seen) == bool(step)
    assert digests[0] == digests[1]


def test_one_changed_event_changes_the_hash_from_its_block_on() -> None:
    def trace_of(odd: int) -> Trace:
        trace = Trace(EVERYTHING)
        for number in range(3 * BLOCK_EVENTS):
            trace.record((number, "n", "event", number == odd))
        return trace

    one, other = trace_of(-1), trace_of(BLOCK_EVENTS + 7)
    assert one.blocks[0] == other.blocks[0]
    assert one.blocks[1] != other.blocks[1]
    assert one.digest != other.digest
    assert len(one.kept) == 3 * BLOCK_EVENTS


@pytest.mark.parametrize("hashed", [False, True])
def test_signatures_of_simulated_keys(hashed: bool) -> None:
    ring = KeyRing(1, hashed=hashed)
    alice, bob = ring.signer("alice"), ring.signer("bob")
    signature = alice.sign("/d", b"x")
    assert KeyRing(1, hashed=hashed).signer("alice").peer_id == alice.peer_id
    assert len(signature) == 64
    for _ in range(2):
        assert ring.verify(alice.peer_id, "/d", b"x", signature)
        assert not ring.verify(bob.peer_id, "/d", b"x", signature)
        assert not ring.verify(alice.peer_id, "/e", b"x", signature)
        assert not ring.verify(alice.peer_id, "/d", b"x", bytes(64))
