"""A policy larger than memory allows: published, fetched and kept in bounded memory, once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bench.store import spread
from p2p.wire import MIB

pytestmark = pytest.mark.deep


def test_more_than_memory_holds_in_bounded_memory_and_one_copy() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep the last three
        found = spread(Path(folder), 2048 * MIB, 1)
    assert found["memory MiB"] <= 600  # anonymous memory of any process
    assert found["disk, of the policy"] <= 1.05  # bytes on a receiver's disk, of the policy's
