"""A handful of storms, and the plans that once broke something."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sim.faults.plan import plan_from_table
from sim.run.scenario import load_scenario
from tests.simulation.hunt import play, smallest, with_plan
from tests.simulation.mutants import MUTANTS
from tests.simulation.storms import STORMS, load_storm
from tests.sweeps import swept

ROOT = Path(__file__).parent.parent.parent
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("seed", swept([1, 2], 1))
@pytest.mark.parametrize("storm", STORMS)
def test_a_storm_breaks_nothing(storm: str, seed: int) -> None:
    assert play(load_storm(storm), seed).why is None


@pytest.mark.deep
@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_once_broke_holds(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    scenario = replace(load_scenario(str(ROOT / content["scenario"])), nodes=content["nodes"])
    plan = plan_from_table(content["faults"])
    assert play(with_plan(scenario, plan), content["seed"]).why is None


@pytest.mark.deep
def test_a_find_is_shrunk_to_what_matters() -> None:
    mutant = MUTANTS["sequence numbers start again"]
    scenario = replace(load_storm(mutant.storm), duration=60.0, expect=())
    find = play(scenario, mutant.seed, mutant.plant)
    assert find.why is not None
    assert len(find.plan) > 3
    plan = smallest(scenario, find, mutant.plant)
    assert len(plan) == 1
    assert play(with_plan(scenario, plan), find.seed).why is None
