"""Receipts: what each stripe brought a peer, told to the origin, which learns who carries what.

Theory of operation
-------------------
A peer that has a whole version tells its origin how
many chunks each stripe pushed to it, and how long the version took (`StripeCounts`). The origin
(`ReceiptBook`) knows how many chunks it gave to each stripe and who stands above whom. What a
peer's children got, times their number, is what it carried. It is *overloaded* if its children
got less than half of what it got itself (which its siblings' receipts say, not its own), or if
it is believed to be stronger than most and carried less than half of that. The second matters
more: a root with full queues asks for less, so one overloaded relay slows its whole stripe, and
all in it carry less than they could. Which of them is to blame no receipt can say, but the one
with the most children for its uplink is among the strongest by belief. Example: twelve of 40
have 20 Mbit/s like all others and are believed to have 80. Each carries 20 to nine children,
the others 7 to three. The twelve are believed 20 from then on, the others 20 as before. A
strong honest peer in a slow stripe suffers too, until it has kept up for some versions.

A receipt travels on its author's own connection and is passed on by no peer: that connection's
handshake is its signature.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.demotion import QUORUM
from p2p.shardcast.forest import Forest, Roster
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import MAX_ROSTER
from p2p.shardcast.messages import MAX_RECEIPT_ROWS, NO_STRIPE, ChunkHeader, Receipt

_REPORTERS: Final = 256
"""Peers of a roster that report on one version, in the mean: an origin of 4,096 peers is
dialled by a sixteenth of them. The lot falls anew with each version, so after a few each relay
has been reported on by several children."""
_FEWEST_CHUNKS: Final = 8
"""Chunks given to a stripe below which it says nothing about who is overloaded: of two chunks,
one may be late for any reason."""


class StripeCounts:
    """The receiver's side: what stripes have brought of each version that is on its way."""

    def __init__(self, local: PeerId) -> None:
        self._local = local
        self._began: dict[bytes, float] = {}
        self._pushed: dict[bytes, dict[tuple[int, int], int]] = {}

    def note_pushed(self, header: ChunkHeader, now: float) -> None:
        """A chunk came for the first time."""
        self._began.setdefault(header.policy, now)
        if header.stripe != NO_STRIPE:
            counts = self._pushed.setdefault(header.policy, {})
            stripe = header.epoch, header.stripe
            if stripe in counts or len(counts) < MAX_RECEIPT_ROWS:
                counts[stripe] = counts.get(stripe, 0) + 1

    def take(self, policy: bytes, roster: Roster | None, now: float) -> Receipt | None:
        """The receipt for a version that is whole; None if the lot fell on others."""
        counts = self._pushed.pop(policy, {})
        took = now - self._began.pop(policy, now)
        if roster is None or self._local not in roster.positions or not counts or took <= 0:
            return None
        lot = int.from_bytes(digest_of(policy + self._local.digest)[:4]) / 2**32
        if lot * len(roster.peers) >= _REPORTERS:
            return None
        rows = tuple((epoch, stripe, count) for (epoch, stripe), count in counts.items())
        return Receipt(policy, max(1, round(1000 * took)), rows)

    def forget(self, policy: bytes) -> None:
        """A version is no longer fetched."""
        self._began.pop(policy, None)
        self._pushed.pop(policy, None)


@dataclass(frozen=True, slots=True)
class Carried:
    """What the children of one peer say about it."""

    peer: PeerId
    rates: tuple[float, ...]
    """Bytes per second that it carried, as each child saw it that has reported lately."""
    limit: float | None
    """What it can carry, if its children got too little of it: the median over all that have
    reported, so that the last of them does not speak for the others."""


class ReceiptBook:
    """The origin's side: the receipts of one version.

    They are judged whenever a roster is made, each together with all that came before it, and
    each peer has one for as long as the version is handed out. If what was judged were
    forgotten, the last to report would be the only ones to speak: two of forty peers that
    reported again, once the others had, had every relay above both of them taken for one that
    carries nothing.
    """

    def __init__(self, chunk_bytes: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._receipts: BoundedDict[PeerId, Receipt] = BoundedDict(MAX_ROSTER)
        self._unjudged: set[PeerId] = set()

    def note(self, peer: PeerId, receipt: Receipt) -> bool:
        """``peer``'s receipt; its first one counts. Whether this is it."""
        if peer in self._receipts:
            return False
        self._receipts[peer] = receipt
        self._unjudged.add(peer)
        return True

    def judge(
        self, forests: Mapping[int, Forest], given: Mapping[tuple[int, int], int]
    ) -> Iterator[Carried]:
        """Who carried what along the forests of these epochs, each stripe of which was
        ``given`` so many chunks. Only of whom a receipt speaks that is new."""
        for (epoch, number), count in given.items():
            if epoch in forests and count >= _FEWEST_CHUNKS and self._unjudged:
                yield from self._judge_stripe(forests[epoch], epoch, number, count)
        self._unjudged.clear()

    def _judge_stripe(
        self, forest: Forest, epoch: int, number: int, given: int
    ) -> Iterator[Carried]:
        stripe, peers = forest.stripes[number], forest.roster.peers
        got: dict[int, tuple[int, float]] = {}
        for place, peer in enumerate(peers):
            receipt = self._receipts.get(peer)
            if receipt is not None:
                rows = {(row[0], row[1]): row[2] for row in receipt.rows}
                chunks = min(given, rows.get((epoch, number), 0))
                got[place] = chunks, 1000 / receipt.milliseconds
        brought = {
            place: median(got[child][0] for child in children if child in got)
            for place, children in stripe.children.items()
            if any(child in got for child in children)
        }
        typical = median(forest.roster.upload(peer) for peer in peers)
        for place, median_chunks in brought.items():
            children = [child for child in stripe.children[place] if child in got]
            new = [peers[child] in self._unjudged for child in children]
            if not any(new):
                continue
            above = stripe.parent[place]
            supply = given if above < 0 else brought.get(above, given)
            slots = len(stripe.children[place])
            rates = [
                got[child][0] * got[child][1] * self._chunk_bytes * slots for child in children
            ]
            believed = forest.roster.upload(peers[place])
            carried = median(rates)
            is_overrated = believed > typical and carried < 0.5 * believed
            is_late = median_chunks < 0.5 * supply
            is_overloaded = len(children) >= QUORUM and (is_overrated or is_late)
            limit = carried if is_overloaded else None
            yield Carried(peers[place], tuple(itertools.compress(rates, new)), limit)
