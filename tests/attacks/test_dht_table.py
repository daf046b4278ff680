"""Who gets into a DHT node's routing table, and who is thrown out of it."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random

from bench.dht import WALL, Node, Swarm
from p2p.dht.core.events import Get, Moved
from p2p.dht.core.table import RoutingTable
from p2p.dht.messages import Contact, FindNode, Nodes, Ping, Pong, decode_untrusted, encode
from p2p.dht.stamp import NONCE_BYTES, stamp_work
from p2p.events import Penalise, Received
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from tests.attacks.dht import DIFFICULTY, add_at, contact, greet, key_pair, sent, tell

FAR = 0b00001  # the first bits of the bucket under attack; the victim's differ in the first


def victim_and_twenty() -> tuple[Swarm, Node, list[Node]]:
    """A node with a full bucket of twenty honest contacts, which it may not split."""
    swarm = Swarm(0, 1)
    victim = add_at(swarm, 0b1, 1)
    honest = [add_at(swarm, FAR, 5) for _ in range(20)]
    for number, node in enumerate(honest):
        for _ in range(2):  # the second finds it in the table
            ping = encode(1, node.core.own, Ping())
            swarm.at(number * 0.1, partial(swarm._send, node, victim.peer, ping))
    swarm.run(60)
    for node in honest:
        greet(victim, node.core.own, swarm.now)
    # Half of the bucket is met by questions of visitors, the rest by a lookup of our own.
    swarm.give(victim, Get(1, "test", b"name"))
    swarm.run(120)
    return swarm, victim, honest


def known(victim: Node, honest: list[Node]) -> int:
    return sum(victim.core.contact_of(node.peer) is not None for node in honest)


def flood(
    swarm: Swarm, victim: Node, attackers: list[Node], body: object, *, seconds: float
) -> None:
    """Every attacker says ``body`` 50 times a second, and answers what it is asked."""
    for step in range(int(seconds * 50)):
        for attacker in attackers:
            data = encode(step, attacker.core.own, body)  # type: ignore[arg-type]
            swarm.at(swarm.now + step / 50, partial(swarm._send, attacker, victim.peer, data))
    swarm.run(swarm.now + seconds + 10)


def test_unsolicited_pongs_evict_nobody() -> None:
    """Each made the victim ping an honest node, until that answered no more: 20 of 20 went."""
    swarm, victim, honest = victim_and_twenty()
    assert known(victim, honest) == 20
    attackers = [add_at(swarm, FAR, 5) for _ in range(20)]
    flood(swarm, victim, attackers, Pong(), seconds=30)
    assert known(victim, honest) == 20
    assert known(victim, attackers) == 0


def test_neither_do_requests_of_attackers_who_answer() -> None:
    swarm, victim, honest = victim_and_twenty()
    attackers = [add_at(swarm, FAR, 5) for _ in range(20)]
    pinged: list[PeerId] = []
    swarm.tapped = lambda by, to, data: (
        pinged.append(to)
        if by == victim.peer and isinstance(decode_untrusted(data).body, Ping)
        else None
    )
    flood(swarm, victim, attackers, Ping(), seconds=10)
    assert known(victim, honest) == 20
    assert known(victim, attackers) == 0
    assert len(pinged) <= 20, "before: one for each of 10,000 requests"


def test_a_visitor_enters_the_table_when_it_has_answered_and_not_before() -> None:
    swarm = Swarm(1, 1)
    (victim,) = swarm.nodes.values()
    mute, honest = contact(key_pair(1)), contact(key_pair(2))
    for second in range(120):
        tell(victim, mute, FindNode(bytes(20)), float(second))
        greet(victim, honest, float(second))
    assert victim.core.contact_of(honest.peer) == honest
    assert victim.core.contact_of(mute.peer) is None


def test_one_network_gets_ten_places_and_two_in_a_bucket() -> None:
    """Before: 200 names in one /24 had every place that they came to."""
    rng = Random(1)

    def at(addr: str) -> Contact:
        peer = PeerId.from_public_key(rng.randbytes(32))
        return Contact(peer, rng.randbytes(8), (Multiaddr.tcp(addr, 4001),))

    table = RoutingTable(at("93.3.3.3"), 20)
    hosts = "81.2.3.{}", "2a01:4f8:1:{}::1"
    for number in range(1000):
        for host in hosts:
            table.add(at(host.format(number % 250)))
        places = [
            [str(node.contact.addrs[0]) for node in bucket.nodes.values()]
            for bucket in table.buckets
        ]
        for host in hosts:
            in_bucket = [sum(host[:7] in place for place in each) for each in places]
            assert max(in_bucket) <= 2
            assert sum(in_bucket) <= 10
        table.add(at(f"93.{number // 250}.{number % 250}.1"))
    assert len(table) > 500, "the honest, each in its own network, find their places"


def test_private_addresses_are_one_crowd_to_a_node_on_the_public_internet() -> None:
    """Else 10.0.0.1, which costs nothing and cannot be dialled, passes the network limit."""
    swarm = Swarm(1, 1)
    (victim,) = swarm.nodes.values()
    victim.core.handle(Moved((Multiaddr.tcp("93.4.5.6", 4001),)), 0.0)
    for number in range(200):
        greet(victim, contact(key_pair(number), f"10.{number}.0.1"))
    assert victim.core.contacts <= 10


def test_long_contacts_have_no_place() -> None:
    """Twenty contacts with names of 250 characters would make each answer 20 KB."""
    swarm = Swarm(1, 1)
    (victim,) = swarm.nodes.values()
    for number in range(20):
        each = contact(key_pair(number))
        addrs = tuple(
            Multiaddr((("dns", f"{number}-{digit}-" + 200 * "a"), ("tcp", "4001")))
            for digit in range(4)
        )
        greet(victim, type(each)(each.peer, each.nonce, addrs))
    answer, _ = sent(tell(victim, contact(key_pair(99)), FindNode(bytes(20)), 2.0))[0]
    assert len(answer.data) < 200


def test_a_held_up_dial_evicts_nobody_and_a_dead_peer_is_forgotten() -> None:
    """While silent addresses hold the host's dial slots, live peers cannot answer."""
    swarm, victim, honest = victim_and_twenty()
    for node in honest:
        swarm._links.pop((node.peer, victim.peer), None)
        swarm._links.pop((victim.peer, node.peer), None)
        victim.core._neighbours.up.pop(node.peer, None)
    real_send = swarm._send
    swarm._send = lambda node, peer, data: None  # type: ignore[method-assign]  # dials wait for a slot
    swarm.give(victim, Get(2, "test", b"name"))
    swarm.run(swarm.now + 40)
    assert known(victim, honest) == 20
    swarm._send = real_send  # type: ignore[method-assign]
    swarm.run(swarm.now + 60)
    for node in honest:
        swarm.kill(node)
    for token in range(3, 8):
        swarm.give(victim, Get(token, "test", b"name"))
        swarm.run(swarm.now + 70)
    assert known(victim, honest) == 0


def test_what_floods_is_not_even_read() -> None:
    swarm, victim, honest = victim_and_twenty()
    attacker = contact(key_pair(1))
    for _ in range(300):
        tell(victim, attacker, Pong(), swarm.now)
    garbage = victim.core.handle(Received(attacker.peer, b"garbage", WALL), swarm.now)
    assert garbage == [], "a peer far over its allowance is not decoded any more"
    answer = tell(victim, honest[0].core.own, FindNode(bytes(20)), swarm.now)
    assert any(isinstance(reply.body, Nodes) for _, reply in sent(answer)), (
        "and nobody else suffers from it"
    )


def test_who_comes_without_work_is_penalised_and_not_answered() -> None:
    swarm = Swarm(0, 1)
    victim, nonces = swarm.add(), (number.to_bytes(NONCE_BYTES, "big") for number in count())
    lazy = key_pair(7).peer_id
    nonce = next(each for each in nonces if stamp_work(lazy, each) < DIFFICULTY)
    effects = tell(victim, Contact(lazy, nonce, ()), FindNode(bytes(20)), 0.0)
    assert [type(effect) for effect in effects] == [Penalise]
