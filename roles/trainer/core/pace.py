"""How fast each worker brings accepted work: the proof of its hardware that nobody can claim.

A mean over the last half hour, in which newer tokens weigh more; of a worker that has just come
it is over what there is of it. What one says of its own machine is not asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

MEMORY: Final = 1_800.0
"""Seconds after which a token weighs a third of a new one: a policy of a large model, and a few
submissions of a slow machine."""
FIRST: Final = 60.0
"""Seconds that are counted at least: of the first submission alone no rate is known."""
MAX_WORKERS: Final = 4_096
"""Workers with a pace; the one that was heard of longest ago goes first."""
SHOWN: Final = 64
"""The fastest, of which a status speaks: 100 bytes each."""


@dataclass(slots=True)
class _Pace:
    since: float
    """When its first tokens came."""
    at: float
    weighed: float = 0.0
    """Tokens, each by its weight as of ``at``."""

    def per_second(self, now: float) -> float:
        known = MEMORY * -math.expm1(-max(now - self.since, FIRST) / MEMORY)
        return self.weighed * math.exp(-(now - self.at) / MEMORY) / known


class Paces:
    """The pace of each worker."""

    def __init__(self) -> None:
        self._paces: BoundedDict[PeerId, _Pace] = BoundedDict(MAX_WORKERS)

    def note(self, worker: PeerId, tokens: int, now: float) -> None:
        """So many accepted tokens of a worker have come."""
        pace = self._paces.get(worker) or _Pace(now, now)
        pace.weighed = pace.weighed * math.exp(-(now - pace.at) / MEMORY) + tokens
        pace.at = now
        self._paces.renew(worker, pace)

    def of(self, worker: PeerId, now: float) -> float:
        """Accepted tokens a second; 0 of one that is unknown."""
        pace = self._paces.get(worker)
        return 0.0 if pace is None else pace.per_second(now)

    def health(self, now: float, least: float) -> dict[str, dict[str, object]]:
        """The fastest, by name, and whether each brings ``least``."""
        rates = {worker: pace.per_second(now) for worker, pace in self._paces.items()}
        fastest = sorted(rates, key=lambda worker: -rates[worker])[:SHOWN]
        return {
            str(worker): {
                "tokens_per_second": round(rates[worker], 1),
                "is_slow": rates[worker] < least,
            }
            for worker in fastest
        }
