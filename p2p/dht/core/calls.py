"""Open calls: retransmission, and timeouts from measured round trips.

A request is sent up to three times with the same request id, so that a reply to any copy
counts. The first timeout is Jacobson's (mean + 4 deviations of the round trips seen); a peer
without a connection gets four more round trips, which a dial costs. Each expiry tells the
requester how late the reply is. With a mean of 100 ms and a deviation of 25 ms, a connected
peer is late after 0.2 s, another after 0.6 s; the second and third attempt wait 0.4 and 0.8 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Final

from p2p.dht.core.lookup import ContactState
from p2p.dht.messages import MAX_REQUEST_ID
from p2p.identity import PeerId

_AFTER: Final = (ContactState.LATE, ContactState.LOST, ContactState.FAILED)
"""What the contact of a call is after so many attempts that have timed out. At 5 % loss each
way, one attempt fails in one case of ten, three in one of a thousand."""


@dataclass(slots=True)
class Call:
    """Open call. ``purpose`` belongs to the requester and is opaque here."""

    request_id: int
    peer: PeerId
    data: bytes
    purpose: object
    sent: float
    connected: bool
    """True if there was a connection when it was sent."""
    attempt: int = 0
    """Number of attempts that have timed out."""


class RoundTrips:
    """Jacobson's estimate of how long a reply takes (RFC 6298)."""

    __slots__ = ("_deviation", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = 0.0

    def measure(self, seconds: float) -> None:
        """Update the estimate with one reply's round trip in seconds."""
        if not self.mean:
            self.mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self.mean) - self._deviation) / 4
        self.mean += (seconds - self.mean) / 8

    def timeout(self, *, connected: bool) -> float:
        """Return the seconds after which a reply is late."""
        if not self.mean:
            # Most of the internet answers within half of it.
            return 0.5 if connected else 1.0
        usual = self.mean + 4 * self._deviation
        # TCP, negotiation, Noise, stream: what comes before the first message to a peer without
        # a connection.
        dial = 0 if connected else 4 * self.mean
        # A busy Python process answers after tens of milliseconds even on a local network. At
        # most, it takes two round trips of 0.6 s by geostationary satellite, and a busy machine
        # at both ends.
        return min(max(usual + dial, 0.2), 2.0)


class Calls:
    """Open calls of a node, whose number is bounded by its lookups and stores."""

    def __init__(self, rng: Random) -> None:
        # A reply counts only from the peer that was asked, so ids need not be secret. They
        # start at a random number so that a reply to this node's last process does not fit.
        self._next_id = rng.getrandbits(32)
        self._open: dict[int, Call] = {}
        self._asked: dict[PeerId, int] = {}
        self._due: list[tuple[float, int, int]] = []
        self.round_trips = RoundTrips()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_deadline(self) -> float:
        """Time of the next timeout."""
        while self._due:
            due, request_id, attempt = self._due[0]
            call = self._open.get(request_id)
            if call is not None and call.attempt == attempt:
                return due
            heappop(self._due)
        return math.inf

    def open(
        self,
        peer: PeerId,
        purpose: object,
        encode: Callable[[int], bytes],
        now: float,
        connected: bool,
    ) -> Call:
        """Open a call and return it. ``encode`` makes the request's bytes from its request
        id."""
        request_id = self._next_id
        while request_id in self._open:
            request_id = (request_id + 1) & MAX_REQUEST_ID
        self._next_id = (request_id + 1) & MAX_REQUEST_ID
        call = Call(request_id, peer, encode(request_id), purpose, now, connected)
        self._open[request_id] = call
        self._asked[peer] = self._asked.get(peer, 0) + 1
        patience = self.round_trips.timeout(connected=connected)
        heappush(self._due, (now + patience, request_id, 0))
        return call

    def settle(self, request_id: int, peer: PeerId, now: float) -> Call | None:
        """Close and return the call that ``peer`` has answered; return None if it is not
        open."""
        call = self._open.get(request_id)
        if call is None or call.peer != peer:
            return None
        self._close(call)
        if call.attempt == 0 and call.connected:
            # Karn: which copy of a repeated request a reply belongs to is not known.
            self.round_trips.measure(now - call.sent)
        return call

    def expire(self, now: float) -> list[tuple[Call, ContactState]]:
        """Return the calls that have timed out by ``now``, each with its contact's state. All
        but `FAILED` calls must be sent again."""
        expired: list[tuple[Call, ContactState]] = []
        while self.next_deadline <= now:
            _, request_id, attempt = heappop(self._due)
            call = self._open[request_id]
            expired.append((call, _AFTER[attempt]))
            call.attempt = attempt = attempt + 1
            if attempt == len(_AFTER):
                self._close(call)
            else:
                patience = self.round_trips.timeout(connected=True) * 2**attempt
                heappush(self._due, (now + patience, request_id, attempt))
        return expired

    def fail(self, peer: PeerId) -> list[Call]:
        """Close every call to ``peer`` and return those calls."""
        if peer not in self._asked:
            return []  # the usual case; a liar can make it happen often
        failed = [call for call in self._open.values() if call.peer == peer]
        for call in failed:
            self._close(call)
        return failed

    def waits_for(self, peer: PeerId) -> bool:
        """Return True if a call to ``peer`` is open."""
        return peer in self._asked

    def _close(self, call: Call) -> None:
        del self._open[call.request_id]
        left = self._asked.pop(call.peer) - 1
        if left:
            self._asked[call.peer] = left
