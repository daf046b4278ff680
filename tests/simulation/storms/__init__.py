"""Workloads with invariants, for storms of drawn faults.

Each is a safety phase, in which faults happen and invariants are checked on every event that
could break them, and a liveness phase, in which nothing goes wrong any more and the swarm has a
bounded time to converge. `Broken` ends the run at the moment at which an invariant is broken;
what has not converged fails the expectations of the scenario, the TOML file beside this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sim.run.scenario import Scenario, load_scenario

STORMS: Final = ("dht", "gossip", "ledger", "membership", "policies", "spine", "transport")


class Broken(AssertionError):
    """An invariant does not hold."""


def load_storm(name: str) -> Scenario:
    """One of `STORMS`."""
    return load_scenario(str(Path(__file__).with_name(f"{name}.toml")))
