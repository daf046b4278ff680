"""Estimates of how fast things come, and so of when they are late.

The forest pushes chunks that were never asked for, so there is no request to time. What tells
that one is overdue is how the others come: a node that has lately had a chunk every 50 ms and
hears that its neighbours hold one for a second has probably been left out.

Waiting too short makes a chunk come twice, once pushed and once pulled; waiting too long leaves
a stripe broken. All waits are multiples of the measured chunk time, so that the same constants
serve 32 KiB chunks on a local network and 4 MiB chunks on a home line, and none is shorter than
``stall`` (`ShardcastConfig.stall`, 0.5 s).
"""

from __future__ import annotations

import math
from typing import Final

from p2p.wire import MIB


class SmoothedAverage:
    """An exponentially weighted moving average: each sample moves it by a quarter of the way.

    TCP gives a round trip 1/8 (RFC 6298); here samples are chunks, which are fewer: after four
    of them two thirds of the average are theirs.
    """

    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def observe(self, sample: float) -> None:
        """Add one sample."""
        self.value += (sample - self.value) / 4

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value:.4g})"


class Patience:
    """Time to wait for an event, estimated from past waits.

    This is the only estimator of "late" in SHARDCAST. It waits for what is usual plus four
    times what samples usually differ from that, as TCP's retransmission timeout (RFC 6298), at
    least ``floor`` and at most ``ceiling`` seconds: a steady line is late soon, an uneven one
    is waited for. The floor keeps a queue that is about to move from being taken for a failure;
    the ceiling keeps a peer from teaching others to wait for it.
    """

    __slots__ = ("_ceiling", "_deviation", "_floor", "usual")

    def __init__(
        self, usual: float = 0.0, floor: float = 0.0, ceiling: float = math.inf
    ) -> None:
        """Start with the guess ``usual`` in seconds, which counts like one sample; 0 means no
        guess."""
        self._floor, self._ceiling = floor, ceiling
        self.reset(usual)

    def reset(self, usual: float) -> None:
        """Forget the samples and start from ``usual``, with half of it as the deviation."""
        self.usual = usual
        """Recent mean of the samples in seconds; 0 if it is unknown."""
        self._deviation = usual / 2

    def observe(self, sample: float) -> None:
        """Add a sample in seconds."""
        if not self.usual:
            self.reset(sample)
            return
        self._deviation += (abs(sample - self.usual) - self._deviation) / 4
        self.usual += (sample - self.usual) / 4

    def wait(self, floor: float = 0.0) -> float:
        """Seconds after which a chunk is late; at least ``floor``, whatever the ceiling."""
        late = max(self._floor, self.usual + 4 * self._deviation)
        return max(floor, min(self._ceiling, late))


SLOW_LINK: Final = 1 * MIB
"""Bytes per second of a link that is slow and yet no fault. The time of a chunk is guessed from
it until one has come: 4 s for the largest, 62 ms for 64 KiB."""
IN_FLIGHT: Final = 16
"""Chunks that may come before a missed one: each of eight parents may have one under way and
one waiting. After as many chunk times without a chunk, missing ones are pulled."""


def shortest_wait(chunk_bytes: float, stall: float) -> float:
    """Return the seconds that any peer is given at least, however fast it has been.

    This is ``stall``, or twice the time that a slow link takes for a chunk.
    """
    return max(stall, 2 * chunk_bytes / SLOW_LINK)


def longest_wait(chunk_bytes: float, stall: float) -> float:
    """Return the seconds that any peer is given at most, however slow it has been. By then,
    other peers may have the chunk.

    This is 2 s at the usual ``stall``, or 8 chunk times of a slow link.
    """
    return 4 * shortest_wait(chunk_bytes, stall)


class ChunkPace:
    """Estimates the time to wait for the rest of a version from its arrivals."""

    def __init__(self, chunk_bytes: float, now: float, stall: float) -> None:
        self.progress = now
        """Time at which the last chunk came."""
        self.pushed_at = now
        """Time at which a chunk last came along a stripe. Requested chunks do not count: a node
        to which nothing is pushed must go on pulling."""
        self._stall = stall
        self._longest = longest_wait(chunk_bytes, stall)
        guess = chunk_bytes / SLOW_LINK
        self._lag = SmoothedAverage()
        self._lately = SmoothedAverage(guess)
        self._started, self._arrived, self._mean = now, 0, guess

    @property
    def chunk_time(self) -> float:
        """Recent mean seconds between two chunks that arrive."""
        return self._lately.value

    def note_arrival(self, now: float, *, pushed: bool) -> None:
        """Record a chunk that arrived for the first time; ``pushed`` is True if it came along a
        stripe.

        A long pause says nothing about the line: the origin was down, or had nothing to give.
        """
        self._lately.observe(min(now - self.progress, self._longest))
        self._arrived += 1
        self._mean = (now - self._started) / self._arrived
        self.progress = now
        if pushed:
            self.pushed_at = now

    def note_lag(self, lag: float) -> None:
        """Record that a pushed chunk came ``lag`` seconds after another peer was known to hold
        it."""
        self._lag.observe(lag)

    def silence(self, left: int) -> float:
        """Return the seconds without a pushed chunk after which all ``left`` chunks are pulled.

        Towards the end, at most the chunks that are left could come first. The smaller of the
        two chunk times counts, because a pause at the end stretches the recent one.
        """
        chunks = min(IN_FLIGHT, left + 2)
        return max(self._stall, chunks * min(self._lately.value, self._mean))

    def patience(self, left: int) -> float:
        """Return the seconds that others may hold a chunk before it is pulled, with ``left`` to
        come.

        A node with a slow downlink stands behind its neighbours in every stripe and misses
        nothing, so it waits twice its usual lag: what it pulled would come twice. It does not
        wait so long for the last chunks, since the line is about to be idle.
        """
        silence = self.silence(left)
        return max(silence, 2 * self._lag.value) if 2 * left > IN_FLIGHT else silence
