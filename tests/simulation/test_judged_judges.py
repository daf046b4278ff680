"""Lots, appeals and passing over together: a judge that rejects all work is one of two that the
lot names for a place, and a witness of windows besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.trainer.audit import Auditor
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.simulation.test_judged_validators import Refusing
from tests.simulation.test_lots import CAST, SMALL, TRUST
from tests.simulation.test_roles_faults import Play, perform


class RefusingWitness(Refusing):
    """Signs windows as it should."""


def test_a_run_with_lots_goes_on_when_a_witness_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers' windows went to another witness, which took the places before them for left
    out: they waited for ever, and the run stood still at its first step, the liar convicted."""
    write = spine._write_run
    convicted: list[object] = []
    convict = Auditor.convict

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in CAST if "validator" in name)
        terms = write(swarm, recipe).terms
        terms = replace(terms, validators=judges, trust=TRUST, appeals=True)
        return sign_run(terms, keys.signer("owner"))

    async def noted(auditor: Auditor, *asked: object) -> None:
        convicted.append(asked[0])
        await convict(auditor, *asked)  # type: ignore[arg-type]

    monkeypatch.setattr(spine, "_write_run", write_run)
    monkeypatch.setattr(Auditor, "convict", noted)
    health = perform(
        Play({**CAST, "validator-3": f"{__name__}:RefusingWitness"}), steps=1, **SMALL
    )
    assert health["done"] == 1
    assert len(convicted) == 1
    assert health["trainer-1"]["roles"]["trainer"]["windows_settled"] > 0
