"""The whole spine at level L1: roles, services and cores of the demo, in virtual time."""

from __future__ import annotations

import pytest

from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario
from tests.sweeps import swept

DEMO_KEYS = {
    "peers", "greedy_start", "greedy_end", "reward_start", "reward_end", "policies",
    "staleness_max", "rollouts_accepted", "rollouts_rejected", "cheater_submitted",
    "cheater_accepted", "honest_rejected", "policy_bytes", "origin_upload_bytes",
    "leaf_share_from_peers", "seconds",
}  # fmt: skip


def spine(seed: int) -> Result:
    return run_scenario(load_scenario("spine"), seed)


@pytest.mark.parametrize("seed", swept(range(1, 21), 1))
def test_the_run_ends_whole_whatever_the_seed(seed: int) -> None:
    result = spine(seed)
    assert result.ok, [entry for entry in result.expectations if not entry["ok"]]
    assert set(result.metrics) >= DEMO_KEYS
    metrics = result.metrics
    assert float(metrics["reward_end"]) > float(metrics["reward_start"])
    payload = float(metrics["policy_bytes"]) * float(metrics["policies"])
    # The first policy as it is, all others as patches of a hundredth.
    assert float(metrics["origin_upload_bytes"]) <= 0.5 * payload
