"""A policy larger than memory allows: published, fetched and kept in bounded memory, once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bench.store import spread
from p2p.wire import MIB

pytestmark = pytest.mark.deep

SIZE = 2048 * MIB
MEMORY_MIB = 600  # anonymous memory of any process
DISK = 1.05  # bytes on a receiver's disk, of the policy's


def test_more_than_memory_holds_in_bounded_memory_and_one_copy() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep the last three
        found = spread(Path(folder), SIZE, 1)
    assert found["memory MiB"] <= MEMORY_MIB
    assert found["disk, of the policy"] <= DISK
