"""How fast the chunks of one version come, and so how long to wait before one is pulled.

Theory of operation
-------------------
The forest pushes chunks that were never asked for, so there is no request to time. What tells
that one is overdue is how the others come: a node that has lately had a chunk every 50 ms and
hears that its neighbours hold one for a second has probably been left out. Four measures are
kept: the time between chunks lately, the mean over the whole download, how far behind its
neighbours this node usually is, and how long a pull takes.

Waiting too short makes a chunk come twice, once pushed and once pulled; waiting too long leaves
a stripe broken. All waits are multiples of the measured chunk time, so that the same constants
serve 32 KiB chunks on a local network and 4 MiB chunks on a home line, and none is shorter than
``stall`` (`ShardcastConfig.stall`, 0.5 s).
"""

from __future__ import annotations

from typing import Final

from p2p.shardcast.core.average import SmoothedAverage
from p2p.wire import MIB

SLOW_LINK: Final = 1 * MIB
"""Bytes per second of a link that is slow and yet no fault: what the time of a chunk is guessed
from before any has come. Example: a 4 MiB chunk is expected to take 4 s at first, a 64 KiB one
62 ms."""
_LATE: Final = 16
"""Chunk times without a chunk after which what is missing is pulled: eight parents may each
have one chunk under way and one waiting, all of which may come before the one that is missed.
The prototype waited four; with several parents that pulled chunks which were already on their
way. Example: with 50 ms a chunk, 0.8 s."""
_SPARE: Final = 2
"""Chunk times granted beyond one for each chunk that is still to come. Towards the end no more
than those could have come first: with three left, five chunk times are waited instead of 16."""
_LAST: Final = 8
"""Chunks that are the last ones: one of each stripe. For them the usual lag is not waited for:
the line is about to be idle, so there is room to pull what the slowest stripe has not
brought."""
_LONGEST: Final = 4
"""Shortest waits beyond which a pause between two chunks says nothing about the line (2 s at
the usual ``stall``): the origin was down, or had nothing to give. Without the cap one pause of
a minute would be remembered as 15 s a chunk, and nothing would be pulled for minutes."""
_HELD: Final = 1.6
"""Shortest waits for which others may hold a chunk before it is pulled, however quickly chunks
come, unless all that is left would come sooner: 0.8 s at the usual ``stall``. On real lines a
root's stripe is now and then half a second behind the others, and what is pulled then is under
way already. Eight even lines of 20 Mbit/s (``lab_even_20``, level 3): with 1.0, 4.6 % of the
chunks came twice, and it took 1.14 times the bound; with 1.6, 1.8 % and 1.10; with 2.0 the
same. Level 1 does not show it: the streams of its lines share evenly."""
_LAGS: Final = 2
"""Times the usual lag behind others after which a chunk is late. Neighbours stand at different
depths of different stripes, and roots differ in strength, so a node may be behind by a constant
amount for every chunk and miss none. Example: a node that usually gets chunks 1.5 s after its
first neighbour pulls what is 3 s behind, not what is 0.5 s behind. Four deviations beyond the
average, as for sources, was tried: behind weak parents lags differ so much that strong nodes
waited for 3.4 s, not 1.8."""


_PULLS: Final = 2
"""Times that a pull takes for which others may hold a chunk at least: a push that comes within
one would have been first, and the answer is one chunk more on an uplink that is full already.
Seven ADSL lines of 4 Mbit/s, whose pulls take 1.5 s, level 3, three seeds: with 0, 8 % of the
chunks come twice, and all take 1.30 times the bound; with 2, 6 % and 1.26. Added to the other
waits it was 5 % and 1.24, but two of the seven that pass nothing on, and answer what is asked
of them after 1.5 s, made it 12.5 s instead of 8.8 in the median (level 1); now 8.9. Where a
pull takes 0.1 s nothing changes."""


class ChunkPace:
    """What the arrivals of one version teach about waiting for the rest of it."""

    __slots__ = (
        "_arrived",
        "_lag",
        "_lately",
        "_mean",
        "_pull",
        "_stall",
        "_started",
        "progress",
        "pushed_at",
    )  # fmt: skip

    def __init__(self, guess: float, now: float, stall: float) -> None:
        self.progress = now
        """When the last chunk came."""
        self.pushed_at = now
        """When one last came along a stripe. Answers do not count: a node to which nothing is
        pushed must go on pulling. When they did, one whose origin had been restarted pulled
        four chunks, waited as for a push, and took the wait for its line: 85 kB/s on a
        loopback."""
        self._stall = stall
        self._lately = SmoothedAverage(guess)
        self._lag = SmoothedAverage()
        self._pull = SmoothedAverage()
        """Seconds from a request to its chunk."""
        self._started, self._arrived, self._mean = now, 0, guess

    @property
    def chunk_time(self) -> float:
        """Seconds between two chunks that come, lately."""
        return self._lately.value

    def note_arrival(self, now: float, *, pushed: bool) -> None:
        """A chunk came for the first time; ``pushed`` along a stripe."""
        self._lately.observe(min(now - self.progress, _LONGEST * self._stall))
        self._arrived += 1
        self._mean = (now - self._started) / self._arrived
        self.progress = now
        if pushed:
            self.pushed_at = now

    def note_lag(self, lag: float) -> None:
        """A pushed chunk came ``lag`` seconds after another peer was known to hold it."""
        self._lag.observe(lag)

    def note_pull(self, took: float) -> None:
        """A chunk that was asked for came after so many seconds."""
        self._pull.observe(min(took, _LONGEST * self._stall))

    def silence(self, left: int) -> float:
        """Seconds without a chunk along a stripe, of ``left`` to come, after which all of them
        are pulled.

        The smaller of the two chunk times counts: a long pause at the end stretches the recent
        one, and must not teach patience.
        """
        return max(self._stall, min(_LATE, left + _SPARE) * min(self._lately.value, self._mean))

    def patience(self, left: int) -> float:
        """Seconds for which others may hold a chunk before it is pulled, with ``left`` to
        come."""
        silence = self.silence(left)
        if left <= _LAST:
            return silence
        held = min(_HELD * self._stall, left * self._lately.value)
        return max(silence, held, _LAGS * self._lag.value, _PULLS * self._pull.value)
