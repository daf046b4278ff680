"""The same seeds in another process, with other hashes and perhaps another Python.

``SHOAL_OTHER_PYTHON`` names the executable of another Python that has Shoal and its
dependencies, of the same versions; ``SHOAL_OTHER_SEEDS`` sets how many storms are compared,
``SHOAL_OTHER_SECONDS`` how long each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.hashes import KINDS, hashes, mixed
from tests.sweeps import DEEP

ROOT = Path(__file__).parent.parent.parent
OTHER = os.environ.get("SHOAL_OTHER_PYTHON", sys.executable)
COUNT = int(os.environ.get("SHOAL_OTHER_SEEDS", str(len(KINDS) if DEEP else 3)))
SECONDS = float(os.environ.get("SHOAL_OTHER_SECONDS", "35"))


def test_another_process_does_the_same() -> None:
    ended = subprocess.run(
        [OTHER, "-m", "tests.simulation.hashes", str(SECONDS), *mixed(COUNT)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout) == hashes(mixed(COUNT), SECONDS)


def test_seeds_differ_and_repeat() -> None:
    once = hashes(["ledger:1", "gossip:1"], 20.0)
    assert once == hashes(["ledger:1", "gossip:1"], 20.0)
    assert once["ledger:1"] != hashes(["ledger:2"], 20.0)["ledger:2"]
