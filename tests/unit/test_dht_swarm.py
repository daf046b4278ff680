"""Whole swarms of DHT cores on one heap (`bench.dht.Swarm`): joins, deaths, loss, lies,
partitions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.dht import WALL, Case, Node, Swarm, measure
from p2p.dht.config import DhtConfig
from p2p.dht.core.core import MAX_PUBLICATIONS
from p2p.dht.core.events import Forget, Join, Moved, SendIfConnected
from p2p.dht.core.validation import CLOCK_TOLERANCE
from p2p.dht.messages import (
    Ping,
    Store,
    decode_untrusted,
    encode,
)
from p2p.dht.record import Record, record_key, sign_record
from p2p.errors import LimitExceeded
from p2p.events import Received, Send

MESSAGES = Send | SendIfConnected


def joined(size: int, seed: int = 1, **options: float) -> Swarm:
    swarm = Swarm(size, seed, **options)  # type: ignore[arg-type]
    swarm.join_all()
    return swarm


def signed(
    node: Node,
    *,
    name: bytes = b"name",
    seqno: int = 1,
    lifetime: float = 600,
    value: bytes = b"v",
) -> Record:
    own = node.core.own
    bare = Record("test", name, own.peer, own.nonce, seqno, int(WALL + lifetime), value, b"")
    return sign_record(bare, node.key)


def ask(swarm: Swarm, node: Node, sender: Node, body: object) -> list[object]:
    """Hand a request to a core; the bodies of its answers and its other effects, less its own
    question.
    """
    data = encode(1, sender.core.own, body)  # type: ignore[arg-type]
    effects = node.core.handle(Received(sender.peer, data, WALL + swarm.now), swarm.now)
    said = [
        decode_untrusted(each.data).body if isinstance(each, MESSAGES) else each
        for each in effects
    ]
    return [each for each in said if not isinstance(each, Ping)]


def test_death_loss_and_lies_hide_nothing_and_forge_nothing() -> None:
    figures = measure(Case("all", dead=0.3, loss=0.05, liars=0.2), size=60, reads=60, seed=1)
    assert figures["reads right", "%"] == 100
    assert figures["wrong values", "1"] == 0
    assert figures["read p99", "virtual s"] < 3


def test_liars_are_punished_and_the_honest_are_not() -> None:
    swarm = joined(50, 4, liars=0.2, loss=0.05)
    for index in range(5):
        swarm.put(swarm.honest()[index], b"%d" % index, b"value")
    punished = {penalty.peer for node in swarm.honest() for penalty in node.penalised}
    liars = {node.peer for node in swarm.nodes.values() if node.lies is not None}
    assert len(punished & liars) > len(liars) / 2
    assert not punished - liars


def test_a_lost_ping_at_bootstrap_leaves_nobody_alone() -> None:
    swarm = Swarm(4, 5)
    swarm.blocked = lambda _one, _other: True
    swarm.join_all(until=3)
    assert all(node.core.contacts == 0 for node in swarm.nodes.values())
    swarm.blocked = lambda _one, _other: False
    swarm.run(swarm.now + 120)
    assert all(node.core.contacts == 3 for node in swarm.nodes.values())


def test_two_sides_of_a_partition_find_each_other_again() -> None:
    swarm = Swarm(24, 6, config=DhtConfig(difficulty=4, refresh_interval=60))
    swarm.join_all()
    nodes = list(swarm.nodes.values())
    left = dict.fromkeys(node.peer for node in nodes[::2])
    swarm.blocked = lambda one, other: (one in left) != (other in left)
    swarm.run(swarm.now + 600)
    assert all(
        node.core.contact_of(other.peer) is None
        for node in nodes
        for other in nodes
        if (node.peer in left) != (other.peer in left)
    )
    swarm.blocked = lambda _one, _other: False
    for seed in nodes[:3]:
        swarm.kill(seed)
    swarm.run(swarm.now + 300)
    swarm.put(nodes[4], b"name", b"over the gap")
    assert [record.value for record in swarm.get(nodes[3], b"name")[1]] == [b"over the gap"]


def test_who_has_no_address_reads_but_is_in_no_table() -> None:
    swarm = joined(20, 11)
    nodes = list(swarm.nodes.values())
    swarm.put(nodes[1], b"name", b"value")
    client = swarm.add()
    client.core._neighbours.own = replace(client.core.own, addrs=())
    swarm.give(client, Join(999, (nodes[0].peer,)))
    swarm.run(swarm.now + 20)
    assert client.core.contacts > 10
    assert [record.value for record in swarm.get(client, b"name")[1]] == [b"value"]
    assert all(node.core.contact_of(client.peer) is None for node in nodes)


# One core, attacked.


@pytest.fixture
def pair() -> tuple[Swarm, Node, Node]:
    swarm = Swarm(2, 12)
    victim, other = swarm.nodes.values()
    return swarm, victim, other


def store(record: Record, salt: int = 0) -> Store:
    return Store(record_key(record.namespace, record.name, salt), record.encode())


def test_a_replayed_older_record_does_not_replace_the_newer(
    pair: tuple[Swarm, Node, Node],
) -> None:
    swarm, victim, other = pair
    old, new = signed(other, seqno=1, value=b"old"), signed(other, seqno=2, value=b"new")
    ask(swarm, victim, other, store(new))
    ask(swarm, victim, other, store(old))
    assert [each.value for each in victim.core._store.get(store(new).key)] == [b"new"]


def test_publications_are_bounded() -> None:
    swarm = Swarm(1, 14)
    (node,) = swarm.nodes.values()
    for index in range(MAX_PUBLICATIONS - 1):  # our address is the first
        swarm.put(node, b"%d" % index, b"value")
    with pytest.raises(LimitExceeded):
        swarm.put(node, b"one too many", b"value")
    swarm.give(node, Moved(()))
    swarm.put(node, b"in the place of our address", b"value")
    # we can be dialled again, and nobody is there to be told
    swarm.give(node, Moved((node.addr,)))


def test_what_is_forgotten_is_not_renewed() -> None:
    swarm = joined(12, 8)
    node = list(swarm.nodes.values())[4]
    swarm.put(node, b"name", b"value", lifetime=60)
    swarm.give(node, Forget("test", b"name"))
    swarm.run(swarm.now + 60 + CLOCK_TOLERANCE + 1)
    assert swarm.get(node, b"name")[1] == ()
