"""Who hears which topic, and with whom full messages are exchanged.

Of the connected peers that hear a topic, about ``degree`` are its *mesh*: they get every message at once.
The others get ids now and then and ask for what they miss. For a topic that we only publish to, a few of
its hearers are remembered as *fanout*. A peer that was pruned is not grafted again before its backoff ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from p2p.gossip.events import GossipConfig
from p2p.identity import PeerId

MAX_TOPICS_OF_PEER: Final = 64
"""Topics a peer may subscribe to, as far as we remember; a run has about five."""
MAX_FANOUT: Final = 64
"""Topics that we publish to without hearing them."""
BACKOFF_SLACK: Final = 2.0
"""Intervals that we wait longer than a backoff says, so that nobody takes our graft for an early one."""

Peers = dict[PeerId, None]
Accepts = Callable[[PeerId], bool]


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
        self._backoff: dict[tuple[str, PeerId], float] = {}

    def connected(self, peer: PeerId) -> None:
        """A peer is there; what it hears it will say."""
        self._topics_of.setdefault(peer, {})

    def disconnected(self, peer: PeerId) -> None:
        """A peer is gone."""
        for topic in self._topics_of.pop(peer, {}):
            self._unhear(topic, peer)

    def connected_peers(self) -> list[PeerId]:
        """The peers that are there."""
        return list(self._topics_of)

    def heard_by(self, peer: PeerId, topic: str, wanted: bool) -> bool:
        """A peer subscribes or leaves; returns False if it subscribes to too much."""
        topics = self._topics_of.setdefault(peer, {})
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
        first = [peer for peer in fanout if accepts(peer) and self._may_graft(topic, peer, now)]
        self.meshes[topic].update(dict.fromkeys(first))
        return first + self._top_up(topic, now, accepts)

    def unsubscribe(self, topic: str, now: float) -> list[PeerId]:
        """Hear it no more; returns the peers to prune."""
        peers = list(self.meshes.pop(topic, {}))
        for peer in peers:
            self.back_off(topic, peer, now, self._config.backoff)
        return peers

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
        self._backoff[key] = max(self._backoff.get(key, now), now + backoff)

    def is_backed_off(self, topic: str, peer: PeerId, now: float) -> bool:
        """Whether a graft by this peer comes too early."""
        return self._backoff.get((topic, peer), -math.inf) > now

    def _may_graft(self, topic: str, peer: PeerId, now: float) -> bool:
        """Whether ours would not: their backoff may have begun a moment after ours."""
        return not self.is_backed_off(topic, peer, now - BACKOFF_SLACK * self._config.interval)

    def audience(self, topic: str, now: float, accepts: Accepts) -> list[PeerId]:
        """Whom to send a message of our own: the mesh and a few more, or the fanout."""
        config = self._config
        if topic in self.meshes:
            chosen = dict(self.meshes[topic])
            chosen.update(dict.fromkeys(self._others(topic, chosen, config.high - len(chosen), accepts)))
            return list(chosen)
        peers, _ = self._fanout.get(topic, ({}, 0.0))
        peers = {peer: None for peer in peers if peer in self.hearers(topic) and accepts(peer)}
        peers.update(dict.fromkeys(self._others(topic, peers, config.degree - len(peers), accepts)))
        if topic in self._fanout or len(self._fanout) < MAX_FANOUT:
            self._fanout[topic] = (peers, now + config.fanout)
        return list(peers)

    def maintain(
        self, topic: str, now: float, accepts: Accepts, score: Callable[[PeerId], float]
    ) -> tuple[list[PeerId], list[PeerId]]:
        """Keep the mesh of a topic in its bounds; returns whom to graft and whom to prune."""
        config, mesh = self._config, self.meshes[topic]
        pruned = [peer for peer in mesh if not accepts(peer)]
        if len(mesh) - len(pruned) > config.high:
            others = [peer for peer in mesh if peer not in pruned]
            self._rng.shuffle(others)
            others.sort(key=score, reverse=True)
            pruned += others[config.degree :]
        for peer in pruned:
            self.prune(topic, peer, now, config.backoff)
        grafted = self._top_up(topic, now, accepts) if len(mesh) < config.low else []
        return grafted, pruned

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
        mesh = self.meshes[topic]
        missing = self._config.degree - len(mesh)
        chosen = self._others(
            topic, mesh, missing, lambda peer: accepts(peer) and self._may_graft(topic, peer, now)
        )
        mesh.update(dict.fromkeys(chosen))
        return chosen

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
