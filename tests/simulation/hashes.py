"""Prints the trace hashes of small storms as JSON: ``python -m tests.simulation.hashes STORM:SEED ...``.

For each: the hash at L1, and the digest of what the cores of `CORES` did when they were played back at L0.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from sim.errors import SimulationError
from sim.runner import run_scenario
from sim.tape import recording
from tests.simulation.storms import load_storm

CORES: Final[Mapping[str, tuple[str, str]]] = {
    "membership": ("p2p.membership.service", "MembershipCore"),
    "gossip": ("p2p.gossip.service", "GossipCore"),
}
"""Where the driver of a storm makes its cores. The others read shared state, and are compared at L1 only."""
SECONDS: Final = 60.0
"""Virtual seconds of each storm: most of its faults."""


def hashes(wanted: Iterable[str]) -> dict[str, list[str]]:
    """For each ``STORM:SEED``."""
    found = {}
    for name in wanted:
        storm, _, seed = name.partition(":")
        scenario = replace(load_storm(storm), duration=SECONDS, expect=())
        if storm in CORES:
            module, core = CORES[storm]
            with recording(importlib.import_module(module), core) as tape:
                result = run_scenario(scenario, int(seed))
            replayed = tape.replay()
            if replayed.differs_at is not None:
                raise SimulationError(f"{name}: L0 differs from L1 at event {replayed.differs_at}")
            found[name] = [result.trace_hash, replayed.digest]
        else:
            found[name] = [run_scenario(scenario, int(seed)).trace_hash]
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.stdout.write(json.dumps(hashes(sys.argv[1:])))
