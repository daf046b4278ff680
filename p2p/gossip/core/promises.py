"""Which peers have promised which messages: an IHAVE that we answered by IWANT is a promise.

A message that does not come within ``promise`` seconds is a broken promise, which costs its
peer a penalty (gossipsub v1.1, "spam protection measures"). Which peers to ask is a decision
under attack: a peer that advertises ids and sends nothing must not keep us from asking others.

- One that has delivered messages first before (`PeerScores.first_deliveries`) is given an
  interval to answer before the next peer is asked for the same id.
- The promise of any other peer is worth nothing, so up to `MAX_ASKED_OF` of those are asked at
  once. Before, the first peer to advertise an id was asked and no other for 3 s, which is as
  long as honest peers advertise it: an attacker that advertised first withheld the message.

How each peer has behaved: penalties for misbehaviour, and first deliveries to its credit.

Two numbers of gossipsub v1.1's score are kept, each with its decay; the weights per topic are
not. The *behaviour penalty* (P7) grows with every offence; a score below a threshold closes the
mesh to the peer, and a lower one makes us ignore its gossip. *First message deliveries* (P2)
count the accepted messages that the peer brought before any other; they decide which peers a
mesh keeps and which are grafted opportunistically. The score that disconnects is the host's:
each offence is told to it as well (`Penalise`). The rest of the score function is left out: its
dozens of parameters have to be tuned for each topic and its message rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from p2p.gossip.config import PROMISE, GossipConfig
from p2p.identity import PeerId

MAX_PENALISED: Final = 4096
"""Peers with a penalty. It outlives the connection, or a new connection would wash it off. When
there are too many the smallest penalty is forgotten: 4,096 minted names wash off only penalties
that are smaller than theirs."""


class PeerScores:
    """The scores of all peers, decayed once in each heartbeat."""

    def __init__(self) -> None:
        self._penalties: dict[PeerId, float] = {}
        self._first_deliveries: dict[PeerId, float] = {}
        """First deliveries of connected peers."""

    def connected(self, peer: PeerId) -> None:
        """``peer`` may earn first deliveries from now on; penalties of earlier connections
        stand."""
        self._first_deliveries.setdefault(peer, 0.0)

    def disconnected(self, peer: PeerId) -> None:
        """First deliveries end with the connection, penalties do not."""
        self._first_deliveries.pop(peer, None)

    def score(self, peer: PeerId) -> float:
        """0 if there is no penalty, else its negative."""
        return -self._penalties.get(peer, 0.0)

    def may_mesh(self, peer: PeerId) -> bool:
        """Return True if ``peer`` may be in a mesh or fanout, and get our IHAVE."""
        # Score at which a peer is kept out of the mesh: one rejected message keeps it out for
        # 23 s.
        return -self._penalties.get(peer, 0.0) > (-10.0)

    def may_gossip(self, peer: PeerId) -> bool:
        """Return True if the IHAVE and IWANT of ``peer`` are listened to."""
        # Score at which its IHAVE and IWANT are ignored (the specification's gossip threshold).
        return -self._penalties.get(peer, 0.0) > (-40.0)

    def penalise(self, peer: PeerId, points: float) -> None:
        """``peer`` misbehaved, connected or not."""
        if peer not in self._penalties and len(self._penalties) >= MAX_PENALISED:
            del self._penalties[min(self._penalties, key=self._penalties.__getitem__)]
        self._penalties[peer] = self._penalties.get(peer, 0.0) + points

    def delivered_first(self, peer: PeerId) -> None:
        """``peer`` brought a message, accepted since, before any other peer did."""
        known = self._first_deliveries.get(peer)
        if known is not None:
            # The most that a peer can have to its credit, one for each message delivered first.
            self._first_deliveries[peer] = min(100.0, known + 1)

    def first_deliveries(self, peer: PeerId) -> float:
        """The decayed count of messages that ``peer`` delivered first."""
        return self._first_deliveries.get(peer, 0.0)

    def has_delivered(self, peer: PeerId) -> bool:
        """Return True if ``peer`` delivered a message first in this connection."""
        return self._first_deliveries.get(peer, 0.0) > 0

    def heartbeat(self) -> None:
        """An interval has passed: let everything decay."""
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
"""Ids asked of one peer in an interval: far more than a run publishes, and half of what one RPC
holds (256 messages)."""
MAX_PROMISES: Final = 8192
"""Ids asked for that did not come yet, over all peers. 16 peers that never answer fill it, with
128 ids in each of 4 intervals (a promise lasts 3 s). From then on each new promise pushes out
the oldest of the peer that has most, so that those 16 cannot shut out a seventeenth."""
MAX_ASKED_OF: Final = 8
"""Peers without first deliveries that are asked for one id; those with some are asked
besides."""


@dataclass(slots=True)
class _OpenIwant:
    """A message that was asked for and has not come."""

    peers: list[PeerId] = field(default_factory=list)
    """The peers that were asked."""
    exclusive_until: float = -math.inf
    """Time until which no other peer is asked, because this one delivered before."""


class Promises:
    """The open promises of the connected peers, by peer and by message."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self._of: dict[PeerId, dict[bytes, float]] = {}
        """For each connected peer, the ids that it promised and when each is due."""
        self._requests: dict[bytes, _OpenIwant] = {}
        self._asked: dict[PeerId, int] = {}
        """Ids asked of each peer in this interval. Reconnecting does not clear it."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def connected(self, peer: PeerId) -> None:
        """``peer`` may be asked from now on."""
        self._of.setdefault(peer, {})

    def disconnected(self, peer: PeerId) -> None:
        """The promises of a peer that left are void."""
        for identity in list(self._of.get(peer, ())):
            self._drop(identity, peer)
        self._of.pop(peer, None)

    def may_ask(self, peer: PeerId) -> int:
        """Return how many more ids `peer` may be asked for in this interval."""
        return MAX_ASKED - self._asked.get(peer, 0)

    def should_ask(self, identity: bytes, peer: PeerId, now: float, *, proven: bool) -> bool:
        """Return True if `peer`, which advertises this id, should be asked although others
        were. ``proven`` peers have delivered messages first before."""
        request = self._requests.get(identity)
        if request is None:
            return True
        if peer in request.peers or now < request.exclusive_until:
            return False
        return len(request.peers) < MAX_ASKED_OF or proven

    def ask(self, identity: bytes, peer: PeerId, now: float, *, proven: bool) -> bool:
        """Note that ``peer`` is asked for this id; False, and nothing noted, if all promises
        are taken and ``peer`` itself has most of them."""
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
        """The message came, from whichever peer: all promises of it are kept."""
        request = self._requests.get(identity)
        for peer in list(request.peers) if request is not None else ():
            self._drop(identity, peer)

    def heartbeat(self, now: float) -> list[PeerId]:
        """An interval has passed: every peer may be asked again. Returns the peers whose
        messages did not come in time, each once, however many they owe."""
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
