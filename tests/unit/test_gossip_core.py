"""Gossip cores in swarms on one heap."""

from __future__ import annotations

from random import Random
from typing import Any

from p2p.events import PeerDown, PeerUp, Received, Tick
from p2p.gossip.config import GossipConfig
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.events import Subscribe
from p2p.gossip.core.mesh import MAX_TOPICS_OF_PEER
from p2p.gossip.messages import (
    PubsubMessage,
    Rpc,
    encode_rpc,
    sign_message,
)
from p2p.identity import PeerId
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named

TOPIC = "run/policy"
ENEMY = peer_named(10_000)
FRIEND = peer_named(10_001)


def verify(peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
    assert domain == ""
    return fake_verify(peer, domain, payload, signature)


def make_core(peer: PeerId, *, seed: int = 1, config: GossipConfig | None = None) -> GossipCore:
    return GossipCore(
        FakeSigner(peer),
        config or GossipConfig(),
        Random(seed),
        verify=verify,
        seqno=1_700_000_000,
    )


class Lone:
    """One core, and what it does."""

    def __init__(self, *, config: GossipConfig | None = None, hearers: int = 0) -> None:
        self.core = make_core(peer_named(0), config=config)
        self.now = 100.0
        self.do(Tick())
        self.do(Subscribe(TOPIC))
        for peer in [ENEMY, FRIEND, *(peer_named(number) for number in range(1, hearers + 1))]:
            self.do(PeerUp(peer))
            self.hear(peer, Rpc(subscriptions=[(TOPIC, True)]))

    def do(self, event: Any) -> list[Any]:
        return self.core.handle(event, self.now)

    def hear(self, peer: PeerId, rpc: Rpc) -> list[Any]:
        return self.do(Received(peer, encode_rpc(rpc)))

    def later(self, seconds: float) -> list[Any]:
        effects = []
        until = self.now + seconds
        while self.core.next_deadline <= until:
            self.now = max(self.now, self.core.next_deadline)
            effects += self.do(Tick())
        self.now = until
        return effects


def message_of(
    author: PeerId, data: bytes = b"good", *, seqno: int = 7, topic: str = TOPIC
) -> PubsubMessage:
    return sign_message(FakeSigner(author), topic, data, seqno)


def test_messages_of_foreign_keys_and_topics_are_dropped_without_blame() -> None:
    lone = Lone()
    foreign = PubsubMessage(b"\x12\x20" + bytes(32), bytes(8), TOPIC, b"x", bytes(64))
    wrong_key = PubsubMessage(
        peer_named(3).digest, bytes(8), TOPIC, b"x", bytes(64), key=b"another"
    )
    assert lone.hear(FRIEND, Rpc(messages=[foreign, wrong_key])) == []
    assert lone.hear(FRIEND, Rpc(messages=[message_of(peer_named(3), topic="other")])) == []
    assert lone.core.counters["foreign key"] == 2
    assert lone.core.counters["not ours"] == 1


def test_subscriptions_of_one_peer_are_bounded() -> None:
    lone = Lone()
    for start in range(0, 400, 100):
        topics = [(f"topic {number}", True) for number in range(start, start + 100)]
        lone.hear(ENEMY, Rpc(subscriptions=topics))
    assert lone.core.counters["too many topics"] == 400 - (MAX_TOPICS_OF_PEER - 1)
    lone.do(PeerDown(ENEMY))
    assert list(lone.core._mesh._subscribers) == [TOPIC]
