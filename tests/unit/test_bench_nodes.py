"""Whole nodes on lines: which scenario is over its limit."""

from __future__ import annotations

from bench.nodes import LIMITS, SCENARIOS, over_limits


def test_a_scenario_over_its_limit_is_named_with_its_level() -> None:
    assert set(LIMITS) <= set(SCENARIOS)
    times = {("lab_uneven", 1): 1.25, ("lab_uneven", 3): 1.26, ("warm_far", 1): 99.0}
    assert over_limits(times) == ["lab_uneven, level 3: 1.260 times the bound, limit 1.25"]
