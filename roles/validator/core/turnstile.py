"""Which stranger is heard next: so many a second, in turns by network and peer.

Theory of operation ------------------- To hear a stranger costs this node half a millisecond
before the first thing about it is known, a name costs the stranger nothing, and nodes that do
the work pay with the time of the same loop. So nodes without accepted work pass one by one, at
a rate that all of them share, and wait outside meanwhile: nothing is read, and a stream that
waits takes 7 KiB and no time. Among those that wait networks take turns, and within each its
peers: who comes with many names has one turn where its addresses show it, and who sends much
waits behind itself. A peer whose network is not known is a network of its own.

Bounded: `in_all` that wait, `per_network` of one network. No I/O: the caller knows the time.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from p2p.bounded import RateLimit
from p2p.identity import PeerId

T = TypeVar("T")


class Turnstile(Generic[T]):
    """Who waits to be heard."""

    def __init__(self, rate: float, at_once: float, *, in_all: int, per_network: int) -> None:
        """``rate`` pass in a second, ``at_once`` after a pause."""
        self._rate = rate
        self._turns = RateLimit(rate, at_once)
        self._in_all = in_all
        self._per_network = per_network
        self._waiting: dict[str, dict[PeerId, deque[T]]] = {}
        """By network and peer, who is next first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, peer: PeerId, network: str, item: T) -> bool:
        """Let ``item`` of ``peer`` wait; whether there is room for it."""
        peers = self._waiting.get(_place(peer, network), {})
        if self._count >= self._in_all or sum(map(len, peers.values())) >= self._per_network:
            return False
        own = self._waiting.setdefault(_place(peer, network), {}).setdefault(peer, deque())
        own.append(item)
        self._count += 1
        return True

    def remove(self, peer: PeerId, network: str, item: T) -> None:
        """It does not wait any more; harmless if it has passed."""
        place = _place(peer, network)
        own = self._waiting.get(place, {}).get(peer)
        if own is not None and item in own:
            own.remove(item)
            self._drop_empty(place, peer)

    def next(self, now: float) -> T | None:
        """Who passes now; None if nobody waits, or no turn is due."""
        if not self._count or not self._turns.allows(1.0, now):
            return None
        place, peers = next(iter(self._waiting.items()))
        peer, own = next(iter(peers.items()))
        item = own.popleft()
        # behind the others: the peer in its network, the network among all
        del self._waiting[place], peers[peer]
        peers[peer], self._waiting[place] = own, peers
        self._drop_empty(place, peer)
        return item

    def seconds_left(self, now: float) -> float:
        """How long until the next turn is due."""
        return max(0.0, (1.0 - self._turns.available(now)) / self._rate)

    def _drop_empty(self, place: str, peer: PeerId) -> None:
        self._count -= 1
        peers = self._waiting[place]
        if not peers[peer]:
            del peers[peer]
        if not peers:
            del self._waiting[place]


def _place(peer: PeerId, network: str) -> str:
    return network or peer.hex()
