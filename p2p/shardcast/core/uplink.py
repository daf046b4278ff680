"""How much this node's own uplink carries: measured while several peers wait for chunks.

One line alone says little: the peer at its other end may be slow. While chunks are under way to
two peers or more, what leaves in all is mostly what the uplink carries. The best of the last
windows counts, since other programs share the line, and receivers may all have been slow.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

_LANES: Final = 2
"""Peers that must wait for chunks for the uplink to count as full."""
_WINDOW: Final = 1.0
"""Seconds of full uplink in one sample: 76 chunks of 64 KiB at 40 Mbit/s; of 4 MiB at 20 Mbit/s
it takes the chunk that is under way, 1.7 s."""
_SAMPLES: Final = 16
"""Samples of which the best counts."""


class Uplink:
    """Bytes that left while the uplink was full, and how long it was."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._since = math.inf
        """Since when the uplink has been full."""
        self._bytes = 0

    @property
    def rate(self) -> float:
        """Bytes per second that it carries; 0 while nothing is known."""
        return max(self._samples, default=0.0)

    def note_left(self, size: int, lanes: int, now: float) -> None:
        """A chunk has left, and ``lanes`` peers still wait for some."""
        if self._since < math.inf:
            self._bytes += size
            if now - self._since >= _WINDOW:
                self._samples.append(self._bytes / (now - self._since))
                self._since, self._bytes = math.inf, 0
        if lanes < _LANES:
            self._since, self._bytes = math.inf, 0
        elif self._since == math.inf:
            self._since = now
