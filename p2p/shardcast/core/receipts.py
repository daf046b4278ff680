"""Reports of peers to an origin: of roots that relay nothing, and receipts of versions.

A peer that has a whole version tells its origin how many chunks each stripe pushed to it, and
how long the version took (`receipt_of`). The origin (`ReceiptBook`) knows how many chunks it
gave to each stripe and who stands above whom. What a peer's children got, times their number,
is what it carried. It is *overloaded* if its children got less than half of what it got itself
(which its siblings' receipts say, not its own), or if it is believed to be stronger than most
and carried less than half of that. The second matters more: a root with full queues asks for
less, so one overloaded relay slows its whole stripe, and all in it carry less than they could.

A peer's capacity is the median over the last of these (`Capacities`), so that a minority of
liars moves nothing. A peer that delivered what its own parent did is limited by what it is
given: its claim is believed up to four times the median of what is known. An overloaded
peer is believed what it delivered, and is tried with a little more each version after that.

A receipt travels on its author's own connection and is passed on by no peer: that connection's
handshake is its signature.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, NamedTuple

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.download import Download
from p2p.shardcast.forest import Forest, Roster, RosterEntry
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import MAX_ROSTER
from p2p.shardcast.messages import MAX_RECEIPT_ROWS, NO_STRIPE, ChunkHeader, Receipt

QUORUM: Final = 2
"""Peers that must report a root before it is demoted: with one, any peer could slander any
root. A roster of two has one peer that can."""


def note_pushed(download: Download, header: ChunkHeader) -> None:
    """Count, at the receiver, a chunk that a stripe was the first to bring."""
    stripe, counts = (header.epoch, header.stripe), download.pushed
    if header.stripe != NO_STRIPE and (stripe in counts or len(counts) < MAX_RECEIPT_ROWS):
        counts[stripe] = counts.get(stripe, 0) + 1


def receipt_of(
    download: Download, local: PeerId, roster: Roster | None, now: float
) -> Receipt | None:
    """Return the receipt for a version that is complete; None if another peer was drawn to send
    it."""
    took = now - download.first_at
    if roster is None or local not in roster.positions or not download.pushed or took <= 0:
        return None
    lot = int.from_bytes(digest_of(download.name + local.digest)[:4]) / 2**32
    # Peers of a roster that report on one version, in the mean: an origin of 4,096 peers is
    # dialled by a sixteenth of them. The lot falls anew with each version, so after a few each
    # relay has been reported on by several children.
    if lot * len(roster.peers) >= 256:
        return None
    rows = tuple((*stripe, count) for stripe, count in download.pushed.items())
    return Receipt(download.name, max(1, round(1000 * took)), rows)


class Carried(NamedTuple):
    """Reports about a peer by its children."""

    peer: PeerId
    rates: tuple[float, ...]
    """Bytes per second that the peer carried, one value for each child that has reported
    lately."""
    limit: float | None
    """Capacity of a peer whose children received too little, as the median over all reports;
    else None."""


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
        """Record the receipt of ``peer``. Return True if it is the peer's first, the only one
        that counts."""
        if peer in self._receipts:
            return False
        self._receipts[peer] = receipt
        self._unjudged.add(peer)
        return True

    def judge(
        self, forests: Mapping[int, Forest], given: Mapping[tuple[int, int], int]
    ) -> Iterator[Carried]:
        """Judge the upload of each peer in the forests of these epochs.

        ``given`` maps (epoch, stripe) to the number of chunks given. Nothing is judged if no
        receipt is new.
        """
        for (epoch, number), count in given.items():
            # Chunks given to a stripe below which it says nothing about who is overloaded: of
            # two chunks, one may be late for any reason.
            if epoch in forests and count >= 8 and self._unjudged:
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


def _recent() -> deque[float]:
    # Two versions of eight children, so that an hour ago is forgotten and no child's word moves
    # the median far.
    return deque(maxlen=16)


@dataclass(slots=True)
class _Standing:
    """The state of a peer's upload, as far as the origin knows it."""

    carried: deque[float] = field(default_factory=_recent)
    ceiling: float = math.inf
    unheard: int = 0
    """Number of versions since a child last reported on the peer."""

    @property
    def measured(self) -> float:
        """Median bytes per second that the peer has carried; 0 if nothing is known."""
        return median(self.carried) if self.carried else 0.0


class Capacities:
    """The upload capacities of peers, as an origin believes them."""

    _probation: Final = 8
    """Versions for which a demoted root, or a peer of which no child says anything more, is a
    leaf. Two liars demote one honest root a version, so they keep at most eight relays
    idle."""

    def __init__(self) -> None:
        self._standings: BoundedDict[PeerId, _Standing] = BoundedDict(MAX_ROSTER)
        self._demoted: BoundedDict[PeerId, int] = BoundedDict(MAX_ROSTER)
        """Maps each peer that was demoted as a root to the number of versions for which it
        still relays nothing."""

    def note_demoted(self, peer: PeerId) -> None:
        """Make ``peer`` a leaf for the next versions, since it was demoted as a root."""
        self._demoted[peer] = self._probation

    def note_version(self) -> None:
        """Count one more version that is handed out."""
        for peer, left in list(self._demoted.items()):
            if left > 1:
                self._demoted[peer] = left - 1
            else:
                del self._demoted[peer]
        for standing in self._standings.values():
            standing.unheard += 1
            if standing.unheard > self._probation:
                standing.ceiling = math.inf

    def note_carried(self, peer: PeerId, rates: Sequence[float], limit: float | None) -> None:
        """Record the upload of `peer` as its children report it (`Carried`)."""
        standing = self._standings.get(peer)
        if standing is None:
            standing = self._standings[peer] = _Standing()
        standing.unheard = 0
        standing.carried.extend(rates)
        # A line that was busy with something else has twice its share after four versions.
        standing.ceiling = 1.25 * standing.ceiling if limit is None else limit

    def believe(self, entries: Iterable[RosterEntry]) -> list[RosterEntry]:
        """Return the entries with each claim limited to its believed part."""
        claims = list(entries)
        standings = {e.peer: self._standings.get(e.peer, _Standing()) for e in claims}
        known = [one.measured for one in standings.values() if one.measured]
        if len(known) <= QUORUM:  # so few could be friends
            known = [entry.upload for entry in claims if entry.upload]
        # Twice the median would leave strong lines idle: the strongest tenth of an honest swarm
        # has four to five times the median.
        most = 4 * median(known) if known else 0.0
        believed = []
        for entry in claims:
            one = standings[entry.peer]
            upload = min(entry.upload, one.ceiling, max(most, one.measured))
            believed.append(
                replace(entry, upload=0.0 if entry.peer in self._demoted else upload)
            )
        return believed
