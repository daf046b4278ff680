"""Planted bugs are found: each kept plan breaks its mutant and nothing else."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import attempt, kept_plans, planted

PLANS = kept_plans()


def test_at_least_ten_mutants_were_found_with_at_most_three_faults() -> None:
    assert len(PLANS) >= 10
    assert all(len(plan) <= 3 for _, plan in PLANS.values())


@pytest.mark.parametrize("name", list(PLANS))
def test_the_plan_breaks_the_mutant_and_not_the_code(name: str) -> None:
    seed, plan = PLANS[name]
    with planted(name):
        assert not attempt(seed, plan)[0]
    assert attempt(seed, plan)[0]
