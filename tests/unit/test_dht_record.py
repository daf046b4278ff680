from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from p2p.dht.core.store import (
    MAX_PER_PUBLISHER,
    RecordStore,
)
from p2p.dht.core.validation import (
    ADDRESSES,
    CLOCK_TOLERANCE,
    RecordPriority,
    RecordValidator,
)
from p2p.dht.messages import MAX_RECORDS
from p2p.dht.record import (
    MAX_VALUE,
    Record,
    decode_record_untrusted,
    encode_addrs,
    record_key,
    sign_record,
)
from p2p.dht.stamp import check_stamp, make_stamp
from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId, verify
from p2p.multiaddr import Multiaddr

WALL = 1_800_000_000.0
BITS = 4
KEY = KeyPair(bytes(32))
NONCE = make_stamp(KEY.peer_id, BITS)
VALIDATOR = RecordValidator(verify, BITS, {ADDRESSES.name: ADDRESSES})


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


def test_it_belongs_under_its_salted_keys_only() -> None:
    good = record()
    keys = VALIDATOR.keys(good.namespace, good.name)
    assert len(dict.fromkeys(keys)) == 3
    assert all(VALIDATOR.validate(good, key, WALL) for key in keys)
    for key in (bytes(20), record_key("run", good.name, 3)):
        with pytest.raises(BadMessage):
            VALIDATOR.validate(good, key, WALL)


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
    with pytest.raises(BadMessage):
        VALIDATOR.validate(forged, place(forged), WALL)


def test_a_record_whose_publisher_has_no_stamp_is_a_forgery() -> None:
    nonces = (number.to_bytes(8, "big") for number in range(99))
    weak = next(each for each in nonces if not check_stamp(KEY.peer_id, each, BITS))
    signed = sign_record(replace(record(), nonce=weak), KEY)
    with pytest.raises(BadMessage, match="forged"):
        VALIDATOR.validate(signed, place(signed), WALL)


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (-24 * 3600 + 600, True),
        (-24 * 3600 - CLOCK_TOLERANCE + 599, False),
        (600 + CLOCK_TOLERANCE - 1, True),
        (600 + CLOCK_TOLERANCE, False),
    ],
)
def test_time_is_judged_with_five_minutes_of_tolerance(age: float, expected: bool) -> None:
    assert VALIDATOR.validate(record(), place(record()), WALL + age) is expected


def test_an_address_record_is_by_and_about_its_publisher() -> None:
    value = encode_addrs((Multiaddr.tcp("10.0.0.1", 4001),))
    own = record(namespace="addr", name=KEY.peer_id.digest, value=value)
    assert VALIDATOR.validate(own, place(own), WALL)
    assert VALIDATOR.keys("addr", own.name) == (place(own),)
    about_another = record(namespace="addr", name=b"x" * 38, value=value)
    assert not VALIDATOR.validate(about_another, place(about_another), WALL)
    no_address = record(namespace="addr", name=KEY.peer_id.digest, value=b"no address")
    assert not VALIDATOR.validate(no_address, place(no_address), WALL)


@pytest.mark.parametrize(
    "change",
    [{"namespace": ""}, {"namespace": "x" * 33}, {"namespace": "ü"}, {"name": bytes(65)},
     {"seqno": -1}, {"value": bytes(MAX_VALUE + 1)}, {"nonce": bytes(7)},
     {"signature": bytes(63)}, {"expires": -1}],
)  # fmt: skip
def test_fields_out_of_bounds_do_not_decode(change: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode_record_untrusted(replace(record(), **change).encode())  # type: ignore[arg-type]


# The store.


def keep(store: RecordStore, each: Record, now: float = 0.0, key: bytes | None = None) -> bool:
    return store.put(key or place(each), each, each.encode(), WALL, now, RecordPriority())


def crowd(size: int, tens: int = 1) -> list[Record]:
    """Records of many publishers under one key; they are not verified here, so none is
    signed.
    """
    bare = record()
    return [
        replace(
            bare, publisher=KeyPair(bytes([tens, each % 256, each // 256] + 29 * [0])).peer_id
        )
        for each in range(size)
    ]


def publishers(store: RecordStore) -> list[PeerId]:
    return sorted(each.publisher for each in store.get(place(record())))


def test_which_publishers_it_keeps_is_each_nodes_own_secret_and_not_a_matter_of_order() -> None:
    kept = []
    for secret, order in ((b"ours", 1), (b"ours", -1), (b"theirs", 1)):
        store = RecordStore(0, secret=secret)
        for each in crowd(200)[::order]:
            keep(store, each)
        kept.append(publishers(store))
    assert kept[0] == kept[1]
    assert len(set(kept[0]) & set(kept[2])) < MAX_RECORDS / 2


def test_who_moves_into_a_crowded_prefix_may_lose_its_place() -> None:
    store = RecordStore(0, secret=b"ours")
    near = RecordPriority(groups=("81.2.3.0/24",))
    for each in crowd(200):
        store.put(place(each), each, each.encode(), WALL, 0.0, near)
    outcomes = []
    for each in crowd(40, tens=2):
        keep(store, each)
        newer = replace(each, seqno=2)
        outcomes.append(store.put(place(each), newer, newer.encode(), WALL, 0.0, near))
        crowded = sum(near == held.priority for held in store._keys[place(each)].values())
        assert crowded <= 16
    assert not all(outcomes)


def test_a_full_node_takes_from_those_who_have_most() -> None:
    """A publisher chooses its names, and so how near to a node its records lie."""
    store = RecordStore(0, limit=4 * MAX_PER_PUBLISHER)
    greedy = crowd(4)
    for number in range(MAX_PER_PUBLISHER):
        for each in greedy:
            keep(store, each, key=bytes(18) + number.to_bytes(2, "big"))
    assert len(store) == 4 * MAX_PER_PUBLISHER
    modest = crowd(100, tens=2)
    assert all(
        keep(store, each, key=b"\xff" * 18 + number.to_bytes(2, "big"))
        for number, each in enumerate(modest)
    )
    assert len(store) == 4 * MAX_PER_PUBLISHER
    counts = [len(keys) for keys in store._by_publisher.values()]
    assert sum(counts) == len(store)
    assert sorted(counts)[-4:] == 4 * [MAX_PER_PUBLISHER - 25]


def test_one_publisher_gets_so_much_and_no_more() -> None:
    store = RecordStore(0)
    own = [record(name=b"%d" % each) for each in range(MAX_PER_PUBLISHER + 1)]
    assert keep(store, own[0])
    results = [keep(store, each) for each in own[1:]]
    assert results == [True] * (MAX_PER_PUBLISHER - 1) + [False]


def test_a_full_node_drops_what_lies_farthest() -> None:
    own = 0
    store = RecordStore(own, limit=16)
    records = [
        record(KeyPair(bytes([2, each] + 30 * [0])), name=b"%d" % each) for each in range(40)
    ]
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


def test_renewing_often_costs_no_memory() -> None:
    store = RecordStore(0, limit=16)
    bare = record()
    for seqno in range(5000):
        store.put(
            place(bare),
            replace(bare, seqno=seqno),
            bytes([seqno % 256]),
            WALL,
            0.0,
            RecordPriority(),
        )
    assert len(store) == 1
    assert len(store._expiry) < 2000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=40))
def test_the_store_converges_whatever_the_order(puts: list[tuple[int, int]]) -> None:
    one, two = RecordStore(0), RecordStore(0)
    bare = [
        replace(record(), publisher=KeyPair(bytes([3, who] + 30 * [0])).peer_id)
        for who in range(6)
    ]
    for store, order in ((one, puts), (two, puts[::-1])):
        for who, seqno in order:
            each, blob = replace(bare[who], seqno=seqno), bytes([who, seqno])
            store.put(place(bare[0]), each, blob, WALL, 0.0, RecordPriority())
    assert sorted(one.blobs(place(bare[0]))) == sorted(two.blobs(place(bare[0])))
