"""Costs as counts: a busy machine makes a test slow, and does not make it fail."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def calls_at_most(limit: int) -> Iterator[list[int]]:
    """Fail the test once this thread has called more than `limit` functions in the block, of
    Python or of C. Yields a list whose one item is how many it was."""
    count = [0]

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            count[0] += 1
            if count[0] > limit:
                sys.setprofile(None)
                pytest.fail(f"more than {limit:,} calls, at last in {frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(before)


@contextmanager
def memory_at_most(limit: int) -> Iterator[None]:
    """Fail the test if the block had ``limit`` bytes or more of new memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
