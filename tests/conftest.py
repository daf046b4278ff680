"""What all tests share: one Hypothesis profile, and how the tests are dealt to several
workers.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # `pytest` alone needs no workers
    LoadScopeScheduling = object

# The same examples on every run: a failure in CI is a failure at home. Deadlines would measure
# the machine.
settings.register_profile(
    "shoal",
    derandomize=True,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shoal")


LIVE: Final = (
    "tests/attacks/test_host_descriptors.py",
    "tests/attacks/test_live.py",
    "tests/browser/",
    "tests/conformance/test_stops.py",
    "tests/e2e/",
    "tests/interop/",
    "tests/simulation/test_lab.py",
    "tests/simulation/test_nodes.py",
    "tests/unit/test_engine_worker.py",
)
"""Tests of real processes, which look at memory, descriptors and answers in real time: one
worker has them all, so that a swarm of ten processes never has another one beside it."""


NEEDS_TORCH: Final = re.compile(
    r"^(import torch|from (torch|safetensors|roles\.engines\.torch|roles\.calibrate|"
    r"roles\.demo\.alone|roles\.engines\.client)\b)",
    re.MULTILINE,
)
"""What a file of tests imports that cannot be imported without torch."""
HAS_TORCH: Final = importlib.util.find_spec("torch") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """``make check`` has no torch, and leaves out the files that need it."""
    if HAS_TORCH or collection_path.suffix != ".py":
        return None
    return bool(NEEDS_TORCH.search(collection_path.read_text(encoding="utf-8"))) or None


class ByFile(LoadScopeScheduling):
    """Deals whole files to the workers, in the order in which they were collected.

    A file is the unit because its tests share what is costly to make (a module's fixtures, a
    scenario that was run once), and because the order inside it stays what it is without
    workers. The order of collection suits: `LIVE` begins early, and it is the longest unit; the
    files at the end, tests/unit, take seconds each, so that the workers end together.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # by the number of tests, which says nothing of their cost
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return "live" if nodeid.startswith(LIVE) else nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real model; a test that asks for it is skipped where it is not."""
    from roles.models.fetch import MODELS, default_folder

    folder = default_folder(MODELS["smollm2"])
    if not folder.exists():
        pytest.skip(f"the real model is not in {folder}: `make model` fetches it (93 MB)")
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Called where there are workers: ``make test``, ``pytest -n 2``."""
    return ByFile(config, log)
