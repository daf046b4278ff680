"""The ablation of SHARDCAST: each rule can be switched off, a table says what it is worth."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.ablate import ALL_ON, RULES, SHORT, Rule, switch_off, table
from sim.run.scenario import scenario_names

ALL_OFF = (
    "from bench.ablate import RULES, switch_off\nfor rule in RULES.values(): switch_off(rule)"
)


def test_every_rule_is_carried_by_what_is_replaced_and_every_scenario_exists() -> None:
    """In a process of its own, which ends without them."""
    subprocess.run([sys.executable, "-c", ALL_OFF], check=True)
    assert set(SHORT) <= set(scenario_names())


def test_the_table_names_the_scenarios_in_which_a_rule_matters() -> None:
    rows = {
        (ALL_ON, "lab_uneven"): [(5.0, True), (7.0, True), (6.0, True)],
        (ALL_ON, "lab_adsl"): [(10.0, True)],
        ("trial", "lab_uneven"): [(9.0, True), (6.9, True), (6.0, True)],
        ("trial", "lab_adsl"): [(10.9, True)],
        ("settle", "lab_adsl"): [(10.0, False)],
    }
    lines = table(rows)
    assert lines[2] == f"| trial | {RULES['trial'].law} | lab_uneven 1.15 |"
    assert lines[3].endswith("| lab_adsl 1.00 ! |")


def test_a_rule_that_is_gone_is_not_ablated_in_silence() -> None:
    with pytest.raises(AttributeError, match="carries no rule"):
        switch_off(Rule("a law", {"handout:NO_SUCH": 1}))
