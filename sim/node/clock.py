"""How a machine keeps time: its clocks, right or wrong, through all lives of its node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sim.kernel.queue import EventQueue, nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a machine's clocks run, and its work goes. The default is a machine without
    faults."""

    skew: float = 0.0
    """Seconds by which the wall clock is ahead."""

    rate: float = 1.0
    """Seconds of its clocks in a second."""

    slowness: float = 1.0
    """Factor on the cost of blocking work."""


class MachineClock:
    """The clocks of one machine. A restart of its process does not set them right."""

    __slots__ = ("_local", "_queue", "_since", "is_true", "pace")

    def __init__(self, queue: EventQueue) -> None:
        self.pace = Pace()
        self.is_true = True
        """Whether the monotonic clock shows, and has always shown, virtual time."""
        self._queue: Final = queue
        self._since = 0
        self._local = 0.0

    def __repr__(self) -> str:
        return f"MachineClock({self.now():.6f} s, {self.pace})"

    def now(self) -> float:
        """Monotonic seconds, as the machine counts them."""
        if self.is_true:
            return self._queue.now / 1e9
        return self._local + (self._queue.now - self._since) / 1e9 * self.pace.rate

    def due(self, deadline: float) -> int:
        """The first nanosecond of virtual time at which `now` is at least ``deadline``."""
        if self.is_true:
            return nanoseconds(deadline)
        return self._since + nanoseconds((deadline - self._local) / self.pace.rate) + 1

    def set_pace(self, pace: Pace) -> None:
        """Run like this from now on. What sleeps already wakes as it was going to."""
        if pace.rate != self.pace.rate:
            self._local, self._since = self.now(), self._queue.now
            self.is_true = False
        self.pace = pace

    def change(self, **fields: float) -> None:
        """Set some fields of the pace."""
        self.set_pace(replace(self.pace, **fields))
