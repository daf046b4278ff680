"""The mesh of each topic: with which peers full messages are exchanged, and which get only ids.

Of the connected peers that subscribe to a topic, about ``degree`` are its *mesh*: they get
every message at once. The others get ids by IHAVE now and then and ask by IWANT for what they
miss. A peer that was pruned is not grafted again before its backoff ends.

gossipsub's *fanout*, a few subscribers kept for a topic that we only publish to, is left out:
our own messages go to many more subscribers than that (flood publishing, below).

Strangers who want to own a mesh
--------------------------------
An attacker connects a dozen times, grafts at once and passes nothing on. Four things keep a
node informed, and its own messages spread:

1. Inbound peers hold at most ``high - outbound`` places of a mesh. The others are for
   *outbound* peers, which we dialled: an attacker has to bring that about first. Each heartbeat
   grafts outbound peers until there are ``outbound`` (D_out).
2. IHAVE from outside the mesh brings what the mesh withholds, and the peer that brings a
   message first is credited with it (`FirstDeliveries`).
3. Each minute up to two peers outside the mesh with more first deliveries than the mesh's
   median are grafted (opportunistic grafting).
4. Our own messages go to all subscribers, not to the mesh alone (flood publishing).

With 48 such strangers grafted before the first honest peer, the three honest peers that the
node dialled always have at least two places of the twelve (tests/attacks/test_gossip_mesh.py).
Only connected peers are in any table: an RPC that is read after its connection has ended is
dropped by `GossipCore`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from p2p.bounded import BoundedDict
from p2p.gossip.config import BACKOFF, GossipConfig
from p2p.gossip.core.promises import FirstDeliveries
from p2p.identity import PeerId
from p2p.wire import KI, MIB

MAX_TOPICS_OF_PEER: Final = 64
"""Maximum number of subscriptions remembered of one peer; a run has about five topics."""
MAX_FLOOD_PUBLISH: Final = 64
"""Maximum number of peers that get our own message at once. A node has about twenty that
subscribe to its topics. Mesh peers, outbound peers and those with most first deliveries come
first."""
MAX_BACKOFFS: Final = 16 * KI
"""Maximum number of backoffs remembered: five topics and 3,000 peers. They outlive a
connection, or a new connection would end them. The oldest is dropped first; losing one too
early costs a GRAFT and a PRUNE."""

Peers = dict[PeerId, None]
Predicate = Callable[[PeerId], bool]


class Mesh:
    """Subscribers, meshes and backoffs of one node."""

    def __init__(self, config: GossipConfig, rng: Random, earned: FirstDeliveries) -> None:
        self.meshes: dict[str, Peers] = {}
        """Maps each topic that this node subscribes to to its mesh peers."""
        self._config = config
        self._rng = rng
        self._earned = earned
        self.topics_of: dict[PeerId, dict[str, None]] = {}
        self._subscribers: dict[str, Peers] = {}
        self._outbound: Peers = {}
        self._heartbeats = 0
        self._slack = 2.0 * config.interval
        """Seconds added to a backoff before we GRAFT again. The pruned end begins to count a
        moment after the other end; without slack its honest GRAFT arrives too early and is
        penalised."""
        self._backoff: BoundedDict[tuple[str, PeerId], float] = BoundedDict(MAX_BACKOFFS)

    # Connections and subscriptions.

    def connected(self, peer: PeerId, dialled: bool) -> None:
        """Add a connected peer, still without subscriptions. ``dialled`` is True if we dialled
        it."""
        self.topics_of.setdefault(peer, {})
        if dialled:
            self._outbound[peer] = None

    def disconnected(self, peer: PeerId) -> None:
        """Remove ``peer`` from every table but the backoffs."""
        for topic in self.topics_of.pop(peer, {}):
            self._remove_subscriber(topic, peer)
        self._outbound.pop(peer, None)

    def is_connected(self, peer: PeerId) -> bool:
        """Return True if there is a connection to ``peer``."""
        return peer in self.topics_of

    def set_subscribed(self, peer: PeerId, topic: str, subscribed: bool) -> bool:
        """Note that a connected peer subscribes to ``topic`` or leaves it. Return False, and
        note nothing, if it has `MAX_TOPICS_OF_PEER` subscriptions already."""
        topics = self.topics_of[peer]
        if not subscribed:
            topics.pop(topic, None)
            self._remove_subscriber(topic, peer)
        elif topic not in topics:
            if len(topics) >= MAX_TOPICS_OF_PEER:
                return False
            topics[topic] = None
            self._subscribers.setdefault(topic, {})[peer] = None
        return True

    def subscribers(self, topic: str) -> Peers:
        """Return the connected peers that subscribe to ``topic``."""
        return self._subscribers.get(topic, {})

    # Our own subscriptions.

    def join(self, topic: str, now: float) -> list[PeerId]:
        """Form a mesh for ``topic`` and return the peers to send GRAFT."""
        self.meshes[topic] = {}
        return self._top_up(topic, now)

    def leave(self, topic: str, now: float) -> list[PeerId]:
        """Give up the mesh of ``topic`` and return the peers to send PRUNE."""
        peers = list(self.meshes.pop(topic, {}))
        for peer in peers:
            self.add_backoff(topic, peer, now, BACKOFF)
        return peers

    # GRAFT and PRUNE of peers.

    def has_place_for(self, topic: str, peer: PeerId) -> bool:
        """Return True if the mesh has a place for a peer that sent GRAFT. Inbound peers cannot
        take the ``outbound`` places."""
        config, mesh = self._config, self.meshes[topic]
        if peer in self._outbound:
            return len(mesh) < config.high
        return len(mesh) - self._count_outbound(mesh) < config.high - config.outbound

    def prune(self, topic: str, peer: PeerId, now: float, backoff: float) -> None:
        """Remove a peer from the mesh and begin a backoff, whichever side pruned."""
        if topic in self.meshes:
            self.meshes[topic].pop(peer, None)
            self.add_backoff(topic, peer, now, backoff)

    def add_backoff(self, topic: str, peer: PeerId, now: float, backoff: float) -> None:
        """Forbid GRAFT between us and ``peer`` for ``backoff`` seconds, unless a longer backoff
        runs."""
        key = (topic, peer)
        self._backoff[key] = max(self._backoff.get(key, now), now + backoff)

    def is_backed_off(self, topic: str, peer: PeerId, now: float) -> bool:
        """Return True if a GRAFT by this peer is too early."""
        return self._backoff.get((topic, peer), -math.inf) > now

    # Which peers get what.

    def publish_recipients(self, topic: str, size: int) -> list[PeerId]:
        """Return the peers that get our own message of ``size`` bytes. They are the mesh, or
        ``degree`` subscribers of a topic that is not ours, and then other subscribers up to
        `MAX_FLOOD_PUBLISH` and 1 MiB in all."""
        peers = self.meshes.get(topic)
        if peers is None:
            peers = dict.fromkeys(self._sample(topic, {}, self._config.degree))
        # Maximum bytes of one message's copies beyond those for the mesh: 64 copies of an
        # announcement (17 KiB), 4 of the largest message (256 KiB). A publisher needs its
        # upload for its policies.
        room = min(MAX_FLOOD_PUBLISH - len(peers), MIB // max(1, size))
        others = self._sample(topic, peers, len(self.subscribers(topic)))
        earned = self._earned.first_deliveries
        others.sort(key=lambda peer: (peer in self._outbound, earned(peer)), reverse=True)
        return [*peers, *others[: max(0, room)]]

    def gossip_recipients(self, topic: str) -> list[PeerId]:
        """Return random peers outside the mesh to send IHAVE in this heartbeat: six (D_lazy),
        or a quarter of them if that is more (the gossip factor of 0.25)."""
        mesh = self.meshes.get(topic, {})
        outside = len(self.subscribers(topic)) - len(mesh)
        return self._sample(topic, mesh, max(6, outside // 4))

    # The heartbeat: `heartbeat` once, then `maintain` for each topic.

    def heartbeat(self, now: float) -> None:
        """Forget expired backoffs. This is called once in each heartbeat."""
        self._heartbeats += 1
        self._backoff.keep(lambda until: until > now - self._slack)

    def maintain(self, topic: str, now: float) -> tuple[list[PeerId], list[PeerId]]:
        """Keep the mesh of a topic within its bounds. Return the peers to send GRAFT and those
        to send PRUNE."""
        config, mesh = self._config, self.meshes[topic]
        pruned = self._excess(list(mesh)) if len(mesh) > config.high else []
        for peer in pruned:
            self.prune(topic, peer, now, BACKOFF)
        grafted = self._top_up(topic, now) if len(mesh) < config.low else []
        missing = config.outbound - self._count_outbound(mesh)
        if missing > 0:
            grafted += self._graft_some(topic, missing, now, self._outbound.__contains__)
        if self._heartbeats % 60 == 0 and mesh:  # as often as in gossipsub
            # gossipsub grafts peers with more first deliveries than the mesh only when the
            # median score of the mesh is below a threshold. Here the median number of first
            # deliveries is the threshold: a mesh of silent peers has the median 0, and any peer
            # that has delivered one message from outside it by IWANT is better. In a good mesh
            # no peer outside gets ahead, since it hears of messages later.
            earned = self._earned.first_deliveries
            median = sorted(map(earned, mesh))[len(mesh) // 2]
            better = [peer for peer in self.subscribers(topic) if earned(peer) > median]
            best = sorted(better, key=earned, reverse=True)[: config.high]
            # Two at a time, as in gossipsub: a third of a mesh of six, so a mesh of silent
            # peers is replaced within minutes.
            grafted += self._graft_some(topic, 2, now, best.__contains__)
        return grafted, pruned

    def _top_up(self, topic: str, now: float) -> list[PeerId]:
        """Graft random subscribers until the mesh has ``degree`` peers."""
        return self._graft_some(topic, self._config.degree - len(self.meshes[topic]), now)

    def _graft_some(
        self, topic: str, count: int, now: float, accepts: Predicate = bool
    ) -> list[PeerId]:
        """Graft at most ``count`` random subscribers whose backoff is over, and return them."""
        mesh, early = self.meshes[topic], now - self._slack
        chosen = self._sample(
            topic,
            mesh,
            count,
            lambda peer: accepts(peer) and not self.is_backed_off(topic, peer, early),
        )
        mesh.update(dict.fromkeys(chosen))
        return chosen

    def _excess(self, peers: list[PeerId]) -> list[PeerId]:
        """Return the peers to prune from a mesh that is too large. Random ones stay, with
        enough outbound peers among them."""
        self._rng.shuffle(peers)
        outbound = [peer for peer in peers if peer in self._outbound]
        first = outbound[: self._config.outbound]
        order = first + [peer for peer in peers if peer not in first]
        return order[self._config.degree :]

    def _count_outbound(self, peers: Iterable[PeerId]) -> int:
        return sum(peer in self._outbound for peer in peers)

    def _sample(
        self, topic: str, without: Peers, count: int, accepts: Predicate = bool
    ) -> list[PeerId]:
        """Return at most ``count`` random subscribers of a topic that are not in
        ``without``."""
        others = (peer for peer in self.subscribers(topic) if peer not in without)
        peers = list(filter(accepts, others))
        return self._rng.sample(peers, min(max(count, 0), len(peers)))

    def _remove_subscriber(self, topic: str, peer: PeerId) -> None:
        subscribers = self._subscribers.get(topic)
        if subscribers is not None:
            subscribers.pop(peer, None)
            if not subscribers:
                del self._subscribers[topic]
        self.meshes.get(topic, {}).pop(peer, None)
