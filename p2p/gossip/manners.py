"""Who behaves: quotas, promises and demerits of the connected peers."""

from __future__ import annotations

from typing import Final

from p2p.gossip.events import GossipConfig
from p2p.identity import PeerId

FORGED_POINTS: Final = 25.0
MALFORMED_POINTS: Final = 25.0
REJECTED_POINTS: Final = 10.0
GRAFT_POINTS: Final = 2.0
BROKEN_PROMISE_POINTS: Final = 2.0
FLOOD_POINTS: Final = 1.0
"""Points of penalty. Four forgeries are an enemy; a broken promise may be bad luck."""
BAD: Final = 10.0
"""Demerits from which a peer is kept out of the mesh: one rejected message, for a while."""
INCREDIBLE: Final = 40.0
"""Demerits from which its ids and its questions are ignored."""
FADING: Final = 0.97
"""What is left of demerits after an interval: half of them are gone in 23."""
MAX_ASKED: Final = 500
"""Ids asked of one peer in an interval: more than any run publishes."""
MAX_PROMISES: Final = 8192
"""Ids asked for that did not come yet."""
MAX_BLAMED: Final = 4096
"""Peers with demerits. They outlive a connection, or a new one would wash them off."""


class Manners:
    """What each peer may still do, and what is held against it."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self._demerits: dict[PeerId, float] = {}
        self._bytes: dict[PeerId, tuple[float, float]] = {}
        self._asked: dict[PeerId, int] = {}
        self._promises: dict[bytes, tuple[PeerId, float]] = {}

    def score(self, peer: PeerId) -> float:
        """Higher is better; 0 if nothing is held against it."""
        return -self._demerits.get(peer, 0.0)

    def is_good(self, peer: PeerId) -> bool:
        """Whether it may be a mesh peer."""
        return self._demerits.get(peer, 0.0) < BAD

    def is_credible(self, peer: PeerId) -> bool:
        """Whether its ids and questions are worth an answer."""
        return self._demerits.get(peer, 0.0) < INCREDIBLE

    def blame(self, peer: PeerId, points: float) -> None:
        """Hold something against it."""
        if peer not in self._demerits and len(self._demerits) >= MAX_BLAMED:
            del self._demerits[next(iter(self._demerits))]
        self._demerits[peer] = self._demerits.get(peer, 0.0) + points

    def may_send(self, peer: PeerId, size: int, now: float) -> bool:
        """Take ``size`` bytes from its quota, if they are there."""
        config = self._config
        left, since = self._bytes.get(peer, (config.burst, now))
        left = min(config.burst, left + (now - since) * config.rate)
        allowed = size <= left
        self._bytes[peer] = (left - size if allowed else left, now)
        return allowed

    def may_ask(self, peer: PeerId, count: int) -> int:
        """How many of ``count`` ids it may be asked for."""
        asked = self._asked.get(peer, 0)
        allowed = max(0, min(count, MAX_ASKED - asked, MAX_PROMISES - len(self._promises)))
        self._asked[peer] = asked + allowed
        return allowed

    def promised(self, identity: bytes, peer: PeerId, now: float) -> None:
        """It said that it has this, and was asked for it."""
        self._promises[identity] = (peer, now + self._config.promise)

    def is_promised(self, identity: bytes) -> bool:
        """Whether somebody was asked for this already."""
        return identity in self._promises

    def kept(self, identity: bytes) -> None:
        """It came, from whomever."""
        self._promises.pop(identity, None)

    def broken_promises(self, now: float) -> list[PeerId]:
        """The peers whose messages did not come in time, each once."""
        broken = {identity: peer for identity, (peer, until) in self._promises.items() if until <= now}
        for identity in broken:
            del self._promises[identity]
        return list(dict.fromkeys(broken.values()))

    def fade(self) -> None:
        """An interval has gone by: forgive a little, and let everybody be asked again."""
        faded = {peer: points * FADING for peer, points in self._demerits.items()}
        self._demerits = {peer: points for peer, points in faded.items() if points >= 0.1}
        self._asked.clear()

    def disconnected(self, peer: PeerId) -> None:
        """It is gone; its promises are void, its demerits stay."""
        self._bytes.pop(peer, None)
        self._asked.pop(peer, None)
        self._promises = {each: made for each, made in self._promises.items() if made[0] != peer}
