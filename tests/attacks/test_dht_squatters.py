"""64 publishers fill a run's key, so that its members cannot be found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from bench.dht import WALL, Node, Swarm
from p2p.dht.config import DhtConfig
from p2p.dht.core.core import DhtCore
from p2p.dht.core.events import Effect, Found, Get, Put
from p2p.dht.core.validation import Namespace, PublisherKind
from p2p.dht.messages import MAX_RECORDS, Contact, FindValue, Store, Stored, Values
from p2p.dht.record import Record, record_key
from p2p.events import Tick
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr
from p2p.node.rundoc import RunBook
from p2p.node.wiring import RUN_RECORDS, run_records
from p2p.wire import pack
from tests.attacks.dht import DIFFICULTY, contact, key_pair, place, sent, signed, tell

RUN = bytes(32)
LIFETIME = 1800.0


def at(host: str) -> bytes:
    """The value of a run record."""
    return pack([Multiaddr.tcp(host, 4001).to_bytes()])


def town(size: int, namespace: Namespace = RUN_RECORDS) -> Swarm:
    """A swarm whose nodes know what a run record is."""
    swarm = Swarm(size, 1, config=DhtConfig(difficulty=DIFFICULTY))
    for node in swarm.nodes.values():
        describe(node.core, namespace)
    swarm.join_all()
    return swarm


def describe(core: DhtCore, namespace: Namespace) -> None:
    core._validator.namespaces[namespace.name] = namespace


def squat(swarm: Swarm, squatters: list[KeyPair], host: str = "10.66.0.{}") -> int:
    """Every squatter stores its record at every node under every key; how many are held."""
    held = 0
    for number, key in enumerate(squatters):
        lifetime = min(LIFETIME, RUN_RECORDS.max_lifetime)
        record = signed(
            key, RUN, namespace="run", value=at(host.format(number % 250)), lifetime=lifetime
        )
        for node in swarm.nodes.values():
            for salt in range(3):
                store = Store(place(record, salt), record.encode())
                held += any(
                    each.body == Stored(True)
                    for _, each in sent(tell(node, contact(key), store, swarm.now))
                )
    return held


def publish(swarm: Swarm, members: list[Node]) -> None:
    for node in members:
        value = at(str(node.addr.parts[0][1]))
        swarm.give(node, Put(7, "run", RUN, value, LIFETIME, WALL + swarm.now))
        swarm.run(swarm.now + 1)
    swarm.run(swarm.now + 5)


def found(swarm: Swarm, reader: Node) -> set[PeerId]:
    return {record.publisher for record in swarm.get(reader, RUN, "run")[1]}


def test_members_are_found_among_squatters_who_came_first() -> None:
    """No node here takes part in the run, so none can tell a member."""
    swarm = town(16)
    nodes = list(swarm.nodes.values())
    assert squat(swarm, [key_pair(number, 66) for number in range(MAX_RECORDS)]) > 0
    publish(swarm, nodes[2:14])
    members = {node.peer for node in nodes[2:14]}
    assert len(found(swarm, nodes[15]) & members) >= 11


def test_many_more_squatters_than_places_hide_few_members() -> None:
    """Each node draws its own sample: a member that one has no place for has one at others."""
    swarm = town(12)
    nodes = list(swarm.nodes.values())
    squat(swarm, [key_pair(number, 66) for number in range(150)])
    publish(swarm, nodes[2:10])
    assert len(found(swarm, nodes[11]) & {node.peer for node in nodes[2:10]}) >= 6


class Reading:
    """A get of one node, answered by hand."""

    def __init__(self, reader: Node) -> None:
        self.reader = reader
        self.ends: list[Found] = []
        self._asked: dict[tuple[PeerId, bytes], int] = {}
        self.note(reader.core.handle(Get(1, "test", b"name"), 0.0))

    def note(self, effects: list[Effect]) -> None:
        for effect, envelope in sent(effects):
            if isinstance(envelope.body, FindValue):
                self._asked[effect.peer, envelope.body.key] = envelope.request_id
        self.ends.extend(effect for effect in effects if isinstance(effect, Found))

    def wait(self, now: float) -> None:
        self.note(self.reader.core.handle(Tick(WALL + now), now))

    def answer(self, peers: list[Contact], key: bytes, values: Values, now: float) -> None:
        """Those of ``peers`` that were asked for ``key`` answer."""
        for peer in peers:
            request_id = self._asked.get((peer.peer, key))
            if request_id is not None:
                self.note(tell(self.reader, peer, values, now, request_id))


def test_a_get_goes_on_when_nearer_nodes_become_known_after_liars_have_settled_it() -> None:
    """It ended while the nodes that hold the keys were being asked."""
    swarm = Swarm(1, 1, config=DhtConfig(difficulty=DIFFICULTY))
    (reader,) = swarm.nodes.values()
    known = [contact(key_pair(number), f"10.{number}.0.1") for number in range(4)]
    crowd = [contact(key_pair(number, 7), f"10.{number}.0.2") for number in range(100)]
    for each in known:
        reader.core._neighbours.table.add(each)
    squat, member = (signed(key_pair(number, 66), b"name").encode() for number in range(2))
    reading = Reading(reader)
    keys = [int.from_bytes(record_key("test", b"name", salt), "big") for salt in range(3)]
    ordered = {
        key.to_bytes(20, "big"): (
            near := sorted(known, key=lambda each: each.number ^ key),
            [each for each in crowd if each.number ^ key < near[0].number ^ key],
        )
        for key in keys
    }
    for liars, (key, (near, _)) in zip((2, 1, 0), ordered.items(), strict=True):
        reading.answer(near[:liars], key, Values((squat,), ()), 0.1)
    for key, (near, nearer) in ordered.items():
        reading.answer(near[2:], key, Values((), tuple(nearer[:20])), 0.2)
    reading.wait(0.7)
    assert not reading.ends
    for key, (_, nearer) in ordered.items():
        reading.answer(nearer, key, Values((squat, member), ()), 0.8)
    reading.wait(2.0)
    assert [len(end.records) for end in reading.ends] == [2]


def test_squatters_of_one_network_get_a_quarter_of_the_places() -> None:
    swarm = town(4)
    squat(swarm, [key_pair(number, 66) for number in range(100)], host="81.2.3.{}")
    stores = [node.core._store._keys for node in swarm.nodes.values()]
    held = [
        sum(one.record.namespace == "run" for one in keys.values())
        for store in stores
        for keys in store.values()
    ]
    assert max(held) == 16


def knowing(members: set[PeerId], officers: set[PeerId]) -> Namespace:
    def kind_of(record: Record) -> PublisherKind:
        if record.publisher in officers:
            return PublisherKind.OFFICER
        return PublisherKind.MEMBER if record.publisher in members else PublisherKind.STRANGER

    return replace(RUN_RECORDS, kind_of=kind_of)


def test_who_knows_the_run_holds_and_believes_its_members_only() -> None:
    swarm = town(12)
    nodes = list(swarm.nodes.values())
    members = {node.peer for node in nodes}
    # before anybody knew
    squat(swarm, [key_pair(number, 66) for number in range(MAX_RECORDS)])
    for node in nodes:
        describe(node.core, knowing(members, set()))
    assert squat(swarm, [key_pair(number, 67) for number in range(10)]) == 0
    publish(swarm, nodes[2:8])
    assert found(swarm, nodes[11]) == {node.peer for node in nodes[2:8]}


def test_officers_have_places_under_a_key_full_of_members() -> None:
    swarm = town(6)
    nodes = list(swarm.nodes.values())
    crowd = [key_pair(number, 66) for number in range(100)]
    members = {key.peer_id for key in crowd} | {node.peer for node in nodes}
    officers = {nodes[3].peer, nodes[4].peer}
    for node in nodes:
        describe(node.core, knowing(members, officers))
    squat(swarm, crowd)
    publish(swarm, nodes[3:5])
    for node in nodes[:3]:
        for salt in range(3):
            key = place(signed(crowd[0], RUN, namespace="run", value=at("10.0.0.1")), salt)
            assert officers <= {record.publisher for record in node.core._store.get(key)}
            assert len(node.core._store.get(key)) <= MAX_RECORDS
    assert officers <= found(swarm, nodes[0])


def test_a_run_record_lives_an_hour_at_most() -> None:
    """Before: 24 h. Who wants a place has to come back for it."""
    swarm = town(1)
    (node,) = swarm.nodes.values()
    squatter = key_pair(1, 66)
    for lifetime, expected in ((12 * 3600.0, False), (LIFETIME, True)):
        record = signed(
            squatter, RUN, namespace="run", value=at("10.66.0.1"), lifetime=lifetime
        )
        store = Store(place(record), record.encode())
        _, answer = sent(tell(node, contact(squatter), store, swarm.now))[0]
        assert answer.body == Stored(expected)


def test_a_node_tells_the_publishers_of_its_own_run_apart_and_no_others() -> None:
    officer, member, stranger = (key_pair(number) for number in range(3))
    run = SimpleNamespace(id=RUN, officers=(officer.peer_id,))
    book = cast(RunBook, SimpleNamespace(run=run, may=lambda peer, _: peer == member.peer_id))
    kind_of = run_records(book).kind_of
    kinds = [kind_of(signed(key, RUN, namespace="run")) for key in (officer, member, stranger)]
    assert kinds == [PublisherKind.OFFICER, PublisherKind.MEMBER, PublisherKind.STRANGER]
    assert kind_of(signed(stranger, b"x" * 32, namespace="run")) is PublisherKind.UNKNOWN
