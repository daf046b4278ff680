"""Who scores whose updates, and when harm is persistent: Covenant's Gauntlet without a judge.

Theory of operation
-------------------
An update may be well-formed, signed, of the usual norm, and still make the model worse. So
each is tried: a member applies it alone, as much as it counted in the mean, to the weights that
it was computed from, and looks at the loss on text that no member learns from. The *lot* lays
all contributors of a record in a ring, by the digest of record and name, and each scores the
one behind it. So each update is scored by one other member, whom nobody chooses: the digest is
known when all updates are.

A score is a running sum. Harm adds one; help takes off as much as it is of the scorer's own
update's help, one at most. A gain counts as harm only beyond twice its standard error, over
`PARTS` of the text, and nothing counts in a round in which the scorer's own update has not
helped by as much: then the learning rate or the text is at fault. An update that is
`OVERSIZED` is harm without a trial. What is not judged in a round fades.

Members tell each other their scores. One that somebody doubts is scored by all in the next
rounds; when a majority of the members has it at `PERSISTENT`, their signatures are evidence
(`Harm`), and its membership ends as any convict's does.

False accusation: let p be how often an honest update counts as harm. One scorer by lot must see
it once, then a majority twice, so a member is named with p^3 a round at most, if errors are
wholly shared. Where one of the members lies and doubts whom it likes, p^2. Measured: none of
192 trials, so p is below 1/64 with 95 % (docs/performance.md), p^3 below 4 in a million. A run
of 1,000 rounds and 14 members then names an honest one with 5 % at most.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from p2p.identity import PeerId
from roles.diloco.core.messages import HarmScores, Record
from roles.diloco.core.pieces import usual_norm

PERSISTENT: Final = 2.0
"""The running score at which a member is for ending a membership: harm in two rounds that no
help made good."""
OVERSIZED: Final = 30.0
"""Times the median norm beyond which an update is harm by itself: a tenth of it or less counts,
after the clip to three. Honest norms differ by less than a half."""
SIGMAS: Final = 2.0
"""Standard errors that a gain must be away from zero, to count."""
PARTS: Final = 8
"""Of the text that is held out: enough to tell the spread of a gain."""
TRIED: Final = 64
"""Windows of the text that is held out on which updates are tried: a pass over them costs about
what three inner steps of eight windows do."""
MAX_GAIN: Final = 1e30
"""Nats. Beyond it a gain says as little as infinity, and sums of its squares would overflow."""
FADES: Final = 0.8
"""What is left of a score after a round in which nothing was judged: half after three."""
MOST_DOUBTED: Final = 2
"""Members that all score beside the lot. Each costs a member an update's bytes and a look at
the loss, whoever doubts them."""


def lot(record: Record, me: PeerId) -> PeerId | None:
    """Whose update of a record's step this member scores; None if it has none beside it."""
    ring = sorted(
        record.outcome.plan.summed,
        key=lambda peer: hashlib.sha256(record.digest + peer.digest).digest(),
    )
    if me not in ring or len(ring) < 2:
        return None
    return ring[(ring.index(me) + 1) % len(ring)]


def oversized(norms: Mapping[PeerId, float]) -> list[PeerId]:
    """Whose update is far beyond what others' are."""
    limit = OVERSIZED * usual_norm(norms)
    return [peer for peer, norm in norms.items() if norm > limit > 0]


def bounds(gains: Sequence[float]) -> tuple[float, float]:
    """Between what a gain is, by its spread over the parts of the text."""
    if len(gains) < 2 or not all(abs(one) <= MAX_GAIN for one in gains):
        return -math.inf, math.inf
    middle = statistics.fmean(gains)
    error = SIGMAS * statistics.stdev(gains) / math.sqrt(len(gains))
    return middle - error, middle + error


class Gauntlet:
    """One member's scores of the others."""

    def __init__(self) -> None:
        self.scores: dict[PeerId, float] = {}

    def judge(
        self,
        me: PeerId,
        gains: Mapping[PeerId, Sequence[float]],
        too_large: Collection[PeerId],
    ) -> None:
        """Add what a round has shown."""
        found = {peer: 1.0 for peer in too_large if peer != me}
        if me in gains and bounds(gains[me])[0] > 0:
            own = statistics.fmean(gains[me])
            for peer in gains.keys() - found.keys() - {me}:
                low, high = bounds(gains[peer])
                found[peer] = 1.0 if high < 0 else -max(0.0, min(1.0, low / own))
        scores = {
            peer: self.scores.get(peer, 0.0) * (1.0 if peer in found else FADES)
            + found.get(peer, 0.0)
            for peer in sorted({*self.scores, *found})
        }
        self.scores = {peer: score for peer, score in scores.items() if score > 0.1}


def doubted(told: Iterable[HarmScores]) -> list[PeerId]:
    """Those that most members doubt: each may doubt `MOST_DOUBTED`."""
    counts: Counter[PeerId] = Counter()
    for one in told:
        worst = sorted(one.found, key=lambda pair: (-pair[1], pair[0]))
        counts.update(peer for peer, _ in worst[:MOST_DOUBTED])
    return sorted(counts, key=lambda peer: (-counts[peer], peer))[:MOST_DOUBTED]
