"""The scenarios that come with the simulator, by theme, and the cost of one run.

Costs are CPU seconds of one run with its own settings and seed 1, on a core of 2.8 GHz, rounded
up to 1, 2 or 5 times a power of ten: which of them to start before lunch, and no more.
`tests/simulation/test_scenarios.py` holds that none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

THEMES: Final[Mapping[str, Mapping[str, int]]] = {
    "who is alive": {
        "churn": 2,
        "day_and_night": 5,
        "recorded": 1,
        "storm": 2,
        "partition": 5,
        "zone_wipe": 5,
        "flash_crowd": 5,
        "skewed_clocks": 2,
        "thousand": 100,
    },
    "hostile members": {
        "eclipse": 2,
        "accuse_flood": 1,
        "urgent_links": 5,
        "ghost_mesh": 5,
        "squatters": 20,
    },
    "a policy to everyone": {
        "slow_relay": 10,
        "dripper": 10,
        "origin_dies": 20,
        "late_joiners": 5,
        "nat_majority": 50,
        "relay_dies": 20,
        "after_push": 2,
        "crowd": 10,
        "after_ticket": 20,
        "warm_far": 20,
    },
    "liars among the relays": {
        "liar": 10,
        "black_hole": 2,
        "black_hole_forty": 10,
        "black_hole_roots": 20,
        "boaster": 50,
        "overclaim": 20,
        "slander": 20,
    },
    "large policies, many machines": {
        "ten_thousand": 10,
        "intellect2": 50,
        "intellect2_reference": 5,
        "deltas": 10,
        "deltas_thousand": 100,
    },
    "whole nodes, on simulated lines and on real ones": {
        "lab_broadcast": 2,
        "lab_uneven": 2,
        "lab_slow_relay": 2,
        "lab_even_20": 5,
        "lab_even_40": 5,
        "lab_killed": 5,
        "lab_adsl": 2,
        "lab_warm": 5,
        "lab_warm_small": 1,
    },
    "a run and its roles": {
        "spine": 5,
        "volunteers": 500,
        "diloco": 2,
        "diloco_hostile": 5,
        "intellect1": 50,
        "intellect1_reference": 1,
    },
    "weeks": {
        "soak": 10,
        "soak_month": 5000,
    },
}
"""CPU seconds of each scenario, by theme."""

MINUTE: Final = 60
"""Seconds; costs are shown in minutes from two of them on."""


def cost(name: str) -> str:
    """Cost of one run, for people."""
    seconds = next(costs[name] for costs in THEMES.values() if name in costs)
    return f"{seconds} s" if seconds < 2 * MINUTE else f"{round(seconds / MINUTE)} min"
