"""Deadlines that do not count the time for which this process was stopped.

A stopped process that goes on runs its timers first: `trio.fail_after` ends a wait before the
answer, which lies in the kernel, is read. Where somebody else is blamed for a late answer, the
wait has one of these deadlines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from p2p.own_time import STALL
from p2p.world import Timer, World


@contextmanager
def move_on_after_own(world: World, seconds: float) -> Iterator[trio.CancelScope]:
    """Limit a block like `trio.move_on_after`, but start the wait anew after the process was
    stopped."""
    with trio.CancelScope() as scope:
        due = world.now() + seconds
        timer: Timer

        def ring() -> None:
            nonlocal due, timer
            if world.now() > due + STALL:
                due = world.now() + seconds
                timer = world.call_at(due, ring)
            else:
                scope.cancel()

        timer = world.call_at(due, ring)
        try:
            yield scope
        finally:
            timer.cancel()


@contextmanager
def fail_after_own(world: World, seconds: float) -> Iterator[trio.CancelScope]:
    """Limit a block like `trio.fail_after`, but start the wait anew after the process was
    stopped. Raises `trio.TooSlowError`."""
    with move_on_after_own(world, seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise trio.TooSlowError
