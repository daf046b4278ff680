"""Order in which strangers are heard: a fixed rate, in turns by network and peer.

Theory of operation
-------------------
To hear a stranger costs this node half a millisecond before anything about the stranger is
known. A name costs the stranger nothing, and the time is taken from the nodes that do the work.
So nodes without accepted work pass one by one, at a rate that all of them share. While they
wait nothing is read, and a waiting stream takes 7 KiB and no time.

Networks take turns, and within each network its peers: an attacker with many names has one turn
if its addresses show it. A peer whose network is not known is a network of its own. A network
that recently had few turns goes before one that had twice as many, so a newcomer is heard at
once in front of a crowd that sends all the time. Every `EVEN`-th turn goes to the other
networks; otherwise an endless supply of new names would keep them out.

The queue is bounded: ``in_all`` items, and ``per_network`` of one network. If it is full, a new
item of a peer or network with fewer items evicts the newest item of the one with most. No I/O:
the caller knows the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from p2p.bounded import RateLimit
from p2p.identity import PeerId
from p2p.swarm.core.limits import FadingCounts

T = TypeVar("T")

EVEN: Final = 4
"""One turn in this many goes to networks that had more turns than others."""
SOONEST: Final = 1e-3
"""Least seconds to the next turn. The missing part of a turn may be less than a clock can tell,
and a timer would come back at the same instant for ever."""
TURN_HALF_LIFE: Final = 60.0
"""Half-life in seconds of the count of a network's turns."""

_Peers = dict[PeerId, deque[T]]


class Turnstile(Generic[T]):
    """The queue of strangers that wait to be heard."""

    def __init__(
        self,
        rate: float,
        at_once: float,
        *,
        in_all: int,
        per_network: int,
        evict: Callable[[T], object] = lambda _: None,
    ) -> None:
        """Make a queue. ``rate`` pass in a second, ``at_once`` after a pause. ``evict`` is
        called with an item that must leave unheard."""
        self._evict = evict
        self._rate = rate
        self._turns = RateLimit(rate, at_once)
        self._in_all = in_all
        self._per_network = per_network
        self._had: FadingCounts[str] = FadingCounts(TURN_HALF_LIFE)
        """Decaying count of the turns of each network."""
        self._level: dict[str, int] = {}
        """Maps each network with waiting peers to the logarithm of its count."""
        self._waiting: dict[int, dict[str, _Peers[T]]] = {}
        """Waiting items by level, network and peer, the next first."""
        self._count = 0
        self._sizes: dict[str, int] = {}
        """Number of waiting items of each network."""
        self._number = 0
        """Number of turns so far."""

    def __len__(self) -> int:
        return self._count

    def add(self, peer: PeerId, network: str, item: T, now: float) -> bool:
        """Add ``item`` of ``peer`` to the queue. Return True if there is room for it, or room
        was made."""
        place = _place(peer, network)
        if not self._has_room(place, peer):
            return False
        peers = self._peers(place)
        if not peers:
            self._settle(place, peers, now)
        peers.setdefault(peer, deque()).append(item)
        self._note(place, +1)
        return True

    def _note(self, place: str, change: int) -> None:
        """Change the number of items that wait in a network."""
        self._count += change
        self._sizes[place] = self._sizes.get(place, 0) + change
        if not self._sizes[place]:
            del self._sizes[place]

    def _has_room(self, place: str, peer: PeerId) -> bool:
        if self._sizes.get(place, 0) >= self._per_network:
            own = {one: len(items) for one, items in self._peers(place).items()}
            most = max(own, key=own.__getitem__)
            return self._make_room(place, most, own[most], own.get(peer, 0))
        if self._count < self._in_all:
            return True
        fullest = max(self._sizes, key=self._sizes.__getitem__)
        crowd = self._peers(fullest)
        most = max(crowd, key=lambda one: len(crowd[one]))
        held, had = self._sizes[fullest], self._sizes.get(place, 0)
        return self._make_room(fullest, most, held, had)

    def _make_room(self, place: str, of: PeerId, held: int, own: int) -> bool:
        """Evict the newest item of peer ``of`` in a network. Return False, and evict nothing,
        unless ``held``, the items on that side, exceed ``own``, the asker's items, by at least
        two."""
        if held <= own + 1:
            return False
        crowd = self._peers(place)
        item = crowd[of].pop()
        self._note(place, -1)
        if not crowd[of]:  # a network of many names: the others keep its place
            del crowd[of]
        self._evict(item)
        return True

    def remove(self, peer: PeerId, network: str, item: T) -> None:
        """Remove an item from the queue; harmless if it has passed."""
        place = _place(peer, network)
        peers = self._peers(place)
        own = peers.get(peer, deque())
        if item not in own:
            return
        own.remove(item)
        self._note(place, -1)
        if not own:
            del peers[peer]
        if not peers:
            self._leave(place)

    def next(self, now: float) -> T | None:
        """Return the item that passes now; None if none waits, or no turn is due."""
        if not self._count or not self._turns.allows(1.0, now):
            return None
        self._number += 1
        levels = sorted(self._waiting)
        even, left = divmod(self._number, EVEN)
        level = levels[0 if left else even % len(levels)]
        place, peers = next(iter(self._waiting[level].items()))
        peer, own = next(iter(peers.items()))
        item = own.popleft()
        self._note(place, -1)
        self._had.add(place, now)
        # behind the others: the peer in its network, the network among all
        del peers[peer]
        if own:
            peers[peer] = own
        self._leave(place)
        if peers:
            self._settle(place, peers, now)
        return item

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next turn is due, at least `SOONEST`."""
        return max(SOONEST, (1.0 - self._turns.available(now)) / self._rate)

    def _peers(self, place: str) -> _Peers[T]:
        level = self._level.get(place)
        return {} if level is None else self._waiting[level][place]

    def _settle(self, place: str, peers: _Peers[T], now: float) -> None:
        level = int(math.log2(1.0 + self._had.count(place, now)))
        self._level[place] = level
        self._waiting.setdefault(level, {})[place] = peers

    def _leave(self, place: str) -> None:
        level = self._level.pop(place)
        del self._waiting[level][place]
        if not self._waiting[level]:
            del self._waiting[level]


def _place(peer: PeerId, network: str) -> str:
    return network or peer.hex()
