"""Joint check of each worker's most recent accepted submissions.

Theory of operation
-------------------
In bfloat16 a worker that knows what pays may steer: take the paid token in place of the drawn
one wherever the gap between them is small. In one submission the sum of such gaps hides in
honest noise, whose limit is several times its mean. Noise averages out and steering adds up, so
the draws of a worker's last submissions are held against the limits of so many tokens. Other
statistics are not: the mean mantissa error of honest work moves as the policy learns.

A rejection clears the record of its worker, so that noise is paid for once. Nothing is kept
over a restart, nor over an edition with other limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from proofs.checks import ACCEPTED, Evidence, Judgement, Limits, Verdict, judge_draws

SUBMISSIONS: Final = 20
"""Number of submissions of a worker that are judged together. Noise falls with the square root
of their number, and a worker that stops cheating is judged by its new work after as many."""
WORKERS: Final = 1024
"""Most workers with a record: 20 numbers for each of their submissions, 3 MiB in all. The
worker whose last accepted work is oldest loses its record first."""


class DrawHistory:
    """Draws of every worker's most recent submissions."""

    def __init__(self) -> None:
        self._records = BoundedDict[PeerId, deque[Evidence]](WORKERS)
        self._limits: Limits | None = None

    def judge(self, worker: PeerId, pool: Sequence[Evidence], limits: Limits) -> Judgement:
        """Judge an accepted submission together with the worker's earlier ones, and remember it
        if it stays accepted."""
        if limits != self._limits:
            self._records.clear()
            self._limits = limits
        record = self._records.get(worker, deque(maxlen=SUBMISSIONS - 1))
        now = _together(pool)
        judgement = judge_draws([*record, now], limits) if record else ACCEPTED
        if judgement.verdict is Verdict.ACCEPTED:
            record.append(now)
            self._records.renew(worker, record)
        else:
            self._records.pop(worker, None)
        return judgement


def _together(pool: Sequence[Evidence]) -> Evidence:
    """Return the draws of a submission as if it were one group."""
    tokens = sum(one.tokens for one in pool)
    return replace(
        pool[0],
        tokens=tokens,
        gap_mean=sum(one.gap_mean * one.tokens for one in pool) / tokens,
        off=tuple(map(sum, zip(*(one.off for one in pool), strict=True))),
        largest=(),
    )
