"""How much this node's own uplink carries: what leaves while it has anything to send.

One line alone says little: the peer at its other end may be slow. So all chunks count together,
whichever peer they go to, and time counts while at least one is under way. A relay of eight
sends each chunk to seven children at once and then waits for the next: its uplink is busy for
most of the time, in bursts of half a second at 8 Mbit/s, and in none of them for long. Measured
while two peers or more waited for a whole second, as it was at first, nodes in a swarm of eight
even links never measured anything.

The best of the last samples counts, since other programs share the line, and receivers may all
have been slow.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from p2p.identity import PeerId
from p2p.wire import KI, MIB

_SAMPLE: Final = MIB
"""Bytes in one sample, of one burst or of several: 0.2 s at 40 Mbit/s, ten times what may be
unsent when a chunk is reported as gone, so that a sample is off by a few percent."""
_UNSENT: Final = 16 * KI
"""Bytes that may still be on this node when the last chunk of a burst is reported as gone
(`p2p.shardcast.sender.UNSENT`): they are not counted."""
_SAMPLES: Final = 16
"""Samples of which the best counts."""


class Uplink:
    """Bytes that left while chunks were under way, and how long that was."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._under_way: dict[PeerId, None] = {}
        """Peers to which a chunk is under way."""
        self._since = 0.0
        """Since when `_seconds` has not grown, while there are any."""
        self._bytes = 0
        self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that it carries; 0 while nothing is known."""
        return max(self._samples, default=0.0)

    def note_begun(self, peer: PeerId, now: float) -> None:
        """A chunk is on its way to ``peer``."""
        if not self._under_way:
            self._since = now
        self._under_way[peer] = None

    def note_left(self, peer: PeerId, size: int, now: float) -> None:
        """The chunk on its way to ``peer`` has left."""
        if peer in self._under_way:
            self._bytes += size
            self._end(peer, now)

    def lose(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone, and with it what was under way."""
        if peer in self._under_way:
            self._end(peer, now)

    def _end(self, peer: PeerId, now: float) -> None:
        del self._under_way[peer]
        self._seconds += now - self._since
        self._since = now
        if not self._under_way:
            self._bytes = max(0, self._bytes - _UNSENT)
        if self._bytes >= _SAMPLE and self._seconds > 0:
            self._samples.append(self._bytes / self._seconds)
            self._bytes, self._seconds = 0, 0.0
