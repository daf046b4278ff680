"""The whole spine at level L1: roles, services and cores of the demo, in virtual time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import load_scenario

DEMO_KEYS = {
    "peers", "greedy_start", "greedy_end", "reward_start", "reward_end", "policies",
    "staleness_max", "rollouts_accepted", "rollouts_rejected", "cheater_submitted",
    "cheater_accepted", "honest_rejected", "policy_bytes", "origin_upload_bytes",
    "leaf_share_from_peers", "seconds",
}  # fmt: skip


def spine(seed: int) -> Result:
    return run_scenario(load_scenario("spine"), seed)


@pytest.mark.parametrize("seed", range(1, 21))
def test_the_run_ends_whole_whatever_the_seed(seed: int) -> None:
    result = spine(seed)
    assert result.ok, [entry for entry in result.expectations if not entry["ok"]]
    assert set(result.metrics) >= DEMO_KEYS
    metrics = result.metrics
    assert float(metrics["reward_end"]) > float(metrics["reward_start"])
    payload = float(metrics["policy_bytes"]) * float(metrics["policies"])
    # The first policy as it is, all others as patches of a hundredth.
    assert float(metrics["origin_upload_bytes"]) <= 0.5 * payload


def test_the_same_seed_gives_the_same_trace_under_another_hash_seed(tmp_path: Path) -> None:
    hashes = []
    for hash_seed in ("1", "2"):
        result = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-m", "sim", "run", "spine", "--seed", "5", "--json", str(result)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        )
        hashes.append(json.loads(result.read_text())["trace_hash"])
    assert hashes[0] == hashes[1] == spine(5).trace_hash
    assert spine(6).trace_hash != hashes[0]
