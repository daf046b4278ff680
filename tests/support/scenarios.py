"""Small scenarios that several test modules play."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.run.scenario import Scenario, load_scenario

RING = Path(__file__).parent.parent.parent / "examples" / "ring" / "ring.toml"

FEW_NODES = replace(
    load_scenario("lab_broadcast"),
    nodes=4,
    duration=40.0,
    parameters={"policy_bytes": 2_000_000, "first_at": 5.0},
    expect=(),
)

# An 8 B policy for a dozen volunteers on fast lines: steps of some minutes, 15 chunks.
FEW_VOLUNTEERS = {
    "sized_for": 12, "model": "8B", "policy_bytes": 16e9, "coarse": 256, "relays": 1,
    "validators": 1, "trainer": "4xH100", "share_8xH100": 0.0, "share_4x4090": 0.5,
    "share_4x3090": 0.5, "batch_rollouts": 768, "group_size": 8, "answer_tokens": 3000,
    "up_low": 1000.0, "up_high": 4000.0, "lifetime": 3000, "patience": 900,
}  # fmt: skip


def few_volunteers(**changes: object) -> Scenario:
    scenario = load_scenario("volunteers")
    parameters = {**scenario.parameters, **FEW_VOLUNTEERS, **changes}
    return replace(scenario, nodes=12, duration=1800.0, parameters=parameters, expect=())


def embedded(page: str, name: str) -> Any:
    """What a page has in the element ``name``."""
    (found,) = re.findall(rf'<script type="application/json" id="{name}">(.*)</script>', page)
    return json.loads(found)
