"""INTELLECT-1: the order of rings, PRIME's published figures, and our members on its lines."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.run.sweep import changed
from sim.workloads.intellect1 import ours
from sim.workloads.intellect1.ring import bottleneck_ring
from sim.workloads.intellect1.sites import STAGES, Stage


def dearest(costs: list[list[float]], order: list[int]) -> float:
    return max(costs[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


@pytest.mark.parametrize(
    ("costs", "slowest"),
    [
        ([[0, 10, 15, 20], [10, 0, 35, 25], [15, 35, 0, 30], [20, 25, 30, 0]], 30),
        ([[0, 5], [7, 0]], 7),
        ([[0, 2, 9, 10], [1, 0, 6, 4], [15, 7, 0, 8], [6, 3, 12, 0]], 8),
    ],
)
def test_a_ring_is_as_toposolve_finds_it(costs: list[list[float]], slowest: float) -> None:
    found, order = bottleneck_ring(costs)
    assert found == slowest == dearest(costs, order)
    assert sorted(order) == list(range(len(costs)))


def test_no_order_of_seven_has_a_faster_slowest_edge() -> None:
    rng = Random(1)
    for _ in range(5):
        costs = [[rng.random() for _ in range(7)] for _ in range(7)]
        best = min(dearest(costs, [0, *rest]) for rest in permutations(range(1, 7)))
        assert bottleneck_ring(costs)[0] == best


@pytest.mark.deep
def test_primes_six_figures_are_met_within_fifteen_per_cent() -> None:
    found = run_scenario(load_scenario("intellect1_reference"), 1).metrics
    for stage in STAGES:
        assert found[f"{stage.name}_seconds"] == pytest.approx(stage.reduced, rel=0.15)
        assert found[f"{stage.name}_utilised"] == pytest.approx(stage.utilised, rel=0.15)


@pytest.mark.deep
def test_sites_that_join_vanish_and_return_hold_no_compute_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six of the sites; all fourteen are a sweep's."""
    monkeypatch.setattr(ours, "STAGES", (Stage("usa", 6, 0.957, 103.0),))
    scenario = changed(load_scenario("intellect1"), {"rounds": 2})
    metrics = run_scenario(scenario, 1).metrics
    assert metrics["usa_utilised"] >= 0.957  # what Prime measured
    assert metrics["members_end"] == 6
    assert metrics["replicas_differ"] == 0
    assert metrics["most_spike"] <= 0.05
