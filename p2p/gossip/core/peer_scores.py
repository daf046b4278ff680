"""How each peer has behaved: penalties for misbehaviour, and first deliveries to its credit.

Two numbers of gossipsub v1.1's score are kept, each with its decay; the weights per topic are
not. The *behaviour penalty* (P7) grows with every offence; a score below a threshold closes the
mesh to the peer, and a lower one makes us ignore its gossip. *First message deliveries* (P2)
count the accepted messages that the peer brought before any other; they decide which peers a
mesh keeps and which are grafted opportunistically. The score that disconnects is the host's:
each offence is told to it as well (`Penalise`). The rest of the score function is left out: its
dozens of parameters have to be tuned for each topic and its message rate.
"""

from __future__ import annotations

from typing import Final

from p2p.identity import PeerId

MESH_THRESHOLD: Final = -10.0
"""Score at which a peer is kept out of the mesh: one rejected message keeps it out for 23 s."""
GOSSIP_THRESHOLD: Final = -40.0
"""Score at which its IHAVE and IWANT are ignored (the specification's gossip threshold)."""
PENALTY_DECAY: Final = 0.97
"""What remains of a penalty after each heartbeat: half after 23."""
FORGIVEN: Final = 0.1
"""Penalties below this count as none, and leave the table: 10 points are forgotten after 152
s."""
MAX_PENALISED: Final = 4096
"""Peers with a penalty. It outlives the connection, or a new connection would wash it off. When
there are too many the smallest penalty is forgotten: 4,096 minted names wash off only penalties
that are smaller than theirs."""
FIRST_DELIVERIES_CAP: Final = 100.0
"""The most that a peer can have to its credit, one for each message delivered first."""
FIRST_DELIVERIES_DECAY: Final = 0.998
"""What remains of a first delivery after each heartbeat: half after 346. The memory must
outlast the minutes between two policies, or those that bring them look like those that bring
nothing."""


class PeerScores:
    """The scores of all peers, decayed once in each heartbeat."""

    def __init__(self) -> None:
        self._penalties: dict[PeerId, float] = {}
        self._first_deliveries: dict[PeerId, float] = {}
        """Of the connected peers."""

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
        """Whether ``peer`` may be in a mesh or fanout, and get our IHAVE."""
        return -self._penalties.get(peer, 0.0) > MESH_THRESHOLD

    def may_gossip(self, peer: PeerId) -> bool:
        """Whether the IHAVE and IWANT of ``peer`` are listened to."""
        return -self._penalties.get(peer, 0.0) > GOSSIP_THRESHOLD

    def penalise(self, peer: PeerId, points: float) -> None:
        """``peer`` misbehaved, connected or not."""
        if peer not in self._penalties and len(self._penalties) >= MAX_PENALISED:
            del self._penalties[min(self._penalties, key=self._penalties.__getitem__)]
        self._penalties[peer] = self._penalties.get(peer, 0.0) + points

    def delivered_first(self, peer: PeerId) -> None:
        """``peer`` brought a message, accepted since, before any other peer did."""
        known = self._first_deliveries.get(peer)
        if known is not None:
            self._first_deliveries[peer] = min(FIRST_DELIVERIES_CAP, known + 1)

    def first_deliveries(self, peer: PeerId) -> float:
        """The decayed count of messages that ``peer`` delivered first."""
        return self._first_deliveries.get(peer, 0.0)

    def has_delivered(self, peer: PeerId) -> bool:
        """Whether ``peer`` delivered a message first in this connection."""
        return self._first_deliveries.get(peer, 0.0) > 0

    def heartbeat(self) -> None:
        """An interval has passed: let everything decay."""
        decayed = ((peer, points * PENALTY_DECAY) for peer, points in self._penalties.items())
        self._penalties = {peer: points for peer, points in decayed if points >= FORGIVEN}
        for peer in self._first_deliveries:
            self._first_deliveries[peer] *= FIRST_DELIVERIES_DECAY
