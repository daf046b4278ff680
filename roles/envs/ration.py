"""The time that a process may spend on a call of an environment.

For worker processes only. How much memory they have is a matter of how they are confined
(`roles.envs.client`).

Signals do it, because nothing else stops code that does not return: a thread cannot be ended,
and an exception can be caught by the very loop that hangs.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from roles.envs.base import Ration


def begin_call(ration: Ration) -> None:
    """Let the system end this process after ``ration.cpu`` more seconds of CPU.

    CPU seconds, so that a busy machine fails no task. What waits instead of computing is ended
    by the node, by the clock on its wall; should the node be gone, by the system, at twice
    that.
    """
    signal.setitimer(signal.ITIMER_PROF, ration.cpu)
    signal.setitimer(signal.ITIMER_REAL, 2 * ration.patience)


def end_calls() -> None:
    """Lift the limits that `begin_call` has set."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def interrupted(ration: Ration) -> Iterator[None]:
    """Raise `TimeoutError` in the block after ``ration.patience``, and again after each
    ``ration.cpu`` in case it was caught.

    This is for a process that has too much to lose to be ended: main thread, Python code.
    """

    def interrupt(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"it has not returned for {ration.patience:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, ration.patience, ration.cpu)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
