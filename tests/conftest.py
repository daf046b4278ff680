"""What all tests share: one Hypothesis profile, which tests are played, and how they are dealt
to several workers.

A test marked ``deep`` is played with ``SHOAL_DEEP=1`` only (``make test-deep``); the everyday
suite, ``make test``, leaves it out. `tests.sweeps` is the same for laws with many parameters.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support import cpu
from tests.support.cpu import (  # hooks, which pytest finds by their names
    pytest_runtest_protocol as pytest_runtest_protocol,
    pytest_sessionfinish as pytest_sessionfinish,
    pytest_terminal_summary as pytest_terminal_summary,
    pytest_testnodedown as pytest_testnodedown,
)
from tests.sweeps import DEEP

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # `pytest` alone needs no workers
    LoadScopeScheduling = object

# The same examples on every run: a failure in CI is a failure at home. No other number is set
# anywhere. Deadlines would measure the machine.
settings.register_profile(
    "shoal",
    derandomize=True,
    deadline=None,
    max_examples=300 if DEEP else 40,
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
"""Tests of real processes, marked ``live``. They look at memory, descriptors and answers in
real time: one worker has them all, so that a swarm of ten processes runs alone.
"""


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LIVE):
            item.add_marker("live")
    if not DEEP:
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
    if hasattr(config, "workerinput"):
        _start_the_longest_first(items)


def pytest_collection_finish() -> None:
    """What all tests import is looked through once, and not by each collection of garbage."""
    gc.collect()
    gc.freeze()


def _start_the_longest_first(items: list[pytest.Item]) -> None:
    table = cpu.read_table()
    cost: defaultdict[str, float] = defaultdict(float)
    for path in {item.nodeid.partition("::")[0] for item in items}:
        cost[unit_of(path)] += table.get(path, (0.0, 0.0))[cpu.COLUMN]
    items.sort(key=lambda item: -cost[unit_of(item.nodeid)])


def unit_of(nodeid: str) -> str:
    """Return what one worker plays as a whole: a file, or all tests of real processes."""
    return "live" if nodeid.startswith(LIVE) else nodeid.partition("::")[0]


class ByFile(LoadScopeScheduling):
    """Deals whole files to the workers, in the order in which they were collected.

    A file is the unit because its tests share what is costly to make (a module's fixtures, a
    scenario that was run once), and because the order inside it stays what it is without
    workers.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        # by the number of tests, which says nothing of their cost
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: who plays real processes waits for most of its time."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes in one thread: sums have one order, and workers do not share cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


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
