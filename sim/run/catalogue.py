"""The scenarios that come with the simulator, by what they are about, and what one run costs.

Costs are CPU seconds of one run with its own settings and seed 1, on a core of 2.8 GHz, rounded
up to 1, 2 or 5 times a power of ten: which of them to start before lunch, and no more.
`tests/simulation/test_catalogue.py` holds that none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

THEMES: Final[Mapping[str, Mapping[str, int]]] = {
    "who is alive": {
        "churn": 0,
        "day_and_night": 0,
        "recorded": 0,
        "storm": 0,
        "partition": 0,
        "zone_wipe": 0,
        "flash_crowd": 0,
        "skewed_clocks": 0,
        "thousand": 0,
    },
    "hostile members": {
        "eclipse": 0,
        "accuse_flood": 0,
        "urgent_links": 0,
        "ghost_mesh": 0,
        "address_flush": 0,
        "squatters": 0,
    },
    "a policy to everyone": {
        "slow_relay": 0,
        "dripper": 0,
        "origin_dies": 0,
        "late_joiners": 0,
        "nat_majority": 0,
        "after_push": 0,
        "crowd": 0,
        "after_ticket": 0,
        "warm_far": 0,
    },
    "liars among the relays": {
        "liar": 0,
        "black_hole": 0,
        "black_hole_forty": 0,
        "black_hole_roots": 0,
        "boaster": 0,
        "overclaim": 0,
        "slander": 0,
    },
    "large policies, many machines": {
        "ten_thousand": 0,
        "intellect2": 0,
        "intellect2_reference": 0,
        "deltas": 0,
        "deltas_thousand": 0,
    },
    "whole nodes, on simulated lines and on real ones": {
        "lab_broadcast": 0,
        "lab_uneven": 0,
        "lab_slow_relay": 0,
        "lab_even_20": 0,
        "lab_even_40": 0,
        "lab_killed": 0,
        "lab_adsl": 0,
        "lab_warm": 0,
        "lab_warm_small": 0,
    },
    "a run and its roles": {
        "spine": 0,
        "volunteers": 0,
        "diloco": 0,
        "diloco_hostile": 0,
    },
    "weeks": {
        "soak": 0,
        "soak_month": 0,
    },
}
"""CPU seconds of each scenario, by theme."""

MINUTE: Final = 60


def cost(name: str) -> str:
    """What one run takes, for people."""
    seconds = next(costs[name] for costs in THEMES.values() if name in costs)
    return f"{seconds} s" if seconds < 2 * MINUTE else f"{round(seconds / MINUTE)} min"
