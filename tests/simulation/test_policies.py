"""Policies over misbehaving relays, the INTELLECT-2 stage, and the machines on it: small
versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario

SMALL: Mapping[str, float] = {"policy_bytes": 600_000, "chunk_bytes": 32_768}


def play(
    name: str, seed: int = 1, nodes: int = 0, duration: float = 0.0, **parameters: float
) -> Result:
    scenario = load_scenario(name)
    changed = {**scenario.parameters, **parameters}
    return run_scenario(
        dataclasses.replace(
            scenario,
            nodes=nodes or scenario.nodes,
            duration=duration or scenario.duration,
            parameters=changed,
        ),
        seed,
    )


def test_honest_relays_bring_every_version_to_everybody() -> None:
    result = play(
        "dripper", nodes=10, duration=40.0, drippers=0, versions=2, interval=15.0, **SMALL
    )
    metrics = result.metrics
    assert metrics["hold_newest"] == metrics["arrived_share"] == 1.0
    assert (metrics["published"], metrics["chunks_bad"]) == (2, 0)
    assert metrics["origin_policies_sent"] < 1.5
    assert metrics["bound_seconds"] < metrics["seconds_50"] <= metrics["seconds_100"] < 5
    assert len(result.series["seconds to 99 %, by version"]) == 2


def test_a_liar_is_noticed_and_costs_each_victim_little() -> None:
    metrics = play(
        "liar",
        nodes=12,
        duration=40.0,
        versions=2,
        interval=15.0,
        liars=1,
        lie_share=1.0,
        **SMALL,
    ).metrics
    assert metrics["hold_newest"] == metrics["arrived_share"] == 1.0
    assert 1 <= metrics["chunks_bad"] <= 10 * 2


def test_an_origin_goes_on_after_its_death() -> None:
    metrics = play("origin_dies", nodes=9, duration=110.0, **SMALL).metrics
    assert metrics["published"] == 3
    assert metrics["hold_newest"] == 1.0


# Machines
