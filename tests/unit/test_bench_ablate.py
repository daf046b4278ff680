"""The ablation of SHARDCAST: each rule can be switched off, a table says what it is worth."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.ablate import SHORT, Rule, switch_off
from sim.run.scenario import scenario_names

ALL_OFF = (
    "from bench.ablate import RULES, switch_off\nfor rule in RULES.values(): switch_off(rule)"
)


def test_every_rule_is_carried_by_what_is_replaced_and_every_scenario_exists() -> None:
    """In a process of its own, which ends without them."""
    subprocess.run([sys.executable, "-c", ALL_OFF], check=True)
    assert set(SHORT) <= set(scenario_names())


def test_a_rule_that_is_gone_is_not_ablated_in_silence() -> None:
    with pytest.raises(AttributeError, match="carries no rule"):
        switch_off(Rule("a law", {"handout:NO_SUCH": 1}))
