"""What each worker's accepted work says over hours, beside everybody else's.

Theory of operation
-------------------
A temperature of 0.99, a small adapter on the weights: within the limits of any submission, yet
all of such a worker's submissions lean the same way. What honest work looks like moves with the
policy, so nothing is held against a number; each submission is ranked among all those that came
before it under the same policy. Honest work comes in no order, so its rank is any of them with
the same chance, whatever it is that is ranked (conformal test martingales, Vovk).

Against each worker there is a *bet* that its ranks are too high. A bet of the size c multiplies
its stake by 1 + c (1 - 2 u), where u is the share of the others that are above: on the average
by 1, if the worker is honest. So what the stakes come to exceeds 1 / `CHANCE` at any time with
that chance at most (Ville's inequality): it may be looked at after each submission. A worker
may turn late, so its stake is spread over its next `SUBMISSIONS`, after which it is begun anew.

Noise of honest engines differs: that of one that rounds otherwise is a tenth larger, for ever.
So noise is divided by a margin before it is ranked (`TrustTerms.margin`). Surprise (-log p of
what was drawn against the entropy) is zero in the mean for whoever draws as the seeds say, with
whatever engine; it is ranked as it is, and both ways. A worker that is found was not proved to
lie: it loses its standing and is checked whole, and no more. No I/O; chance is the caller's.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Evidence

CHANCE: Final = 1e-4
"""That an honest worker is found in `SUBMISSIONS` of its work, which costs it a probation: of a
thousand workers one in ten such spans."""
SUBMISSIONS: Final = 2_000
"""Of one worker over which its stakes are spread: a day or two, of what is learnt from."""
SIZES: Final = (0.1, 0.3, 0.9)
"""Of bets: small ones find a small lean in many submissions, large ones a large lean in few."""
WORKERS: Final = 4_096
"""That bets are kept of, 200 bytes each; those whose work was accepted the longest ago go."""
VERSIONS: Final = 8
"""Policies under which work is ranked: more than may be submitted for at a time."""
REFERENCES: Final = 4_096
"""Submissions under one policy that others are ranked among; further ones are not ranked."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a submission is ranked by."""

    off: float
    """Share of its tokens that are not the drawn ones."""
    gap: float
    """Mean gap to those."""
    mantissa: float
    """Mean mantissa error of its states."""
    surprise: float
    """z-statistic over all its groups."""

    @classmethod
    def of(cls, pool: Sequence[Evidence]) -> Signals:
        """Of all groups of a submission."""
        tokens = sum(one.tokens for one in pool)
        chunks = sum(one.chunks for one in pool)
        return cls(
            sum(one.off[0] for one in pool) / tokens,
            sum(one.gap_mean * one.tokens for one in pool) / tokens,
            sum(one.mantissa_mean * one.chunks for one in pool) / chunks,
            sum(one.surprise for one in pool) / math.sqrt(len(pool)),
        )

    def bets(self, margin: float) -> tuple[tuple[int, float, float, float], ...]:
        """What is bet on: the number of a signal, its value, the value that is ranked, and the
        sign: 1 that it is too high."""
        noise = (self.off, self.gap, self.mantissa)
        return (
            *((number, one, one / margin, 1.0) for number, one in enumerate(noise)),
            (len(noise), self.surprise, self.surprise, 1.0),
            (len(noise), self.surprise, self.surprise, -1.0),
        )


@dataclass(slots=True)
class _Record:
    """The bets against one worker."""

    submissions: int = 0
    stakes: list[float] = field(default_factory=list)
    """What those came to that were laid so far, bet after bet."""


class PooledSignals:
    """All workers' bets, and what they are ranked among."""

    def __init__(self, dice: Random, margin: float, chance: float = CHANCE) -> None:
        self._dice = dice
        self._margin = margin
        self._chance = chance
        self._records: BoundedDict[PeerId, _Record] = BoundedDict(WORKERS)
        self._seen: BoundedDict[PolicyVersion, list[list[float]]] = BoundedDict(VERSIONS)

    def note(self, worker: PeerId, version: PolicyVersion, signals: Signals) -> bool:
        """Take in an accepted submission; whether its worker leans too far by now. Its record
        then begins anew."""
        bets = signals.bets(self._margin)
        seen = self._seen.get(version)
        if seen is None:
            seen = self._seen[version] = [[] for _ in bets]
        if len(seen[0]) >= REFERENCES:
            return False
        record = self._records.get(worker)
        if record is None or record.submissions >= SUBMISSIONS:
            record = _Record(stakes=[0.0] * len(bets) * len(SIZES))
        self._records.renew(worker, record)
        factors = [
            1 + size * sign * (1 - 2 * self._rank(seen[number], ranked))
            for number, _, ranked, sign in bets
            for size in SIZES
        ]
        record.submissions += 1
        record.stakes = [
            factor * (stake + 1 / SUBMISSIONS)
            for factor, stake in zip(factors, record.stakes, strict=True)
        ]
        for number, value in {number: value for number, value, _, _ in bets}.items():
            insort(seen[number], value)
        if self.stake(worker) < 1 / self._chance:
            return False
        del self._records[worker]
        return True

    def stake(self, worker: PeerId) -> float:
        """What the bets against a worker come to, in the mean: 1 / ``chance`` finds it."""
        record = self._records.get(worker)
        return sum(record.stakes) / len(record.stakes) if record else 0.0

    def _rank(self, seen: list[float], value: float) -> float:
        """The share of ``seen`` that is above; equals are put in order by chance."""
        above = len(seen) - bisect_right(seen, value)
        equal = len(seen) - above - bisect_left(seen, value)
        return (above + self._dice.random() * (equal + 1)) / (len(seen) + 1)
