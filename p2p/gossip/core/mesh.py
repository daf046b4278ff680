"""Who hears which topic, and with whom full messages are exchanged.

Of the connected peers that hear a topic, about ``degree`` are its *mesh*: they get every message at once.
The others get ids now and then and ask for what they miss. For a topic that we only publish to, a few of
its hearers are remembered as *fanout*. A peer that was pruned is not grafted again before its backoff ends.

Strangers who want to own a mesh
--------------------------------
An attacker connects a dozen times, grafts at once and passes nothing on. Four things keep a node informed,
and heard. (1) Peers that dialled us hold at most ``high - outbound`` seats; the others are for peers that
*we* dialled, which an attacker has to bring about first, and each look at the mesh grafts such peers until
there are ``outbound`` (gossipsub's D_out). (2) Ids outside the mesh bring what the mesh withholds, and who
brings news first earns credit. (3) Each minute up to two peers outside the mesh that earned more than the
mesh's median are grafted (opportunistic grafting), and a mesh that is cut back keeps those with most credit.
(4) What we say ourselves goes to all hearers, not to the mesh alone (flood publishing). Only connected peers
are in any of these tables: what a peer said that comes after its connection has ended is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from p2p.gossip.core.events import GossipConfig
from p2p.identity import PeerId
from p2p.wire import KI, MIB

MAX_TOPICS_OF_PEER: Final = 64
"""Topics a peer may subscribe to, as far as we remember; a run has about five."""
MAX_FANOUT: Final = 64
"""Topics that we publish to without hearing them."""
MAX_FLOOD: Final = 64
"""Peers that get a message of our own at once; a node has about twenty that hear its topics. Those of the
mesh, those that we dialled and those with most credit come first."""
FLOOD_BYTES: Final = MIB
"""Bytes of copies of one message beyond those for the mesh: 64 of an announcement (17 KiB), 4 of the largest
message. A publisher's upload is needed for its policies."""
MAX_BACKOFFS: Final = 16 * KI
"""Backoffs remembered, of five topics and 3,000 peers: they outlive a connection, or a new one would end
them. The oldest goes first; forgetting one too early costs a graft and a prune."""
KEPT_BEST: Final = 4
"""Peers that stay for their credit when a mesh is cut back (gossipsub's D_score); the others by chance."""
OPPORTUNISM: Final = 60
"""Intervals between two looks for peers that would serve us better than our mesh does, as in gossipsub."""
OPPORTUNISTS: Final = 2
"""Peers grafted at such a look."""
BACKOFF_SLACK: Final = 2.0
"""Intervals that we wait longer than a backoff says, so that no peer takes our graft for an early one."""

Peers = dict[PeerId, None]
Accepts = Callable[[PeerId], bool]
Worth = Callable[[PeerId], float]


class Mesh:
    """The topics of one node."""

    def __init__(self, config: GossipConfig, rng: Random) -> None:
        self.meshes: dict[str, Peers] = {}
        """For each topic that we hear, its mesh."""
        self._config = config
        self._rng = rng
        self._topics_of: dict[PeerId, dict[str, None]] = {}
        self._hearers: dict[str, Peers] = {}
        self._fanout: dict[str, tuple[Peers, float]] = {}
        self._dialled: Peers = {}
        self._looks = 0
        self._backoff: dict[tuple[str, PeerId], float] = {}

    def connected(self, peer: PeerId, dialled: bool) -> None:
        """A peer is there; what it hears it will say. ``dialled`` if we chose it, not it us."""
        self._topics_of.setdefault(peer, {})
        if dialled:
            self._dialled[peer] = None

    def disconnected(self, peer: PeerId) -> None:
        """A peer is gone."""
        for topic in self._topics_of.pop(peer, {}):
            self._unhear(topic, peer)
        self._dialled.pop(peer, None)

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a peer is there."""
        return peer in self._topics_of

    def connected_peers(self) -> list[PeerId]:
        """The peers that are there."""
        return list(self._topics_of)

    def heard_by(self, peer: PeerId, topic: str, wanted: bool) -> bool:
        """A connected peer subscribes or leaves; returns False if it subscribes to too much."""
        topics = self._topics_of[peer]
        if not wanted:
            topics.pop(topic, None)
            self._unhear(topic, peer)
        elif topic not in topics:
            if len(topics) >= MAX_TOPICS_OF_PEER:
                return False
            topics[topic] = None
            self._hearers.setdefault(topic, {})[peer] = None
        return True

    def hearers(self, topic: str) -> Peers:
        """The connected peers that hear ``topic``."""
        return self._hearers.get(topic, {})

    def subscribe(self, topic: str, now: float, accepts: Accepts) -> list[PeerId]:
        """Hear ``topic``; returns the peers to graft."""
        self.meshes[topic] = {}
        fanout, _ = self._fanout.pop(topic, ({}, 0.0))
        hearers = self.hearers(topic)
        first = [p for p in fanout if p in hearers and accepts(p) and self._may_graft(topic, p, now)]
        self.meshes[topic].update(dict.fromkeys(first))
        return first + self._top_up(topic, now, accepts)

    def unsubscribe(self, topic: str, now: float) -> list[PeerId]:
        """Hear it no more; returns the peers to prune."""
        peers = list(self.meshes.pop(topic, {}))
        for peer in peers:
            self.back_off(topic, peer, now, self._config.backoff)
        return peers

    def has_seat(self, topic: str, peer: PeerId) -> bool:
        """Whether a peer that grafts us may join our mesh; ``outbound`` seats are for dialled ones."""
        config, mesh = self._config, self.meshes[topic]
        if peer in self._dialled:
            return len(mesh) < config.high
        return len(mesh) - self._count_dialled(mesh) < config.high - config.outbound

    def graft(self, topic: str, peer: PeerId) -> None:
        """A peer takes us into its mesh, and we it into ours."""
        self.meshes[topic][peer] = None

    def prune(self, topic: str, peer: PeerId, now: float, backoff: float) -> None:
        """A peer is no mesh peer any more."""
        if topic in self.meshes:
            self.meshes[topic].pop(peer, None)
            self.back_off(topic, peer, now, backoff)

    def back_off(self, topic: str, peer: PeerId, now: float, backoff: float) -> None:
        """No graft for ``backoff`` seconds."""
        key = (topic, peer)
        if key not in self._backoff and len(self._backoff) >= MAX_BACKOFFS:
            del self._backoff[next(iter(self._backoff))]
        self._backoff[key] = max(self._backoff.get(key, now), now + backoff)

    def is_backed_off(self, topic: str, peer: PeerId, now: float) -> bool:
        """Whether a graft by this peer comes too early."""
        return self._backoff.get((topic, peer), -math.inf) > now

    def _may_graft(self, topic: str, peer: PeerId, now: float) -> bool:
        """Whether ours would not: their backoff may have begun a moment after ours."""
        return not self.is_backed_off(topic, peer, now - BACKOFF_SLACK * self._config.interval)

    def audience(self, topic: str, size: int, now: float, accepts: Accepts, credit: Worth) -> list[PeerId]:
        """Whom to send a message of our own of ``size`` bytes: the mesh, or the fanout, and all other hearers
        within `MAX_FLOOD` and `FLOOD_BYTES`."""
        if topic in self.meshes:
            peers = self.meshes[topic]
        else:
            peers, _ = self._fanout.get(topic, ({}, 0.0))
            peers = {peer: None for peer in peers if peer in self.hearers(topic) and accepts(peer)}
            missing = self._config.degree - len(peers)
            peers.update(dict.fromkeys(self._others(topic, peers, missing, accepts)))
            if topic in self._fanout or len(self._fanout) < MAX_FANOUT:
                self._fanout[topic] = (peers, now + self._config.fanout)
        room = min(MAX_FLOOD - len(peers), FLOOD_BYTES // max(1, size))
        others = self._others(topic, peers, len(self.hearers(topic)), accepts)
        others.sort(key=lambda peer: (peer in self._dialled, credit(peer)), reverse=True)
        return [*peers, *others[: max(0, room)]]

    def maintain(
        self, topic: str, now: float, accepts: Accepts, score: Worth, credit: Worth
    ) -> tuple[list[PeerId], list[PeerId]]:
        """Keep the mesh of a topic in its bounds; returns whom to graft and whom to prune."""
        config, mesh = self._config, self.meshes[topic]
        pruned = [peer for peer in mesh if not accepts(peer)]
        if len(mesh) - len(pruned) > config.high:
            staying = [peer for peer in mesh if peer not in pruned]
            pruned += self._worst(staying, lambda peer: (score(peer), credit(peer)))
        for peer in pruned:
            self.prune(topic, peer, now, config.backoff)
        grafted = self._top_up(topic, now, accepts) if len(mesh) < config.low else []
        grafted += self._graft_dialled(topic, now, accepts)
        if self._looks % OPPORTUNISM == 0:
            grafted += self._graft_better(topic, now, accepts, credit)
        return grafted, pruned

    def look(self) -> None:
        """An interval has gone by: each mesh is maintained now."""
        self._looks += 1

    def gossip_to(self, topic: str, accepts: Accepts) -> list[PeerId]:
        """Peers outside the mesh that are to be told ids now."""
        mesh = self.meshes.get(topic) or self._fanout.get(topic, ({}, 0.0))[0]
        outside = len(self.hearers(topic)) - len(mesh)
        return self._others(topic, mesh, max(self._config.lazy, outside // 4), accepts)

    def fanout_topics(self) -> list[str]:
        """Topics that we publish to without hearing them."""
        return list(self._fanout)

    def expire(self, now: float) -> None:
        """Forget old fanouts and ended backoffs."""
        self._fanout = {topic: known for topic, known in self._fanout.items() if known[1] > now}
        ended = now - BACKOFF_SLACK * self._config.interval
        self._backoff = {key: until for key, until in self._backoff.items() if until > ended}

    def _top_up(self, topic: str, now: float, accepts: Accepts) -> list[PeerId]:
        missing = self._config.degree - len(self.meshes[topic])
        return self._graft_some(topic, missing, now, accepts)

    def _graft_dialled(self, topic: str, now: float, accepts: Accepts) -> list[PeerId]:
        """Peers of our own choice that the mesh lacks."""
        missing = self._config.outbound - self._count_dialled(self.meshes[topic])
        if missing <= 0:
            return []
        return self._graft_some(topic, missing, now, lambda p: p in self._dialled and accepts(p))

    def _graft_better(self, topic: str, now: float, accepts: Accepts, credit: Worth) -> list[PeerId]:
        """Peers that brought more news from outside the mesh than half of it did."""
        earned = sorted(credit(peer) for peer in self.meshes[topic])
        if not earned:
            return []
        median = earned[len(earned) // 2]
        better = [peer for peer in self.hearers(topic) if credit(peer) > median]
        better = sorted(better, key=credit, reverse=True)[: self._config.high]
        return self._graft_some(topic, OPPORTUNISTS, now, lambda peer: peer in better and accepts(peer))

    def _graft_some(self, topic: str, count: int, now: float, accepts: Accepts) -> list[PeerId]:
        mesh = self.meshes[topic]
        chosen = self._others(
            topic, mesh, count, lambda peer: accepts(peer) and self._may_graft(topic, peer, now)
        )
        mesh.update(dict.fromkeys(chosen))
        return chosen

    def _worst(self, peers: list[PeerId], worth: Callable[[PeerId], tuple[float, float]]) -> list[PeerId]:
        """Whom to prune of a mesh that is too large: all but the best few, some by chance, and enough of
        those that we dialled."""
        config = self._config
        self._rng.shuffle(peers)
        best = sorted(peers, key=worth, reverse=True)[:KEPT_BEST]
        order = best + [peer for peer in peers if peer not in best]
        kept, rest = order[: config.degree], order[config.degree :]
        missing = config.outbound - self._count_dialled(kept)
        rescued = [peer for peer in rest if peer in self._dialled][: max(0, missing)]
        given_up = [peer for peer in reversed(kept) if peer not in self._dialled][: len(rescued)]
        return [peer for peer in rest if peer not in rescued] + given_up

    def _count_dialled(self, peers: Iterable[PeerId]) -> int:
        return sum(peer in self._dialled for peer in peers)

    def _others(self, topic: str, without: Iterable[PeerId], count: int, accepts: Accepts) -> list[PeerId]:
        """At most ``count`` random hearers of a topic that are not in ``without``."""
        known = dict.fromkeys(without)
        peers = [peer for peer in self.hearers(topic) if peer not in known and accepts(peer)]
        return self._rng.sample(peers, min(max(count, 0), len(peers)))

    def _unhear(self, topic: str, peer: PeerId) -> None:
        hearers = self._hearers.get(topic)
        if hearers is not None:
            hearers.pop(peer, None)
            if not hearers:
                del self._hearers[topic]
        self.meshes.get(topic, {}).pop(peer, None)
