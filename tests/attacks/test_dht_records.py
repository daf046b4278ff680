"""What attackers do with records: fill a node, fill an answer, tire a reader."""

from __future__ import annotations

from dataclasses import replace

from bench.dht import WALL, Node
from p2p.dht.core.events import Effect, Get
from p2p.dht.core.requester import MAX_FOUND, GetOperation
from p2p.dht.core.validation import RecordValidator
from p2p.dht.messages import MAX_RECORDS, FindValue, Store, Stored, Values
from p2p.dht.record import MAX_VALUE
from p2p.events import Penalise
from p2p.identity import KeyPair
from tests.attacks.dht import alone, contact, key_pair, meet, place, sent, signed, tell

LATER = 1000.0


def test_a_stranger_stores_its_own_records_and_no_others() -> None:
    """Before: one connection brought the records of any number of publishers."""
    node = alone()
    carrier = contact(key_pair(1))
    for number in range(20):
        record = signed(key_pair(number, 2), b"name")
        replies = sent(tell(node, carrier, Store(place(record), record.encode()), 1.0))
        assert replies[0][1].body == Stored(False)
    assert node.core.records == 0
    meet(node, contact(key_pair(3)))
    record = signed(key_pair(1, 2), b"name")
    replies = sent(tell(node, contact(key_pair(3)), Store(place(record), record.encode()), 1.0))
    assert replies[0][1].body == Stored(True), "a peer in the table may store it"


def test_long_records_of_distant_expiry_do_not_crowd_others_out_of_an_answer() -> None:
    """An answer held the latest to expire: 46 of the attacker's 1.4 KiB and nothing else."""
    node = alone()
    key = b""
    for number in range(MAX_RECORDS):
        honest = number % 4 == 3  # the last to come
        value, lifetime = (bytes(100), 1800.0) if honest else (bytes(MAX_VALUE), 86_000.0)
        record = signed(key_pair(number), b"name", value=value, lifetime=lifetime)
        key = place(record)
        tell(node, contact(key_pair(number)), Store(key, record.encode()), 1.0)
    (_, answer), *_ = sent(tell(node, contact(key_pair(1, 9)), FindValue(key), 2.0))
    assert isinstance(answer.body, Values)
    assert sum(len(blob) < 500 for blob in answer.body.records) == MAX_RECORDS // 4


def asked(node: Node, liar: KeyPair) -> tuple[int, bytes]:
    """The node reads a name; the number and key of its question to ``liar``."""
    meet(node, contact(liar))
    for _, question in sent(node.core.handle(Get(1, "test", b"name"), LATER)):
        if isinstance(question.body, FindValue):
            return question.request_id, question.body.key
    raise AssertionError("the liar is not asked")


def test_a_holder_with_many_editions_of_one_publisher_is_a_liar() -> None:
    """Else one stamp costs a reader 23,040 signatures, 1.8 s of its event loop."""
    node = alone()
    liar = key_pair(1)
    request_id, key = asked(node, liar)
    salt = next(salt for salt in range(3) if place(signed(liar, b"name"), salt) == key)
    editions = tuple(signed(liar, b"name", seqno=seqno).encode() for seqno in range(64))
    assert place(signed(liar, b"name"), salt) == key
    effects: list[Effect] = tell(
        node, contact(liar), Values(editions, ()), LATER + 0.1, request_id
    )
    assert any(isinstance(effect, Penalise) for effect in effects)
    assert node.core.contact_of(liar.peer_id) is None


def test_a_reading_returns_a_bounded_number_of_publishers() -> None:
    """Before: 64 of each of 120 answers, under three keys: 23,040 records, 34 MB."""
    reading = GetOperation(1, "test", b"name")
    validator = RecordValidator(lambda *_: True, 0, {})
    key = place(signed(key_pair(1), b"name"))
    bare = signed(key_pair(1), b"name")
    for answer in range(20):
        blobs = [
            replace(bare, publisher=key_pair(64 * answer + number, 4).peer_id).encode()
            for number in range(64)
        ]
        assert reading.take_untrusted(key, blobs, validator, WALL)
    assert len(reading.records) == MAX_FOUND
    assert len(reading.validated) <= 2 * MAX_FOUND
