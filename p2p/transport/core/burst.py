"""How many bytes are sealed and given to the kernel at a time, by how fast the line takes them.

What is sealed cannot be overtaken: the next heartbeat, or the credit that an origin waits for,
goes behind it. On a fast line large batches save calls; on a slow one they are most of a second
of silence. So a connection that had to wait for its line keeps what it commits to as short as
the line empties it in `HORIZON`, and one that has not is given ever more.

Example: a relay on 20 Mbit/s feeds seven children, each over a connection that carries 0.36
MB/s. With four full records a batch (256 KiB) and 128 KiB in the kernel, a message waits for
up to a second behind a chunk of a megabyte; with 36 KiB of each, for 0.2 s.
"""

from __future__ import annotations

from typing import Final

from p2p.wire import KI

HORIZON: Final = 0.1
"""Seconds of its line that a connection commits to at a time: as long as the queue in front of
a home's line mostly is. Less makes more wake-ups, which are what slow lines cost. Above 0.7
MB/s a whole record of 64 KiB goes at once, above 2.6 MB/s all that ever does."""
SHORTEST: Final = 32 * KI
"""Bytes committed to on the slowest line: half a chunk of 64 KiB, so that the kernel wakes us
two or three times for each."""
_GROWTH: Final = 4 * KI
"""Bytes more for each batch that the kernel took at once. The 56 batches that lead from 32 to
256 KiB are 8 MB, a tenth of a second of a fast line; the few that a slow line takes at once
after each pause change little."""


class Burst:
    """How much one connection commits to at a time."""

    __slots__ = ("_longest", "size")

    def __init__(self, longest: int) -> None:
        """Fast until it has had to wait: ``longest`` bytes."""
        self._longest = longest
        self.size = longest
        """Bytes."""

    def note_free(self) -> None:
        """A batch was taken at once."""
        self.size = min(self._longest, self.size + _GROWTH)

    def note_slow(self, count: int, seconds: float) -> None:
        """A batch of ``count`` bytes took so long."""
        carried = int(HORIZON * count / seconds) if seconds > 0 else self._longest
        self.size = max(SHORTEST, min(self._longest, (self.size + carried) // 2))
