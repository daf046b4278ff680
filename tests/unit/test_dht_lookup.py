from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, strategies as st

from p2p.dht.core.calls import Calls, RoundTrips
from p2p.dht.core.lookup import MAX_ASKED, ContactState, Lookup, LookupShape
from p2p.dht.messages import Contact
from p2p.identity import PeerId

TARGET = bytes(20)


def contacts(count: int, seed: int = 1) -> list[Contact]:
    rng = Random(seed)
    made = [
        Contact(PeerId.from_public_key(rng.randbytes(32)), rng.randbytes(8), ())
        for _ in range(count)
    ]
    return sorted(made, key=lambda each: each.number)


def shape(**changes: int) -> LookupShape:
    return LookupShape(**{"alpha": 3, "paths": 2, "width": 8, **changes})


@given(
    st.integers(1, 80),
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.sets(st.integers(0, 79), max_size=30),
)
def test_it_finds_the_nearest_that_live(
    size: int, seed: int, paths: int, dead: set[int]
) -> None:
    """Everybody knows the twenty nearest to each of 16 points and a few random others."""
    everybody = contacts(size, seed)
    rng = Random(seed)
    alive = [each for index, each in enumerate(everybody) if index not in dead]
    lookup = Lookup(TARGET, rng.sample(everybody, min(size, 20)), shape(paths=paths))
    asked: list[Contact] = []
    waiting: list[Contact] = []
    while not lookup.done:
        waiting += (new := lookup.ask())
        asked += new
        each = waiting.pop(rng.randrange(len(waiting)))
        if each in alive:
            lookup.answered(each, everybody[:20] + rng.sample(everybody, min(size, 5)))
        else:
            states = (ContactState.LATE, ContactState.LOST, ContactState.FAILED)
            lookup.settle(each, rng.choice(states))
            lookup.settle(each, ContactState.FAILED)
    assert len(asked) == len({each.id for each in asked}), "nobody is asked twice"
    heard = [each for each in alive if each in everybody[:20]]
    assert lookup.closest(8)[: len(heard)] == heard[:8][: len(lookup.closest(8))]
    assert len(lookup.closest(8)) >= min(8, len(heard))


def test_it_never_asks_more_than_its_limit() -> None:
    endless = contacts(1500, 4)
    lookup = Lookup(TARGET, endless[-3:], shape(width=20))
    asked, offset = 0, 1400
    while not lookup.done:
        for each in lookup.ask():
            asked += 1
            offset = max(0, offset - 10)
            lookup.answered(each, endless[offset : offset + 20])
    assert asked <= MAX_ASKED


def test_the_late_give_their_slot_away_and_the_lost_do_not_hold_up_the_end() -> None:
    everybody = contacts(4)
    lookup = Lookup(TARGET, everybody, shape(alpha=1, paths=1))
    (first,) = lookup.ask()
    assert lookup.ask() == []
    lookup.settle(first, ContactState.LATE)
    for _ in range(3):
        (each,) = lookup.ask()
        lookup.answered(each, [])
    assert not lookup.done
    lookup.settle(first, ContactState.LOST)
    assert lookup.done
    lookup.answered(first, [])
    assert lookup.closest(4) == everybody


def test_values_from_a_quorum_on_each_path_end_it() -> None:
    lookup = Lookup(TARGET, contacts(20), shape(quorum=1, holders=8))
    one, two, *_ = lookup.ask()
    lookup.answered(one, [], found=True)
    assert not lookup.done
    lookup.answered(two, [], found=True)
    assert lookup.done
    assert lookup.found_everywhere


def test_values_from_beyond_the_holders_end_nothing() -> None:
    everybody = contacts(40)
    far, near = everybody[8:20], everybody[:8]
    lookup = Lookup(TARGET, far, shape(quorum=1, holders=8, alpha=6))
    for each in lookup.ask():
        lookup.answered(each, near, found=True)
    assert not lookup.done
    assert not lookup.found_everywhere
    asked = lookup.ask()
    assert set(asked) <= set(near)
    for each in asked:
        lookup.answered(each, [], found=True)
    assert lookup.done
    assert lookup.found_everywhere


# Calls.


def peer(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


def test_an_unanswered_call_becomes_later_and_later() -> None:
    calls: Calls[str] = Calls(Random(1))
    calls.open(peer(1), "why", lambda request_id: b"%d" % request_id, 0.0, connected=True)
    seen = []
    while calls.next_deadline < math.inf:
        now = calls.next_deadline
        seen += [(round(now, 3), lateness) for _, lateness in calls.expire(now)]
    late = [ContactState.LATE, ContactState.LOST, ContactState.FAILED]
    assert [state for _, state in seen] == late
    assert [when for when, _ in seen] == [0.5, 1.5, 3.5]
    assert len(seen) == 3
    assert len(calls) == 0


def test_a_dial_is_given_time_and_not_measured() -> None:
    trips = RoundTrips()
    for _ in range(50):
        trips.measure(0.1)
    assert trips.timeout(connected=True) == 0.2
    assert trips.timeout(connected=False) == pytest.approx(0.5, abs=0.05)
    calls: Calls[str] = Calls(Random(1))
    call = calls.open(peer(1), "", lambda _: b"", 0.0, connected=False)
    calls.settle(call.request_id, peer(1), 0.9)
    assert calls.round_trips.mean == 0
