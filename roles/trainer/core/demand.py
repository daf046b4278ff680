"""Number of places that each worker is asked for next.

The trainer holds a stock of groups: those that wait in the buffer, those of places that it
wants and that have not been scored, and those that it has asked for. The stock is kept at the
buffer's capacity, which is a little more than a step learns from: with less a step waits, with
more work goes stale. What is missing is shared evenly among the workers that were heard of
lately. How many groups of a place teach anything is measured. No I/O: the caller knows the
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

PATIENCE: Final = 60.0
"""Seconds during which places that were asked for count as on their way."""
ACTIVE: Final = 60.0
"""Seconds after its last request until a worker gets no share any more."""
SMOOTHING: Final = 0.05
"""Weight of the newest place in the measured number of groups per place that teach."""
LEAST: Final = 0.25
"""Least number of groups per place that are assumed to teach. Without this bound, a policy that
is nearly sure of all answers would have everything drawn."""
MAX_WORKERS: Final = 4_096
"""Most workers with a share: as many as the gate has newcomers."""


@dataclass(slots=True)
class _Worker:
    heard: float
    asked: int = 0
    """Places that the worker was asked for and has not committed."""
    asked_at: float = -math.inf


class Demand:
    """The trainer's stock of groups, and the shares of the workers that fill it."""

    def __init__(self, capacity: int, submission: int, window: int) -> None:
        """Keep up to `capacity` groups; a place has `submission` of them, a window `window`
        places."""
        self._capacity = capacity
        self._window = window
        self._workers: BoundedDict[PeerId, _Worker] = BoundedDict(MAX_WORKERS)
        self.teaching = submission / 2
        """Measured number of groups per place that teach."""

    def note_place(self, teaching: int) -> None:
        """Update the measured number of teaching groups per place with a committed place, which
        claims that ``teaching`` of its groups do."""
        self.teaching += SMOOTHING * (max(float(teaching), LEAST) - self.teaching)

    def note_committed(self, worker: PeerId, places: int, now: float) -> None:
        """Note that a worker has committed ``places`` of the places that it was asked for."""
        known = self._hear(worker, now)
        known.asked = max(0, known.asked - places)

    def ask(self, worker: PeerId, stock: float, now: float) -> int:
        """Return how many places `worker` is asked for now.

        Args:
            worker: In standing.
            stock: Groups that wait or were committed and are wanted.
            now: The time in seconds.
        """
        known = self._hear(worker, now)
        known.asked = 0
        active = [one for one in self._workers.values() if now - one.heard <= ACTIVE]
        coming = sum(one.asked for one in active if now - one.asked_at <= PATIENCE)
        missing = (self._capacity - stock) / self.teaching - coming
        known.asked = max(0, min(self._window, math.ceil(missing / max(1, len(active)))))
        known.asked_at = now
        return known.asked

    def _hear(self, worker: PeerId, now: float) -> _Worker:
        known = self._workers.get(worker) or _Worker(now)
        known.heard = now
        self._workers.renew(worker, known)
        return known
