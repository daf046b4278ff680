"""What is known of the way to each peer, and so how much may be on it.

Theory of operation
-------------------
A line is kept busy by as much as fits on it: its rate times its round trip, and a little to
choose from when the first of that has arrived. Less, and it idles between a word that a chunk
came and the next chunk; more, and what a slow peer hoards a fast one could have carried. Both
factors are measured: the rate by how fast chunks leave (`p2p.shardcast.core.queue`), the round
trip by the time between an invitation to send and what it brings, or between a chunk's leaving
and word of its coming.

A round trip is the least of what was measured lately, since the rest of a sample is waiting: it
falls at once and rises slowly, as BBR's does (Cardwell et al., ACM Queue 2016).
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.patience import SMOOTHING
from p2p.shardcast.core.peers import MAX_REMEMBERED

CREDIT: Final = 2
"""Chunks that a root may owe beyond what its line holds. With one it idles for a round trip per
chunk; with more, slow roots hoard what fast ones could carry."""
MAX_CREDIT: Final = 64
"""Chunks that a root may owe whatever it says of its line: a third of a second of 50 Mbit/s.
One that grants itself all of it and relays nothing costs as many chunks once."""
UNKNOWN_ROUND_TRIP: Final = 0.1
"""Seconds that a round trip is taken for before it is measured: within a continent, or across
one ocean. It decides how many chunks the first roots get ahead."""


class Line:
    """The way to one peer and back."""

    __slots__ = ("_round_trip",)

    def __init__(self) -> None:
        self._round_trip: float | None = None

    @property
    def round_trip(self) -> float:
        """Seconds; `UNKNOWN_ROUND_TRIP` before the first measurement."""
        return UNKNOWN_ROUND_TRIP if self._round_trip is None else self._round_trip

    def note_round_trip(self, sample: float) -> None:
        """Something took ``sample`` seconds there and back, some of it perhaps waiting."""
        before = self._round_trip
        if before is None or sample < before:
            self._round_trip = sample
        else:
            self._round_trip = before + SMOOTHING / 2 * (sample - before)

    def credit(self, rate: float) -> int:
        """Chunks that a root at the other end may owe if its children take ``rate`` of them a
        second."""
        return min(MAX_CREDIT, CREDIT + int(rate * self.round_trip))


class Lines:
    """The line to each peer."""

    def __init__(self) -> None:
        self._lines: BoundedDict[PeerId, Line] = BoundedDict(MAX_REMEMBERED)

    def to(self, peer: PeerId) -> Line:
        """What is known of the way to ``peer``; kept when the peer goes, since it may be
        back."""
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = Line()
        return line
