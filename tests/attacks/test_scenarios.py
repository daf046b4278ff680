"""The hostile scenarios hold at a size for every test run.

The form in which they are judged (200 nodes, ten virtual minutes) is `python -m sim run NAME
--nodes 200 --duration 660`; what is asserted here is the same, of smaller swarms.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest

from p2p.bounded import BoundedDict
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.workloads.soak import Table, limit_of

SMALL = {
    "accuse_flood": (40, 90.0, {}),
    "urgent_links": (60, 120.0, {}),
    "ghost_mesh": (40, 90.0, {}),
    "address_flush": (20, 130.0, {"strangers": 250, "cut_at": 102.0}),
    "squatters": (30, 100.0, {"holders": 24, "squatters": 90}),
    "soak": (8, 10_800.0, {"least": 16.0}),
}
"""Nodes, seconds and parameters. 250 strangers a second for 42 s are more than the address book
holds.
"""


@pytest.mark.parametrize("name", SMALL)
def test_a_hostile_scenario_holds(name: str) -> None:
    nodes, duration, parameters = SMALL[name]
    scenario = load_scenario(name)
    scenario = dataclasses.replace(
        scenario,
        nodes=nodes,
        duration=duration,
        parameters={**scenario.parameters, **parameters},
    )
    result = run_scenario(scenario, 1)
    assert result.ok, (result.expectations, result.metrics)


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
