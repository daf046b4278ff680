"""Policies over misbehaving relays, the INTELLECT-2 stage, and the machines on it: small
versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from sim.studies.profiles import MODELS, machine_named

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


# The INTELLECT-2 stage

STAGE: Mapping[str, float] = {
    "policy_bytes": 6.2e9,
    "interval": 132.0,
    "relays": 2,
    "versions": 2,
    "deaths": 0.0,
}


@pytest.mark.deep
def test_the_core_and_the_tree_play_on_the_same_lines() -> None:
    ours = play("intellect2", nodes=20, duration=600.0, coarse=16, **STAGE).metrics
    tree = play("intellect2_reference", nodes=20, duration=600.0, **STAGE).metrics
    assert ours["got_share"] == tree["got_share"] == 1.0
    assert ours["own_line_seconds_50"] == tree["own_line_seconds_50"] > 0
    assert ours["bound_seconds"] == tree["bound_seconds"]
    assert ours["seconds_100"] >= ours["bound_seconds"]
    assert tree["seconds_100"] >= tree["bound_seconds"]
    assert (
        ours["origin_policies_sent"]
        < tree["origin_policies_sent"]
        == pytest.approx(2.0, rel=0.02)
    )
    assert tree["relays_policies_sent"] == pytest.approx(20, rel=0.02)
    assert tree["worker_policies_sent_100"] == 0 < ours["worker_policies_sent_50"]
    assert tree["refusals"] > 0


# Machines


def test_profiles_are_within_a_factor_of_two_of_what_was_published() -> None:
    pair = 2 * machine_named("3090").generate_rate(MODELS["8B"], 4096 + 512)
    assert 387 / 2 < pair < 387 * 2
    chat = machine_named("H100").generate_rate(MODELS["32B"], 600)
    assert 2353 / 4 < chat < 2353, "the published figure counts prompts as well"
