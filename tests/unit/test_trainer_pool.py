"""How many places each worker is asked for, and the pool of what they bring."""

from __future__ import annotations

from random import Random

from hypothesis import given, strategies as st

from p2p.identity import KeyPair, PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import TrainingGroup
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.core.demand import ACTIVE, PATIENCE, Demand

CAPACITY, SUBMISSION, WINDOW = 48, 4, 16


def peer(number: int) -> PeerId:
    return KeyPair(bytes([number]) * 32).peer_id


@given(st.integers(1, 20), st.floats(0, 2 * CAPACITY))
def test_what_is_asked_for_fills_the_stock_and_little_more(workers: int, stock: float) -> None:
    """All together, each at most a window: rounding up asks one place a worker too many."""
    demand = Demand(CAPACITY, SUBMISSION, WINDOW)
    for number in range(workers):
        demand.note_committed(peer(number), 0, 0.0)
    asked = [demand.ask(peer(number), stock, 0.0) for number in range(workers)]
    missing = max(0.0, CAPACITY - stock) / demand.teaching
    assert max(asked) <= WINDOW
    assert sum(asked) <= missing + workers
    again = [demand.ask(peer(number), stock, 1.0) for number in range(workers)]
    assert sum(again) <= missing + workers, "a repeated question replaces its answer"


def test_a_full_stock_wants_nothing_and_what_was_asked_for_counts_for_a_while() -> None:
    demand = Demand(CAPACITY, SUBMISSION, 64)
    assert demand.ask(peer(1), CAPACITY, 0.0) == 0
    wanted = demand.ask(peer(1), 0.0, 0.0)
    assert wanted == CAPACITY / demand.teaching
    assert demand.ask(peer(2), 0.0, 1.0) == 0, "the first brings all of it"
    later = max(PATIENCE, ACTIVE) + 2.0
    assert demand.ask(peer(2), 0.0, later) == wanted, "it has brought nothing"
    demand.note_committed(peer(2), wanted, later)
    assert demand.ask(peer(3), CAPACITY, later) == 0


def test_workers_that_ask_for_nothing_get_no_share() -> None:
    demand = Demand(CAPACITY, SUBMISSION, 64)
    for number in range(50):
        demand.ask(peer(number), CAPACITY, 0.0)
    assert demand.ask(peer(99), 0.0, ACTIVE + 1.0) == CAPACITY / demand.teaching


def test_more_places_are_asked_for_where_fewer_groups_teach_and_never_without_end() -> None:
    demand, random = Demand(CAPACITY, SUBMISSION, 1000), Random(0)
    for _ in range(500):
        demand.note_place(random.choice((0, 1)))
    few = demand.ask(peer(1), 0.0, 0.0)
    assert CAPACITY / 1.0 < few < CAPACITY / 0.25
    for _ in range(500):
        demand.note_place(0)
    assert few < demand.ask(peer(1), 0.0, 0.0) <= CAPACITY / 0.25 + 1


def group(version: int, *rewards: float, source: bytes = b"s") -> BufferedGroup:
    return BufferedGroup(
        PolicyVersion(version), source, 0, TrainingGroup((version,), (), rewards)
    )


def test_takes_the_oldest_first_and_only_when_there_are_enough() -> None:
    pool = GroupBuffer(staleness=2)
    pool.add([group(3, 0, 1), group(2, 0, 1)])
    assert pool.take(3, step=3) is None
    pool.add([group(1, 0, 1)])
    taken = pool.take(2, step=3)
    assert taken is not None
    assert [item.group.prompt for item in taken] == [(1,), (2,)]
    assert (pool.counts.staleness_max, len(pool)) == (2, 1)
    assert sum(pool.counts.staleness.values()) == 2
    assert max(pool.counts.staleness) == 2


def test_stale_groups_and_those_without_spread_are_dropped_and_counted() -> None:
    pool = GroupBuffer(staleness=2)
    pool.add([group(0, 0, 1), group(1, 0, 1)])
    assert pool.take(2, step=3) is None
    assert (pool.counts.stale, len(pool)) == (1, 1)
    pool = GroupBuffer(staleness=2)
    pool.add([group(0, 1, 1), group(0, 0, 0), group(0, 1, 0, source=b"t")])
    assert (pool.counts.without_spread, len(pool)) == (2, 1)
    assert list(pool.sources) == [b"t"]
