from __future__ import annotations

import importlib
import subprocess
import sys
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, strategies as st

from p2p.dht.core.table import RoutingTable
from p2p.dht.messages import Contact
from p2p.errors import MissingDependency
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

ADDRS = (Multiaddr.tcp("10.0.0.1", 1),)


def contact(rng: Random) -> Contact:
    return Contact(PeerId.from_public_key(rng.randbytes(32)), rng.randbytes(8), ADDRS)


def table_with(count: int, seed: int, ksize: int = 20) -> tuple[RoutingTable, list[Contact]]:
    rng = Random(seed)
    table = RoutingTable(contact(rng), ksize)
    heard = [contact(rng) for _ in range(count)]
    for each in heard:
        table.add(each)
    return table, heard


def held(table: RoutingTable) -> list[Contact]:
    return [node.contact for bucket in table.buckets for node in bucket.nodes.values()]


@given(st.integers(0, 200), st.integers(0, 2**32), st.integers(1, 20))
def test_closest_are_the_closest(size: int, seed: int, count: int) -> None:
    table, _ = table_with(size, seed)
    target = Random(seed + 1).getrandbits(160)
    expected = sorted(held(table), key=lambda each: each.number ^ target)[:count]
    assert table.closest(target.to_bytes(20, "big"), count) == expected


@given(st.integers(0, 400), st.integers(0, 2**32), st.integers(1, 20))
def test_buckets_cover_the_space_once_and_hold_their_own(
    size: int, seed: int, ksize: int
) -> None:
    table, _ = table_with(size, seed, ksize)
    ranges = [bucket.range for bucket in table.buckets]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 2**160 - 1
    assert all(one[1] + 1 == two[0] for one, two in pairwise(ranges))
    for bucket in table.buckets:
        assert len(bucket) <= ksize
        assert all(
            bucket.range[0] <= node.long_id <= bucket.range[1] for node in bucket.nodes.values()
        )
    assert all(table.contact_of(each.peer) is each for each in held(table))
    assert len(table) == len(held(table))


def test_a_full_bucket_names_whom_to_ping_and_the_silent_make_room() -> None:
    table, _ = table_with(300, 7, ksize=4)
    before = held(table)
    newcomer = next(
        each
        for each in (contact(Random(seed)) for seed in range(1000))
        if table.add(each) is not None
    )
    oldest = table.add(newcomer)
    assert oldest is not None
    assert oldest in before
    assert table.contact_of(newcomer.peer) is None
    table.remove(oldest)
    assert table.contact_of(oldest.peer) is None
    assert table.contact_of(newcomer.peer) is newcomer
    assert len(table) == len(before)


def test_a_peer_has_one_place_and_its_newest_addresses() -> None:
    rng = Random(9)
    table = RoutingTable(contact(rng), 20)
    first = contact(rng)
    table.add(first)
    table.add(Contact(first.peer, first.nonce, (Multiaddr.tcp("10.9.9.9", 2),)))
    assert [str(addr) for addr in table.closest(bytes(20), 9)[0].addrs] == [
        "/ip4/10.9.9.9/tcp/2"
    ]
    moved = Contact(first.peer, rng.randbytes(8), ADDRS)
    table.add(moved)
    assert table.closest(bytes(20), 9) == [moved]
    assert table.contact_of(first.peer) is moved


def test_stale_targets_lie_in_buckets_not_looked_up() -> None:
    table, _ = table_with(300, 2)
    own = table.node.long_id
    assert len(table.stale_targets(0.0, Random(1))) == len(table.buckets)
    table.touch(own, 5.0)
    stale = table.stale_targets(1.0, Random(1))
    assert len(stale) == len(table.buckets) - 1
    assert all(table._index(target) != table._index(own) for target in stale)


def test_without_kademlia_the_operator_reads_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kademlia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kademlia", None)
    monkeypatch.delitem(sys.modules, "p2p.dht.core.table")
    with pytest.raises(MissingDependency, match="pip install kademlia"):
        importlib.import_module("p2p.dht.core.table")


def python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_nobody_loads_kademlia_before_a_dht_is_opened() -> None:
    code = (
        "import sys, p2p, p2p.dht; print('kademlia' in sys.modules, 'asyncio' in sys.modules)"
    )
    assert python(code).split()[0] == "False"
