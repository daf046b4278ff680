from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from p2p.dht.record import (
    ADDRESSES,
    CLOCK_TOLERANCE,
    MAX_LIFETIME,
    MAX_RECORD,
    MAX_VALUE,
    SALTS,
    Judgement,
    Record,
    RecordJudge,
    decode_record_untrusted,
    encode_addrs,
    record_key,
    sign_record,
)
from p2p.dht.stamp import check_stamp, make_stamp
from p2p.dht.store import MAX_PER_PUBLISHER, MAX_PUBLISHERS, Holding, RecordStore
from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.multiaddr import Multiaddr

WALL = 1_800_000_000.0
BITS = 4
KEY = KeyPair(bytes(32))
NONCE = make_stamp(KEY.peer_id, BITS)
JUDGE = RecordJudge(verify, BITS, {ADDRESSES.name: ADDRESSES})


def record(
    key: KeyPair = KEY,
    *,
    namespace: str = "run",
    name: bytes = b"name",
    seqno: int = 1,
    lifetime: float = 600,
    value: bytes = b"value",
) -> Record:
    nonce = NONCE if key is KEY else make_stamp(key.peer_id, BITS)
    bare = Record(namespace, name, key.peer_id, nonce, seqno, int(WALL + lifetime), value, b"")
    return sign_record(bare, key)


def place(each: Record, salt: int = 0) -> bytes:
    return record_key(each.namespace, each.name, salt)


@given(
    st.text("abcz-", min_size=1, max_size=32),
    st.binary(max_size=64),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=MAX_VALUE),
)
@settings(max_examples=60, deadline=None)
def test_a_record_survives_the_wire(namespace: str, name: bytes, seqno: int, value: bytes) -> None:
    sent = record(namespace=namespace, name=name, seqno=seqno, value=value)
    blob = sent.encode()
    assert len(blob) <= MAX_RECORD
    assert decode_record_untrusted(blob) == sent
    assert JUDGE.judge(sent, place(sent), WALL) is Judgement.VALID


def test_it_belongs_under_its_salted_keys_only() -> None:
    good = record()
    keys = JUDGE.keys(good.namespace, good.name)
    assert len(dict.fromkeys(keys)) == SALTS
    assert all(JUDGE.judge(good, key, WALL) is Judgement.VALID for key in keys)
    assert JUDGE.judge(good, bytes(20), WALL) is Judgement.FORGED
    assert JUDGE.judge(good, record_key("run", good.name, SALTS), WALL) is Judgement.FORGED


@pytest.mark.parametrize(
    "change",
    [
        {"value": b"other"},
        {"seqno": 2},
        {"expires": int(WALL) + 601},
        {"publisher": KeyPair(bytes([1] * 32)).peer_id},
        {"signature": bytes(64)},
    ],
)
def test_whatever_is_changed_makes_a_forgery(change: dict[str, object]) -> None:
    forged = replace(record(), **change)  # type: ignore[arg-type]
    assert JUDGE.judge(forged, place(forged), WALL) is Judgement.FORGED


def test_a_publisher_without_a_stamp_says_nothing() -> None:
    strict = RecordJudge(verify, 16, {})
    assert not check_stamp(KEY.peer_id, NONCE, 16)
    assert strict.judge(record(), place(record()), WALL) is Judgement.FORGED


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (-MAX_LIFETIME + 600, Judgement.VALID),
        (-MAX_LIFETIME - CLOCK_TOLERANCE + 599, Judgement.STALE),
        (600 + CLOCK_TOLERANCE - 1, Judgement.VALID),
        (600 + CLOCK_TOLERANCE, Judgement.STALE),
    ],
)
def test_time_is_judged_with_five_minutes_of_tolerance(age: float, expected: Judgement) -> None:
    assert JUDGE.judge(record(), place(record()), WALL + age) is expected


def test_an_address_record_is_by_and_about_its_publisher() -> None:
    value = encode_addrs((Multiaddr.tcp("10.0.0.1", 4001),))
    own = record(namespace="addr", name=KEY.peer_id.digest, value=value)
    assert JUDGE.judge(own, place(own), WALL) is Judgement.VALID
    assert JUDGE.keys("addr", own.name) == (place(own),)
    about_another = record(namespace="addr", name=b"x" * 38, value=value)
    assert JUDGE.judge(about_another, place(about_another), WALL) is Judgement.REFUSED
    no_address = record(namespace="addr", name=KEY.peer_id.digest, value=b"no address")
    assert JUDGE.judge(no_address, place(no_address), WALL) is Judgement.REFUSED


@pytest.mark.parametrize(
    "change",
    [{"namespace": ""}, {"namespace": "x" * 33}, {"namespace": "ü"}, {"name": bytes(65)}, {"seqno": -1},
     {"value": bytes(MAX_VALUE + 1)}, {"nonce": bytes(7)}, {"signature": bytes(63)}, {"expires": -1}],
)  # fmt: skip
def test_fields_out_of_bounds_do_not_decode(change: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode_record_untrusted(replace(record(), **change).encode())  # type: ignore[arg-type]


# The store.


def keep(store: RecordStore, each: Record, now: float = 0.0, key: bytes | None = None) -> Holding:
    return store.put(key or place(each), each, each.encode(), WALL, now)


def test_the_newest_sequence_number_wins() -> None:
    store = RecordStore(0)
    assert keep(store, record(seqno=2)) is Holding.NEW
    assert keep(store, record(seqno=1, value=b"replayed")) is Holding.OLDER
    assert keep(store, record(seqno=2)) is Holding.KNOWN
    assert keep(store, record(seqno=3, value=b"new")) is Holding.NEW
    assert [each.value for each in store.get(place(record()))] == [b"new"]
    assert len(store) == 1


def test_many_publishers_share_a_key_up_to_a_limit() -> None:
    store = RecordStore(0)
    crowd = [record(KeyPair(bytes([1, each] + 30 * [0]))) for each in range(MAX_PUBLISHERS + 1)]
    assert [keep(store, each) for each in crowd[:-1]] == [Holding.NEW] * MAX_PUBLISHERS
    assert keep(store, crowd[-1]) is Holding.FULL
    renewed = record(KeyPair(bytes([1, 0] + 30 * [0])), seqno=9)
    assert keep(store, renewed) is Holding.NEW
    assert len(store.blobs(place(renewed))) == MAX_PUBLISHERS


def test_one_publisher_gets_so_much_and_no_more() -> None:
    store = RecordStore(0)
    own = [record(name=b"%d" % each) for each in range(MAX_PER_PUBLISHER + 1)]
    assert keep(store, own[0]) is Holding.NEW
    results = [keep(store, each) for each in own[1:]]
    assert results == [Holding.NEW] * (MAX_PER_PUBLISHER - 1) + [Holding.FULL]


def test_a_full_node_drops_what_lies_farthest() -> None:
    own = 0
    store = RecordStore(own, limit=16)
    records = [record(KeyPair(bytes([2, each] + 30 * [0])), name=b"%d" % each) for each in range(40)]
    for each in records:
        keep(store, each)
    assert len(store) <= 16
    kept = [each for each in records if store.get(place(each))]
    nearest = sorted(records, key=lambda each: int.from_bytes(place(each), "big") ^ own)[:15]
    assert all(each in kept for each in nearest)


def test_records_are_dropped_when_their_time_is_over() -> None:
    store = RecordStore(0)
    keep(store, record(lifetime=100), now=50.0)
    assert store.next_deadline == 50 + 100 + CLOCK_TOLERANCE
    store.expire(store.next_deadline - 1)
    assert len(store) == 1
    store.expire(store.next_deadline)
    assert len(store) == 0
    assert store.get(place(record())) == []
    assert store.unrefreshed(1e9, 10) == []


def test_renewing_often_costs_no_memory() -> None:
    store = RecordStore(0, limit=16)
    bare = record()
    for seqno in range(5000):
        store.put(place(bare), replace(bare, seqno=seqno), bytes([seqno % 256]), WALL, 0.0)
    assert len(store) == 1
    assert len(store._expiry) < 2000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_store_converges_whatever_the_order(puts: list[tuple[int, int]]) -> None:
    one, two = RecordStore(0), RecordStore(0)
    bare = [replace(record(), publisher=KeyPair(bytes([3, who] + 30 * [0])).peer_id) for who in range(6)]
    for store, order in ((one, puts), (two, puts[::-1])):
        for who, seqno in order:
            store.put(place(bare[0]), replace(bare[who], seqno=seqno), bytes([who, seqno]), WALL, 0.0)
    assert sorted(one.blobs(place(bare[0]))) == sorted(two.blobs(place(bare[0])))
