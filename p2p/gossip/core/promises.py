"""Promises and scores of peers. An IHAVE that we answered by IWANT is a promise.

A message that does not come within ``promise`` seconds is a broken promise, which costs its
peer a penalty (gossipsub v1.1, "spam protection measures"). Which peers to ask is a decision
under attack: a peer that advertises ids and sends nothing must not keep us from asking others.

- One that has delivered messages first before (`PeerScores.first_deliveries`) is given an
  interval to answer before the next peer is asked for the same id.
- The promise of any other peer is worth nothing, so up to eight of those are asked at
  once. Before, the first peer to advertise an id was asked and no other for 3 s, which is as
  long as honest peers advertise it: an attacker that advertised first withheld the message.

How each peer has behaved: penalties for misbehaviour, and first deliveries to its credit.

Two numbers of gossipsub v1.1's score are kept, each with its decay; the weights per topic are
not. The *behaviour penalty* (P7) grows with every offence; a score below a threshold closes the
mesh to the peer, and a lower one makes us ignore its gossip. *First message deliveries* (P2)
count the accepted messages that the peer brought before any other; they decide which peers are
grafted opportunistically. The score that disconnects is the host's: each offence is told to it
as well (`Penalise`). The rest of the score function is left out: its dozens of parameters have
to be tuned for each topic and its message rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from p2p.gossip.config import PROMISE, GossipConfig
from p2p.identity import PeerId

MAX_PENALISED: Final = 4096
"""Maximum number of peers with a penalty. A penalty outlives the connection, or a new
connection would clear it. When there are too many, the smallest penalty is forgotten: 4,096
invented names clear only penalties smaller than their own."""


class PeerScores:
    """Scores of all peers, which decay in each heartbeat."""

    def __init__(self) -> None:
        self._penalties: dict[PeerId, float] = {}
        self._first_deliveries: dict[PeerId, float] = {}
        """Decayed number of first deliveries of each connected peer."""

    def connected(self, peer: PeerId) -> None:
        """Let ``peer`` earn first deliveries from now on. Penalties from earlier connections
        stay."""
        self._first_deliveries.setdefault(peer, 0.0)

    def disconnected(self, peer: PeerId) -> None:
        """Forget the first deliveries of ``peer``, but not its penalties."""
        self._first_deliveries.pop(peer, None)

    def may_mesh(self, peer: PeerId) -> bool:
        """Return True if ``peer`` may be in a mesh or fanout, and get our IHAVE."""
        # Score at which a peer is kept out of the mesh: one rejected message keeps it out for
        # 23 s.
        return -self._penalties.get(peer, 0.0) > (-10.0)

    def may_gossip(self, peer: PeerId) -> bool:
        """Return True if the node processes IHAVE and IWANT of ``peer``."""
        # Score at which its IHAVE and IWANT are ignored (the specification's gossip threshold).
        return -self._penalties.get(peer, 0.0) > (-40.0)

    def penalise(self, peer: PeerId, points: float) -> None:
        """Add ``points`` to the penalty of ``peer``, whether or not it is connected."""
        if peer not in self._penalties and len(self._penalties) >= MAX_PENALISED:
            del self._penalties[min(self._penalties, key=self._penalties.__getitem__)]
        self._penalties[peer] = self._penalties.get(peer, 0.0) + points

    def delivered_first(self, peer: PeerId) -> None:
        """Credit ``peer`` with an accepted message that it brought before any other peer."""
        known = self._first_deliveries.get(peer)
        if known is not None:
            # The most that a peer can have to its credit, one for each message delivered first.
            self._first_deliveries[peer] = min(100.0, known + 1)

    def first_deliveries(self, peer: PeerId) -> float:
        """Return the decayed number of messages that ``peer`` delivered first."""
        return self._first_deliveries.get(peer, 0.0)

    def has_delivered(self, peer: PeerId) -> bool:
        """Return True if ``peer`` delivered a message first in this connection."""
        return self._first_deliveries.get(peer, 0.0) > 0

    def heartbeat(self) -> None:
        """Let all scores decay. This is called once in each heartbeat."""
        # What remains of a penalty after each heartbeat: half after 23.
        decayed = ((peer, points * 0.97) for peer, points in self._penalties.items())
        # Penalties below this count as none, and leave the table: 10 points are forgotten after
        # 152 s.
        self._penalties = {peer: points for peer, points in decayed if points >= 0.1}
        for peer in self._first_deliveries:
            # Factor that first deliveries decay by at each heartbeat: half after 346. The
            # memory must outlast the minutes between two policies.
            self._first_deliveries[peer] *= 0.998


MAX_ASKED: Final = 128
"""Maximum number of ids requested from one peer in an interval. This is far more than a run
publishes, and half of what one RPC holds (256 messages)."""
MAX_PROMISES: Final = 8192
"""Maximum number of open requests for ids, over all peers. 16 peers that never answer fill it,
with 128 ids in each of 4 intervals (a promise lasts 3 s). From then on each new promise
replaces the oldest of the peer with most, so that those 16 cannot shut out a seventeenth."""


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
        """Maps each connected peer to the ids that it promised and the time at which each is
        due."""
        self._requests: dict[bytes, _OpenIwant] = {}
        self._asked: dict[PeerId, int] = {}
        """Number of ids requested from each peer in this interval. Reconnecting does not clear
        it."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def connected(self, peer: PeerId) -> None:
        """Allow requests to ``peer``."""
        self._of.setdefault(peer, {})

    def disconnected(self, peer: PeerId) -> None:
        """Drop the promises of a peer that left."""
        for identity in list(self._of.get(peer, ())):
            self._drop(identity, peer)
        self._of.pop(peer, None)

    def may_ask(self, peer: PeerId) -> int:
        """Return how many more ids `peer` may be asked for in this interval."""
        return MAX_ASKED - self._asked.get(peer, 0)

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
        """Note that ``peer`` is asked for this id. Return False, and note nothing, if all
        promises are taken and ``peer`` itself has most of them."""
        if self._count >= MAX_PROMISES:
            most = max(self._of, key=lambda each: len(self._of[each]))
            if most == peer:
                return False
            self._drop(next(iter(self._of[most])), most)
        self._asked[peer] = self._asked.get(peer, 0) + 1
        self._of[peer][identity] = now + PROMISE
        self._count += 1
        request = self._requests.get(identity)
        if request is None:
            request = self._requests[identity] = _OpenIwant()
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
        """Reset the limits for the next interval. Return each peer that broke a promise,
        once."""
        self._asked = {}
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
