"""Runs in which work is committed to before it is seen, and only what the lot names is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.run.core.trust import TrustTerms
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.simulation.test_roles_faults import Play, perform, validators

TRUST = TrustTerms(share=0.25, probation=8, window=8, validators=2, beacon=0.5)
CAST = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "validator-2": "validator",
    "validator-3": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
}


@pytest.fixture(autouse=True)
def with_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three validators, and `TRUST` in the run file."""
    one = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in CAST if "validator" in name)
        terms = replace(one(swarm, recipe).terms, validators=judges, trust=TRUST)
        return sign_run(terms, keys.signer("owner"))

    monkeypatch.setattr(spine, "_write_run", write_run)


def workers(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        node["roles"]["inference"]
        for node in health.values()
        if isinstance(node, dict) and "inference" in node["roles"]
    ]


def test_proven_workers_are_learnt_from_and_seldom_checked() -> None:
    """Everything was replayed by one judge a node and policy."""
    health = perform(Play(CAST), steps=12)
    assert health["done"] == 1
    for one in workers(health):
        print({k: one[k] for k in ("submitted", "uploads", "accepted", "rejected", "inconclusive")}, one["life"])
    for one in validators(health):
        print({k: one[k] for k in ("accepted", "rejected", "refused")})
    print(health["trainer-1"]["roles"]["trainer"])
    assert 0
