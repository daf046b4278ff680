"""The same seeds under another Python: equal traces. Name its executable in ``SHOAL_OTHER_PYTHON``.

It needs Shoal's dependencies, of the same versions. ``SHOAL_OTHER_SEEDS`` sets how many storms are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.simulation.hashes import hashes

ROOT = Path(__file__).parent.parent.parent
OTHER = os.environ.get("SHOAL_OTHER_PYTHON")
COUNT = int(os.environ.get("SHOAL_OTHER_SEEDS", "8"))
MIX = ("membership", "gossip", "ledger", "policies")


def mixed(count: int) -> list[str]:
    """As many storms, kinds in turn."""
    return [f"{MIX[number % len(MIX)]}:{1 + number // len(MIX)}" for number in range(count)]


@pytest.mark.skipif(OTHER is None, reason="SHOAL_OTHER_PYTHON names no other Python")
def test_another_python_does_the_same_at_both_levels() -> None:
    command = [OTHER or "", "-m", "tests.simulation.hashes", *mixed(COUNT)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout) == hashes(mixed(COUNT))


def test_seeds_differ_and_repeat() -> None:
    once = hashes(["ledger:1", "gossip:1"])
    assert once == hashes(["ledger:1", "gossip:1"])
    assert once["ledger:1"] != hashes(["ledger:2"])["ledger:2"]
