"""The table of regions, and scenarios that use it."""

from __future__ import annotations

import dataclasses
from random import Random

from sim.kernel.queue import Owner
from sim.kernel.simulation import Simulation
from sim.net.fabric import Fabric
from sim.net.latency import REGIONS, RegionLatency, draw_region
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario


def test_distances_are_symmetric_and_short_at_home() -> None:
    fabric = Fabric(Simulation(1))
    machines = [fabric.add(region, Owner(region), region=region) for region in REGIONS]
    latency = RegionLatency(0.5)
    for one in machines:
        assert latency(one, one) < 0.01
        for other in machines:
            assert latency(one, other) == latency(other, one)
            assert one is other or 0.05 < latency(one, other) < 0.25
    assert latency(fabric.add("x", Owner("x")), machines[0]) == 0.5


def test_regions_are_drawn_by_weight() -> None:
    rng = Random(1)
    drawn = [draw_region(rng) for _ in range(5000)]
    assert 0.45 < drawn.count("europe") / len(drawn) < 0.55


def test_a_scenario_can_be_spread_over_the_world() -> None:
    here = dataclasses.replace(load_scenario("churn"), nodes=12, duration=60.0)
    there = dataclasses.replace(here, regions=True)
    near, far = run_scenario(here, 1), run_scenario(there, 1)
    assert near.trace_hash != far.trace_hash
    assert near.metrics["join_seconds_median"] != far.metrics["join_seconds_median"]
