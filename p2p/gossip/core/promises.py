"""Promises and first deliveries of peers. An IHAVE that we answered by IWANT is a promise.

A message that does not come within three seconds is a broken promise, which costs its peer a
penalty (gossipsub v1.1, "spam protection measures"). Which peers to ask is a decision
under attack: a peer that advertises ids and sends nothing must not keep us from asking others.

- One that has delivered messages first before (`FirstDeliveries`) is given an
  interval to answer before the next peer is asked for the same id.
- The promise of any other peer is worth nothing, so up to eight of those are asked at
  once. Before, the first peer to advertise an id was asked and no other for 3 s, which is as
  long as honest peers advertise it: an attacker that advertised first withheld the message.

Of gossipsub v1.1's score only *first message deliveries* (P2) are kept; they decide which peers
are grafted opportunistically. Each offence is told to the host, whose score disconnects
(`Penalise`). The rest of the score function is left out: its dozens of parameters have to be
tuned for each topic and its message rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from p2p.gossip.config import GossipConfig
from p2p.identity import PeerId


class FirstDeliveries:
    """Decayed number of accepted messages that each connected peer brought before any other."""

    def __init__(self) -> None:
        self._first_deliveries: dict[PeerId, float] = {}

    def disconnected(self, peer: PeerId) -> None:
        """Forget the first deliveries of ``peer``."""
        self._first_deliveries.pop(peer, None)

    def delivered_first(self, peer: PeerId) -> None:
        """Credit a connected peer with an accepted message that it brought before any other."""
        # The most that a peer can have to its credit, one for each message delivered first.
        self._first_deliveries[peer] = min(100.0, self.first_deliveries(peer) + 1)

    def first_deliveries(self, peer: PeerId) -> float:
        """Return the decayed number of messages that ``peer`` delivered first."""
        return self._first_deliveries.get(peer, 0.0)

    def has_delivered(self, peer: PeerId) -> bool:
        """Return True if ``peer`` delivered a message first in this connection."""
        return peer in self._first_deliveries

    def heartbeat(self) -> None:
        """Let all numbers decay. This is called once in each heartbeat."""
        for peer in self._first_deliveries:
            # Factor that first deliveries decay by at each heartbeat: half after 346. The
            # memory must outlast the minutes between two policies.
            self._first_deliveries[peer] *= 0.998


MAX_OWED: Final = 512
"""Maximum number of open requests to one peer, more than a run publishes in the seconds that a
promise lasts. Once all promises are taken, each request looks at all peers: without this limit
one IHAVE of 5,000 ids took 230 ms."""
MAX_PROMISES: Final = 8192
"""Maximum number of open requests for ids, over all peers. 16 peers that never answer fill it.
From then on each new promise replaces the oldest of the peer with most, so that those 16 cannot
shut out a seventeenth."""


@dataclass(slots=True)
class _OpenIwant:
    """Request for a message that has not come."""

    peers: list[PeerId] = field(default_factory=list)
    """Peers that were asked."""
    exclusive_until: float = -math.inf
    """Time until which no other peer is asked, because the last peer asked has delivered
    before."""


class Promises:
    """Open promises of the connected peers, by peer and by message."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self._of: dict[PeerId, dict[bytes, float]] = {}
        """Maps each connected peer that was asked to the ids that it promised and the time at
        which each is due."""
        self._requests: dict[bytes, _OpenIwant] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def disconnected(self, peer: PeerId) -> None:
        """Drop the promises of a peer that left."""
        for identity in list(self._of.get(peer, ())):
            self._drop(identity, peer)
        self._of.pop(peer, None)

    def should_ask(self, identity: bytes, peer: PeerId, now: float, *, proven: bool) -> bool:
        """Return True if ``peer``, which advertises this id, should be asked even if others
        were. ``proven`` peers have delivered messages first before."""
        request = self._requests.get(identity)
        if request is None:
            return True
        if peer in request.peers or now < request.exclusive_until:
            return False
        # Maximum number of peers without first deliveries that are asked for one id. Peers with
        # first deliveries are asked as well.
        return len(request.peers) < 8 or proven

    def ask(self, identity: bytes, peer: PeerId, now: float, *, proven: bool) -> bool:
        """Note that ``peer`` is asked for this id. Return False, and note nothing, if it owes
        `MAX_OWED`, or if all promises are taken and ``peer`` itself has most of them."""
        if len(self._of.setdefault(peer, {})) >= MAX_OWED:
            return False
        if self._count >= MAX_PROMISES:
            most = max(self._of, key=lambda each: len(self._of[each]))
            if most == peer:
                return False
            self._drop(next(iter(self._of[most])), most)
        self._of[peer][identity] = now + 3.0  # iwant_followup_time
        self._count += 1
        request = self._requests.setdefault(identity, _OpenIwant())
        request.peers.append(peer)
        if proven:
            request.exclusive_until = now + self._config.interval
        return True

    def fulfilled(self, identity: bytes) -> None:
        """Drop all promises of a message that came, whichever peer brought it."""
        request = self._requests.get(identity)
        for peer in list(request.peers) if request is not None else ():
            self._drop(identity, peer)

    def heartbeat(self, now: float) -> list[PeerId]:
        """Return each peer that broke a promise, once."""
        broken = []
        for peer, owed in self._of.items():
            late = [identity for identity, due in owed.items() if due <= now]
            for identity in late:
                self._drop(identity, peer)
            if late:
                broken.append(peer)
        return broken

    def _drop(self, identity: bytes, peer: PeerId) -> None:
        del self._of[peer][identity]
        self._count -= 1
        request = self._requests[identity]
        request.peers.remove(peer)
        if not request.peers:
            del self._requests[identity]
