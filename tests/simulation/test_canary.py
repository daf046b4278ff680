"""What the simulator relies on in trio, pinned in plain processes: pytest-trio and Hypothesis
set the same switches and would hide that they were not set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio._core import _run

ROOT = Path(__file__).parent.parent.parent


def python(*arguments: str, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    return done.stdout


def canary(mode: str, seed: int, hash_seed: str) -> str:
    return python("-m", "tests.simulation.canary", mode, str(seed), hash_seed=hash_seed)


def test_trio_still_has_both_switches() -> None:
    assert isinstance(_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert hasattr(_run._r, "seed")
    assert trio.__version__.startswith("0.35.")


def test_the_order_of_a_thousand_tasks_is_a_function_of_the_seed() -> None:
    assert canary("seeded", 1, "1") == canary("seeded", 1, "2")
    assert canary("seeded", 1, "1") != canary("seeded", 2, "1")


@pytest.mark.deep
def test_without_the_switches_the_order_is_free() -> None:
    """If this fails the canary has gone blind, not the simulator."""
    assert canary("free", 1, "1") != canary("free", 1, "1")
