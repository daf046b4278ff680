"""A machine's clocks, right or wrong, through all lives of its node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sim.kernel.queue import EventQueue, nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockModel:
    """Speed of a machine's clocks and work. The default has no faults."""

    skew: float = 0.0
    """Seconds by which the wall clock is ahead."""

    rate: float = 1.0
    """Seconds of its clocks in a second."""

    slowness: float = 1.0
    """Factor on the cost of blocking work."""


class MachineClock:
    """The clocks of one machine. A restart of its process does not set them right."""

    __slots__ = ("_local", "_queue", "_since", "is_true", "model")

    def __init__(self, queue: EventQueue) -> None:
        self.model = ClockModel()
        self.is_true = True
        """True if the monotonic clock shows, and has always shown, virtual time."""
        self._queue: Final = queue
        self._since = 0
        self._local = 0.0

    def __repr__(self) -> str:
        return f"MachineClock({self.now():.6f} s, {self.model})"

    def now(self) -> float:
        """Monotonic seconds, as the machine counts them."""
        if self.is_true:
            return self._queue.now / 1e9
        return self._local + (self._queue.now - self._since) / 1e9 * self.model.rate

    def due(self, deadline: float) -> int:
        """Return the first nanosecond of virtual time at which `now` is at least
        ``deadline``.
        """
        if self.is_true:
            return nanoseconds(deadline)
        return self._since + nanoseconds((deadline - self._local) / self.model.rate) + 1

    def set_model(self, model: ClockModel) -> None:
        """Use this model from now on. Running sleeps end as planned."""
        if model.rate != self.model.rate:
            self._local, self._since = self.now(), self._queue.now
            self.is_true = False
        self.model = model

    def change(self, **fields: float) -> None:
        """Set some fields of the model."""
        self.set_model(replace(self.model, **fields))
