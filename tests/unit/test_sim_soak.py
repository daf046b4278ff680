"""How the scenario `soak` tells a leak from a table that is full."""

from __future__ import annotations

from collections import deque

from p2p.bounded import BoundedDict
from sim.workloads.soak import Table, limit_of


def test_a_leak_of_one_entry_a_sample_is_found_and_a_full_table_is_none() -> None:
    leak = Table([float(number) for number in range(48)])
    full = Table([float(min(number, 12)) for number in range(48)])
    noise = Table([10.0 + number % 3 for number in range(48)])
    late = Table([0.0] * 40 + [50.0] * 8)
    assert leak.grows(2.0)
    assert late.grows(2.0)
    assert not full.grows(2.0)
    assert not noise.grows(2.0)


def test_a_table_is_bounded_by_its_type_or_not_at_all() -> None:
    bounded, plain = BoundedDict[int, int](4096), dict[int, int]()
    assert limit_of(bounded) == 4096
    assert limit_of(deque(maxlen=16)) == 16
    assert limit_of(plain) is None
    assert limit_of(deque()) is None
    table = Table()
    table.hold(limit_of(bounded))
    assert table.limit == 4096
    table.hold(limit_of(plain))
    table.hold(limit_of(bounded))
    assert table.limit is None  # one node's is not bounded
