"""Rate of accepted work of each worker, which proves the speed of its hardware.

The rate is a weighted mean over the last half hour, in which newer tokens weigh more. For a
worker that has just come it is the mean since then. What a worker says about its own machine is
not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

MEMORY: Final = 1_800.0
"""Seconds after which the weight of a token has fallen to 1/e. This covers a policy of a large
model and a few submissions of a slow machine."""
FIRST: Final = 60.0
"""Shortest time, in seconds, over which a rate is taken, since the first submission alone tells
no rate."""
MAX_WORKERS: Final = 4_096
"""Most workers with a rate. The worker that was heard of longest ago is removed first."""
SHOWN: Final = 64
"""Most workers that a status lists, the fastest ones: 100 bytes each."""


@dataclass(slots=True)
class _Pace:
    since: float
    """Time at which the first tokens of the worker came."""
    at: float
    weighed: float = 0.0
    """Sum of the weights of all tokens as of ``at``."""

    def per_second(self, now: float) -> float:
        known = MEMORY * -math.expm1(-max(now - self.since, FIRST) / MEMORY)
        return self.weighed * math.exp(-(now - self.at) / MEMORY) / known


class Paces:
    """The rate of each worker."""

    def __init__(self) -> None:
        self._paces: BoundedDict[PeerId, _Pace] = BoundedDict(MAX_WORKERS)

    def note(self, worker: PeerId, tokens: int, now: float) -> None:
        """Record that ``tokens`` accepted tokens of a worker have come."""
        pace = self._paces.get(worker) or _Pace(now, now)
        pace.weighed = pace.weighed * math.exp(-(now - pace.at) / MEMORY) + tokens
        pace.at = now
        self._paces.renew(worker, pace)

    def of(self, worker: PeerId, now: float) -> float:
        """Return the accepted tokens per second of a worker; 0 if the worker is unknown."""
        pace = self._paces.get(worker)
        return 0.0 if pace is None else pace.per_second(now)

    def health(self, now: float, least: float) -> dict[str, dict[str, object]]:
        """Return the fastest workers by name, and whether each reaches ``least`` tokens per
        second."""
        rates = {worker: pace.per_second(now) for worker, pace in self._paces.items()}
        fastest = sorted(rates, key=lambda worker: -rates[worker])[:SHOWN]
        return {
            str(worker): {
                "tokens_per_second": round(rates[worker], 1),
                "is_slow": rates[worker] < least,
            }
            for worker in fastest
        }
