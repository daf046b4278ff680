"""Questions that wait for their answers: retransmission, and time limits taken from measured round trips.

A question is sent up to three times with the same request id, so that an answer to any copy counts. The
first limit is Jacobson's (mean + 4 deviations of the round trips seen); a peer without a connection gets
four more round trips, which a dial costs. Each expiry tells the asker how late the answer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from p2p.dht.messages import MAX_REQUEST_ID
from p2p.identity import PeerId

if TYPE_CHECKING:
    from random import Random

MIN_TIMEOUT: Final = 0.2
"""Seconds: a busy Python process answers after tens of milliseconds even on a local network."""
MAX_TIMEOUT: Final = 2.0
"""Seconds: twice round the world by satellite."""
FIRST_TIMEOUT: Final = 0.5
"""Seconds, before any round trip was measured: most of the internet answers within half of it."""
DIAL_ROUND_TRIPS: Final = 4
"""TCP, negotiation, Noise, stream: what stands between the first message and its delivery."""
ATTEMPTS: Final = 3
"""At 5 % loss each way one exchange in a thousand fails."""

P = TypeVar("P")


class Lateness(Enum):
    """How an unanswered question stands."""

    LATE = auto()
    LOST = auto()
    FAILED = auto()


_AFTER: Final = (Lateness.LATE, Lateness.LOST, Lateness.FAILED)


@dataclass(slots=True)
class Call(Generic[P]):
    """One open question. ``purpose`` is the asker's."""

    request_id: int
    peer: PeerId
    data: bytes
    purpose: P
    sent: float
    warm: bool
    """Whether there was a connection when it was sent."""
    attempt: int = 0


class RoundTrips:
    """Jacobson's estimate of how long an answer takes (RFC 6298)."""

    __slots__ = ("_deviation", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = 0.0

    def measure(self, seconds: float) -> None:
        """Learn from one answer."""
        if not self.mean:
            self.mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self.mean) - self._deviation) / 4
        self.mean += (seconds - self.mean) / 8

    def timeout(self, *, warm: bool) -> float:
        """Seconds after which an answer is late."""
        if not self.mean:
            return FIRST_TIMEOUT if warm else 2 * FIRST_TIMEOUT
        usual = self.mean + 4 * self._deviation
        return min(max(usual + (0 if warm else DIAL_ROUND_TRIPS * self.mean), MIN_TIMEOUT), MAX_TIMEOUT)


class Calls(Generic[P]):
    """All open questions of one node. Their number is bounded by its lookups, and by what they store."""

    def __init__(self, rng: Random) -> None:
        # Answers are tied to the peer asked, so ids need not be secret; they start anywhere so that an
        # answer to the process before this one does not fit.
        self._next_id = rng.getrandbits(32)
        self._open: dict[int, Call[P]] = {}
        self._asked: dict[PeerId, int] = {}
        self._due: list[tuple[float, int, int]] = []
        self.round_trips = RoundTrips()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_deadline(self) -> float:
        """When `expire` has something to say."""
        while self._due:
            due, request_id, attempt = self._due[0]
            call = self._open.get(request_id)
            if call is not None and call.attempt == attempt:
                return due
            heappop(self._due)
        return math.inf

    def open(
        self, peer: PeerId, purpose: P, encode: Callable[[int], bytes], now: float, *, warm: bool
    ) -> Call[P]:
        """Note a question; ``encode`` makes its bytes from its request id."""
        request_id = self._next_id
        while request_id in self._open:
            request_id = (request_id + 1) & MAX_REQUEST_ID
        self._next_id = (request_id + 1) & MAX_REQUEST_ID
        call = Call(request_id, peer, encode(request_id), purpose, now, warm)
        self._open[request_id] = call
        self._asked[peer] = self._asked.get(peer, 0) + 1
        heappush(self._due, (now + self.round_trips.timeout(warm=warm), request_id, 0))
        return call

    def settle(self, request_id: int, peer: PeerId, now: float) -> Call[P] | None:
        """The question that ``peer`` has answered, or None if it was not asked, or not any more."""
        call = self._open.get(request_id)
        if call is None or call.peer != peer:
            return None
        self._close(call)
        if call.attempt == 0 and call.warm:
            # Karn: the answer to a repeated question cannot be timed.
            self.round_trips.measure(now - call.sent)
        return call

    def expire(self, now: float) -> list[tuple[Call[P], Lateness]]:
        """Every question that has become later by ``now``. Those not failed must be sent again."""
        expired: list[tuple[Call[P], Lateness]] = []
        while self.next_deadline <= now:
            _, request_id, attempt = heappop(self._due)
            call = self._open[request_id]
            expired.append((call, _AFTER[attempt]))
            call.attempt += 1
            if call.attempt == ATTEMPTS:
                self._close(call)
            else:
                patience = self.round_trips.timeout(warm=True) * 2**call.attempt
                heappush(self._due, (now + patience, request_id, call.attempt))
        return expired

    def fail(self, peer: PeerId) -> list[Call[P]]:
        """Give up every question to ``peer``."""
        if peer not in self._asked:
            return []  # the usual case, and a liar can have it looked up often
        failed = [call for call in self._open.values() if call.peer == peer]
        for call in failed:
            self._close(call)
        return failed

    def waits_for(self, peer: PeerId) -> bool:
        """Whether ``peer`` owes us an answer."""
        return peer in self._asked

    def _close(self, call: Call[P]) -> None:
        del self._open[call.request_id]
        left = self._asked.pop(call.peer) - 1
        if left:
            self._asked[call.peer] = left
