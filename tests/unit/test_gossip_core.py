"""Gossip cores in swarms on one heap."""

from __future__ import annotations

from random import Random
from typing import Any

from p2p.events import PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.gossip.config import GossipConfig
from p2p.gossip.core.core import MAX_PENDING, GossipCore
from p2p.gossip.core.events import (
    Deliver,
    Publish,
    Subscribe,
    Validate,
    Validated,
    Validity,
)
from p2p.gossip.core.mesh import MAX_TOPICS_OF_PEER
from p2p.gossip.messages import (
    PubsubMessage,
    Rpc,
    decode_rpc_untrusted,
    encode_rpc,
    sign_message,
)
from p2p.identity import PeerId
from tests.unit.core_swarm import CoreSwarm, FakeSigner, Node, fake_verify, peer_named

TOPIC = "run/policy"
ENEMY = peer_named(10_000)
FRIEND = peer_named(10_001)


def verify(peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
    assert domain == ""
    return fake_verify(peer, domain, payload, signature)


class GossipSwarm(CoreSwarm):
    """Everybody is connected to ``degree`` random others and hears `TOPIC`; ``bad`` data is
    rejected.
    """

    def __init__(self, size: int, seed: int = 1, degree: int = 10, **link: Any) -> None:
        super().__init__(seed, **link)
        self.delivered: dict[PeerId, list[bytes]] = {}
        self.judged: dict[PeerId, list[bytes]] = {}
        for number in range(size):
            self.start(number, degree)
        self.run(5)

    def start(self, number: int, degree: int) -> Node:
        peer = peer_named(number)
        others = [node.peer for node in self.alive()]
        node = Node(peer, make_core(peer, seed=number))
        self.nodes[peer] = node
        self.delivered[peer], self.judged[peer] = [], []
        self.drive(node, Subscribe(TOPIC))
        for other in self.rng.sample(others, min(degree // 2, len(others))):
            self.connect(node, other)
        self.drive(node, Tick())
        return node

    def connect(self, node: Node, peer: PeerId) -> None:
        pair = (node.peer, peer) if node.peer < peer else (peer, node.peer)
        if pair not in self._links:
            self._links[pair] = self.now
            self._arrival[node.peer, peer] = self._arrival[peer, node.peer] = self.now
            self.drive(node, PeerUp(peer, dialled=True))
            self.drive(self.nodes[peer], PeerUp(node.peer))

    def received(self, peer: PeerId, data: bytes) -> Received:
        return Received(peer, data)

    def tick(self) -> Tick:
        return Tick()

    def connection_event(self, peer: PeerId, state: str) -> PeerDown | None:
        return PeerDown(peer) if state == "disconnected" else None

    def carry_out(self, node: Node, effect: Any) -> None:
        match effect:
            case Send(peer, data):
                self.send(node, peer, data)
            case Validate(identity, _, _, data):
                self.judged[node.peer].append(data)
                validity = Validity.REJECT if data.startswith(b"bad") else Validity.ACCEPT
                self.drive(node, Validated(identity, validity))
            case Deliver(_, _, data):
                self.delivered[node.peer].append(data)
            case Penalise(peer, offence, _):
                node.penalties[peer] += offence.points

    def publish(self, number: int, data: bytes) -> None:
        self.drive(self.nodes[peer_named(number)], Publish(TOPIC, data))

    def reached(self, data: bytes) -> int:
        return sum(self.delivered[node.peer].count(data) for node in self.alive())

    def count(self, name: str) -> int:
        return sum(node.core.counters[name] for node in self.nodes.values())


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


def rpcs(effects: list[Any], peer: PeerId) -> list[Rpc]:
    return [
        decode_rpc_untrusted(each.data)
        for each in effects
        if isinstance(each, Send) and each.peer == peer
    ]


def blamed(effects: list[Any]) -> list[tuple[PeerId, str]]:
    return [
        (each.peer, each.reason.split(":")[0]) for each in effects if isinstance(each, Penalise)
    ]


def message_of(
    author: PeerId, data: bytes = b"good", *, seqno: int = 7, topic: str = TOPIC
) -> PubsubMessage:
    return sign_message(FakeSigner(author), topic, data, seqno)


# Swarms.


def test_everybody_gets_everything_once_and_soon() -> None:
    swarm = GossipSwarm(60)
    for number in range(20):
        swarm.publish(number, b"news %d" % number)
    swarm.run(1.5)
    for number in range(20):
        assert swarm.reached(b"news %d" % number) == 59
    assert not any(node.penalties for node in swarm.nodes.values())


def test_duplicates_are_bounded_by_the_degree_of_the_mesh() -> None:
    swarm = GossipSwarm(60, degree=20)
    before = swarm.count("duplicate")
    for number in range(15):
        swarm.publish(number, b"news %d" % number)
        swarm.run(0.5)
    assert swarm.count("accept") == 15 * 59
    assert (swarm.count("duplicate") - before) / (15 * 59) < GossipConfig().high - 1


def test_lost_messages_are_asked_for() -> None:
    swarm = GossipSwarm(40, seed=3, loss=0.0)
    swarm.loss = 0.3
    for number in range(10):
        swarm.publish(number, b"news %d" % number)
    swarm.run(2)
    swarm.loss = 0.0
    swarm.run(4)
    for number in range(10):
        assert swarm.reached(b"news %d" % number) == 39


def test_what_is_rejected_goes_no_further_than_one_hop() -> None:
    swarm = GossipSwarm(40)
    publisher = peer_named(0)
    mesh = {node.peer for node in swarm.alive() if node.peer != publisher}
    swarm.publish(0, b"bad news")
    swarm.run(5)
    judges = [peer for peer in mesh if swarm.judged[peer]]
    assert 0 < len(judges) <= GossipConfig().high
    assert swarm.reached(b"bad news") == 0
    for node in swarm.alive():
        assert set(node.penalties) <= {publisher}
        assert (node.penalties[publisher] >= 10) == (node.peer in judges)


# One core.


def test_nothing_is_passed_on_before_it_was_validated() -> None:
    lone = Lone()
    lone.later(2)
    assert set(lone.core.topics[TOPIC]) == {ENEMY, FRIEND}
    message = message_of(peer_named(3))
    effects = lone.hear(ENEMY, Rpc(messages=[message]))
    assert [type(effect) for effect in effects] == [Validate]
    effects = lone.do(Validated(message.id, Validity.ACCEPT))
    assert [effect for effect in effects if isinstance(effect, Deliver)] == [
        Deliver(TOPIC, peer_named(3), b"good")
    ]
    assert rpcs(effects, FRIEND)[0].messages == [message]
    assert rpcs(effects, ENEMY) == []  # it sent it
    assert lone.hear(FRIEND, Rpc(messages=[message])) == []
    assert lone.core.counters["duplicate"] == 1


def test_who_repeats_a_rejected_message_is_blamed_too() -> None:
    lone = Lone()
    message = message_of(peer_named(3), b"bad")
    lone.hear(ENEMY, Rpc(messages=[message]))
    assert blamed(lone.do(Validated(message.id, Validity.REJECT))) == [(ENEMY, "rejected")]
    assert blamed(lone.hear(FRIEND, Rpc(messages=[message]))) == [(FRIEND, "rejected")]


def test_a_forgery_is_blamed_and_does_not_block_what_it_imitates() -> None:
    lone = Lone()
    real = message_of(peer_named(3))
    forged = PubsubMessage(real.author, real.seqno, real.topic, b"lies", real.signature)
    assert blamed(lone.hear(ENEMY, Rpc(messages=[forged]))) == [(ENEMY, "forged")]
    assert [type(effect) for effect in lone.hear(FRIEND, Rpc(messages=[real]))] == [Validate]


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


def test_promises_that_are_kept_or_broken() -> None:
    lone = Lone()
    told = [message_of(peer_named(3), seqno=number) for number in (1, 2)]
    (rpc,) = rpcs(lone.hear(ENEMY, Rpc(ihave=[(TOPIC, [told[0].id])])), ENEMY)
    assert rpc.iwant == [told[0].id]
    lone.later(1)
    (rpc,) = rpcs(lone.hear(FRIEND, Rpc(ihave=[(TOPIC, [each.id for each in told])])), FRIEND)
    # nobody has seen the enemy keep a promise
    assert set(rpc.iwant) == {each.id for each in told}
    lone.hear(FRIEND, Rpc(messages=[told[1]]))
    assert blamed(lone.later(2.5)) == [(ENEMY, "broken promise")]
    assert blamed(lone.later(5)) == [(FRIEND, "broken promise")]


def test_a_peer_that_brought_news_is_left_an_interval_to_answer() -> None:
    lone = Lone()
    news = message_of(peer_named(3))
    lone.hear(FRIEND, Rpc(messages=[news]))
    lone.do(Validated(news.id, Validity.ACCEPT))
    told = message_of(peer_named(3), seqno=8).id
    (rpc,) = rpcs(lone.hear(FRIEND, Rpc(ihave=[(TOPIC, [told])])), FRIEND)
    assert rpc.iwant == [told]
    assert rpcs(lone.hear(ENEMY, Rpc(ihave=[(TOPIC, [told])])), ENEMY) == []
    lone.later(1)
    (rpc,) = rpcs(lone.hear(ENEMY, Rpc(ihave=[(TOPIC, [told])])), ENEMY)
    assert rpc.iwant == [told]


def test_a_prune_is_respected_until_its_backoff_has_ended() -> None:
    lone = Lone()
    lone.later(2)
    lone.hear(FRIEND, Rpc(prune=[(TOPIC, 90)]))
    assert FRIEND not in lone.core.topics[TOPIC]
    assert all(not rpc.graft for rpc in rpcs(lone.later(91), FRIEND))
    assert any(rpc.graft == [TOPIC] for rpc in rpcs(lone.later(5), FRIEND))


def test_a_full_mesh_refuses_a_graft_and_keeps_seats_for_those_that_we_dialled() -> None:
    lone = Lone(hearers=30)
    for number in range(1, 31):
        lone.hear(peer_named(number), Rpc(graft=[TOPIC]))
    assert len(lone.core.topics[TOPIC]) == GossipConfig().high - GossipConfig().outbound
    chosen = [peer_named(number) for number in range(100, 104)]
    for peer in chosen:
        lone.do(PeerUp(peer, dialled=True))
        lone.hear(peer, Rpc(subscriptions=[(TOPIC, True)], graft=[TOPIC]))
    assert len(lone.core.topics[TOPIC]) == GossipConfig().high
    assert lone.core.topics[TOPIC][-2:] == tuple(chosen[:2])


def test_subscriptions_of_one_peer_are_bounded() -> None:
    lone = Lone()
    for start in range(0, 400, 100):
        topics = [(f"topic {number}", True) for number in range(start, start + 100)]
        lone.hear(ENEMY, Rpc(subscriptions=topics))
    assert lone.core.counters["too many topics"] == 400 - (MAX_TOPICS_OF_PEER - 1)
    lone.do(PeerDown(ENEMY))
    assert list(lone.core._mesh._subscribers) == [TOPIC]


def test_waiting_validations_are_bounded() -> None:
    lone = Lone()
    lone.later(20)  # a newcomer may not send so much
    for number in range(MAX_PENDING + 5):
        lone.hear(FRIEND, Rpc(messages=[message_of(peer_named(3), seqno=number)]))
    assert lone.core.counters["too many pending"] == 5
    lone.now += 60
    lone.later(1)
    assert not lone.core._pending  # their validator has crashed
