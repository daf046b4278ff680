"""The time that a core has lived, which stands still while its process is stopped.

A process that was stopped (SIGSTOP, a debugger, a machine that swaps) runs its timers first and
reads afterwards what peers sent meanwhile. To a core everybody would seem to have been silent
for that long. So a core that judges silence reads its time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

STALL: Final = 3.0
"""Seconds by which a deadline must be missed for the process to count as stopped. A busy event
loop is less late."""


class OwnTime:
    """Turns the world's time into a core's own, and a core's deadlines into the world's."""

    __slots__ = ("_absent", "_last", "_on_resume")

    def __init__(self, on_resume: Callable[[float], None] = lambda _: None) -> None:
        """Start with own time equal to the world's. ``on_resume`` is called with the own time
        of the first event after a stop."""
        self._absent = 0.0
        self._last = -math.inf
        self._on_resume = on_resume

    def at(self, now: float, due: float) -> float:
        """Return the own time of an event that happens at ``now``.

        ``due`` is the own time of the core's next deadline. If it has been missed by more than
        `STALL`, own time goes on from the event before: when the stop began is not known.
        """
        last, own = self._last, now - self._absent
        if due < last:
            due = last
        if own > due + STALL and last > -math.inf:
            self._absent = now - last
            self._on_resume(last)
            return last
        if own < due and now >= due + self._absent:  # what has come must not be rounded away
            own = due
        self._last = own
        return own

    def deadline(self, due: float) -> float:
        """Return the world's time of a deadline that is ``due`` in own time."""
        return due + self._absent
