"""Bounds on the streams that a service reads at a time: per peer, per network, for strangers,
and in all.

Theory of operation
-------------------
A seat stands for the memory that a message takes while it arrives. Peers that fill all seats
and send nothing would shut out all others, so a seat can be taken away: when none is left, the
slowest occupant is evicted for the peer that asks. An attacker can have many names. It cannot
have work accepted without doing it, cannot choose its networks freely, and cannot be fast
without paying for the bytes. Therefore:

* strangers together get `STRANGERS` seats, the rest is for peers with accepted work;
* one network, where the host knows networks, gets `PER_NETWORK`;
* a peer that was evicted as slow is evicted before one that was not.

No I/O: the caller gives the time and a function that cancels the occupant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.swarm.core.limits import FadingCounts

PER_PEER: Final = 8
"""Most seats of one peer: twice the four submissions, or deliveries, that an honest peer has
under way, since each may be asked for again."""
IN_ALL: Final = 128
"""Seats of all peers together. At 8 MiB a submission, the largest, this bounds what waits in
memory at 1 GiB; the demo's have under 140 KiB."""
STRANGERS: Final = IN_ALL // 2
"""Most seats of all peers together that have no accepted work: enough for a dozen newcomers at
once, without taking what the others need."""
PER_NETWORK: Final = IN_ALL // 8
"""Most seats of one network: an eighth, as of connections (`p2p.swarm.core.limits`), for four
workers with all that they have under way."""
GRACE: Final = 2.0
"""Seconds during which an occupant cannot be evicted as slow: a few round trips to the other
side of the world."""
STRIKE_HALF_LIFE: Final = 60.0
"""Half-life in seconds of the count of a peer's evictions."""


@dataclass(slots=True, eq=False)
class Seat:
    """A stream that is being read."""

    peer: PeerId
    network: str
    is_stranger: bool
    since: float
    evict: Callable[[], object]
    """Called when the occupant is evicted."""

    received: int = 0
    """Bytes that have come, as the reader counts them."""

    evicted: bool = False


class Seats:
    """The seats that are taken now."""

    def __init__(
        self,
        per_peer: int = PER_PEER,
        in_all: int = IN_ALL,
        *,
        strangers: int | None = None,
        per_network: int = PER_NETWORK,
    ) -> None:
        """Make the seats; ``strangers`` is the number that peers without accepted work have
        together; None: all of them."""
        self._per_peer = per_peer
        self._in_all = in_all
        self._strangers = in_all if strangers is None else strangers
        self._per_network = per_network
        self._taken: dict[Seat, None] = {}
        self._own: dict[PeerId, int] = {}
        self._strikes: FadingCounts[str] = FadingCounts(STRIKE_HALF_LIFE)

    def __len__(self) -> int:
        return len(self._taken)

    def take(
        self,
        peer: PeerId,
        now: float,
        *,
        network: str = "",
        is_stranger: bool = False,
        evict: Callable[[], object] = lambda: None,
    ) -> Seat | None:
        """Return a seat for ``peer``, if necessary by evicting another peer; None if there is
        no seat. `leave` must follow.

        ``network`` is empty where the host does not know it.
        """
        asker = Seat(peer, network, is_stranger, now, evict)
        if self._own.get(peer, 0) >= self._per_peer:
            return None
        while (crowd := self._crowd_of(asker)) is not None:
            victim = self._slowest(crowd, asker, now)
            if victim is None:
                return None
            self._strikes.add(_name(victim.peer), now)
            self.leave(victim)
            victim.evicted = True
            victim.evict()
        self._sit(asker)
        return asker

    def leave(self, seat: Seat) -> None:
        """Free the seat; harmless if it was taken away."""
        if seat in self._taken:
            del self._taken[seat]
            self._own[seat.peer] -= 1
            if not self._own[seat.peer]:
                del self._own[seat.peer]

    def _sit(self, seat: Seat) -> None:
        self._taken[seat] = None
        self._own[seat.peer] = self._own.get(seat.peer, 0) + 1

    @contextmanager
    def seat(self, peer: PeerId) -> Iterator[bool]:
        """Give ``peer`` a seat for the length of the block, which cannot be evicted. Yield
        False if no seat is free."""
        if self._own.get(peer, 0) >= self._per_peer or len(self._taken) >= self._in_all:
            yield False
            return
        seat = Seat(peer, "", False, 0.0, lambda: None)
        self._sit(seat)
        try:
            yield True
        finally:
            self.leave(seat)

    def _crowd_of(self, asker: Seat) -> list[Seat] | None:
        """Return the occupants of which one must leave to make room for ``asker``; None if
        there is room."""
        if asker.network:
            near = [seat for seat in self._taken if seat.network == asker.network]
            if len(near) >= self._per_network:
                return near
        strangers = [seat for seat in self._taken if seat.is_stranger]
        if asker.is_stranger and len(strangers) >= self._strangers:
            return strangers
        if len(self._taken) < self._in_all:
            return None
        return strangers or ([] if asker.is_stranger else list(self._taken))

    def _slowest(self, crowd: list[Seat], asker: Seat, now: float) -> Seat | None:
        """Return the seat to evict: a peer that was evicted before, then the slowest; None if
        no occupant may be evicted."""
        own = round(self._strikes.count(_name(asker.peer), now))
        best: tuple[int, float] | None = None
        victim = None
        for seat in crowd:
            # no stranger takes the seat of one that has done work
            if seat.is_stranger < asker.is_stranger:
                continue
            strikes = round(self._strikes.count(_name(seat.peer), now))
            if strikes < own or (strikes == own and now - seat.since < GRACE):
                continue
            rank = (-strikes, seat.received / max(now - seat.since, GRACE))
            if best is None or rank < best:
                best, victim = rank, seat
        return victim


def _name(peer: PeerId) -> str:
    return peer.digest.hex()
