"""Prints the hashes of small storms as JSON: ``python -m tests.simulation.hashes SECONDS
KIND:SEED ...``.

For each: the trace hash.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from tests.simulation.storms import STORMS, load_storm
from tests.support.scenarios import FEW_NODES as nodes, few_volunteers as volunteers

SECONDS: Final = 60.0
"""Virtual seconds of each storm, if nothing else is said: most of its faults."""
BARE: Final = {
    "ten_thousand": {"chunks": 16, "chunk_bytes": 262_144, "deaths": 0.2, "deaths_until": 2.0},
    "intellect2": {"versions": 1, "deaths": 0.2, "relays": 3, "coarse": 1024},
}
"""Scenarios that run at L0, with more deaths than they have for many times the nodes."""
BARE_NODES: Final = 40
SMALL: Final = {
    "diloco": load_scenario("diloco"),
    "nodes": replace(nodes, duration=20.0),
    "volunteers": replace(volunteers(arrival=60), duration=420.0),
}
"""Scenarios of other workloads, for as long as they say."""
KINDS: Final = (*STORMS, "churn", *BARE, *SMALL)


def mixed(count: int) -> list[str]:
    """So many storms and scenarios, kinds in turn."""
    return [
        f"{KINDS[number % len(KINDS)]}:{1 + number // len(KINDS)}" for number in range(count)
    ]


def small(kind: str, seconds: float = SECONDS) -> Scenario:
    """One of `KINDS`, of a size that many can be run of."""
    if kind in STORMS:
        return replace(load_storm(kind), duration=seconds, expect=())
    if kind in SMALL:
        return replace(SMALL[kind], expect=())
    scenario = load_scenario(kind)
    if kind in BARE:
        return replace(
            scenario,
            nodes=BARE_NODES,
            expect=(),
            parameters={**scenario.parameters, **BARE[kind]},
        )
    return replace(scenario, nodes=15, duration=seconds, expect=())


def hashes(wanted: Iterable[str], seconds: float = SECONDS) -> dict[str, str]:
    """Return the trace hash of each ``KIND:SEED``."""
    found = {}
    for name in wanted:
        kind, _, seed = name.partition(":")
        found[name] = run_scenario(small(kind, seconds), int(seed)).trace_hash
    return found


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    sys.stdout.write(json.dumps(hashes(sys.argv[2:], float(sys.argv[1]))))
