"""The same seeds in another process, with other hashes and perhaps another Python.

``SHOAL_OTHER_PYTHON`` names the executable of another Python that has Shoal and its
dependencies, of the same versions. What the simulator relies on in trio is pinned in plain
processes: pytest-trio and Hypothesis set the same switches and would hide that they were not
set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio._core import _run

from tests.simulation.hashes import KINDS, hashes
from tests.sweeps import DEEP

ROOT = Path(__file__).parent.parent.parent
OTHER = os.environ.get("SHOAL_OTHER_PYTHON", sys.executable)


def elsewhere(*kinds: str, hash_seed: str = "7", python: str = sys.executable) -> object:
    """What `tests.simulation.hashes` prints in a process of its own."""
    ended = subprocess.run(
        [python, "-m", "tests.simulation.hashes", *kinds],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


def test_another_process_does_the_same() -> None:
    kinds = [f"{kind}:1" for kind in KINDS[: None if DEEP else 3]]
    assert elsewhere(*kinds, python=OTHER) == hashes(kinds)


def test_trio_still_has_both_switches() -> None:
    assert isinstance(_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert hasattr(_run._r, "seed")
    assert trio.__version__.startswith("0.35.")


def test_the_order_of_a_thousand_tasks_is_a_function_of_the_seed() -> None:
    once = elsewhere("canary:1", "canary:2", hash_seed="1")
    assert once == elsewhere("canary:1", "canary:2", hash_seed="2")
    assert isinstance(once, dict)
    assert once["canary:1"] != once["canary:2"]


@pytest.mark.deep
def test_without_the_switches_the_order_is_free() -> None:
    """If this fails the canary has gone blind, not the simulator."""
    assert elsewhere("free:1", hash_seed="1") != elsewhere("free:1", hash_seed="1")
