"""The ledger: a chain that survives being killed at every byte, and lies that prove
themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, StorageError
from p2p.identity import KeyPair
from p2p.ledger import Ledger
from p2p.ledger.core.chain import (
    EMPTY,
    MAX_BODY,
    Entry,
    Head,
    check_link,
    decode_fork_untrusted,
    encode_record,
    make_entry,
)
from p2p.machine import RealWorld
from p2p.wire import frame, pack

AUTHOR = KeyPair(b"a" * 32)
OTHER = KeyPair(b"b" * 32)


def chain(length: int, author: KeyPair = AUTHOR) -> list[Entry]:
    entries, head = [], EMPTY
    for number in range(length):
        entries.append(
            make_entry(head, author, "verdict", bytes([number]) * number, wall=1000.5)
        )
        head = check_link(head, entries[-1])
    return entries


def on_disk(entries: list[Entry]) -> bytes:
    return b"".join(encode_record(entry) for entry in entries)


@asynccontextmanager
async def ledger_in(folder: Path, segment_bytes: int = 1 << 20) -> AsyncIterator[Ledger]:
    ledger = await Ledger(RealWorld(AUTHOR, folder), segment_bytes=segment_bytes).opened()
    yield ledger


def test_a_chain_takes_only_its_next_entry() -> None:
    first, second, third = chain(3)
    head = check_link(EMPTY, first)
    assert head == Head(0, first.digest)
    with pytest.raises(BadMessage, match="does not continue"):
        check_link(head, third)
    with pytest.raises(BadMessage, match="does not continue"):
        check_link(head, replace(second, previous=bytes(32)))


def test_limits_are_ours_to_keep() -> None:
    with pytest.raises(ValueError, match="kind of 1 to"):
        make_entry(EMPTY, AUTHOR, "", b"", 0)
    with pytest.raises(ValueError, match="at most"):
        make_entry(EMPTY, AUTHOR, "verdict", bytes(MAX_BODY + 1), 0)


def test_entries_of_one_log_are_no_fork() -> None:
    one, two = chain(2)
    elsewhere = make_entry(EMPTY, OTHER, "verdict", b"accepted", 0)
    for other in (one, two, elsewhere):
        with pytest.raises(BadMessage, match="prove no equivocation"):
            Equivocation(one, other)
        with pytest.raises(BadMessage, match="prove no equivocation"):
            decode_fork_untrusted(pack([one.encode(), other.encode()]))


async def test_what_was_appended_is_there_after_reopening(tmp_path: Path) -> None:
    async with ledger_in(tmp_path) as ledger:
        first = await ledger.append("verdict", b"one")
        second, third = await ledger.append_all([("receipt", b"two"), ("verdict", b"three")])
        head = ledger.head
    async with ledger_in(tmp_path) as ledger:
        assert ledger.head == head == Head(2, third.digest)
        assert [entry async for entry in ledger.entries()] == [first, second, third]
        assert [entry.body async for entry in ledger.entries("verdict", start=1)] == [b"three"]
        assert len(ledger) == 3
        assert len([one async for one in ledger.entries("verdict")]) == 2
        assert await ledger.read(1) == second
        with pytest.raises(IndexError):
            await ledger.read(3)


async def test_segments_follow_each_other(tmp_path: Path) -> None:
    async with ledger_in(tmp_path, segment_bytes=400) as ledger:
        written = [await ledger.append("verdict", bytes(100)) for _ in range(7)]
    assert len(list((tmp_path / "ledger").glob("*.seg"))) > 2
    async with ledger_in(tmp_path, segment_bytes=400) as ledger:
        assert [entry async for entry in ledger.entries()] == written
        await ledger.append("verdict", b"next")
    (tmp_path / "ledger" / "00000001.seg").unlink()
    with pytest.raises(StorageError, match="lacks a segment"):
        async with ledger_in(tmp_path):
            pass


async def test_a_ledger_of_another_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "00000000.seg").write_bytes(on_disk(chain(2, OTHER)))
    with pytest.raises(
        StorageError, match=r"damaged at byte 0 \(it is an entry of another author"
    ):
        async with ledger_in(tmp_path):
            pass


async def test_a_ledger_of_an_older_version_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    old = b"".join(frame(entry.encode()) for entry in chain(2))
    (tmp_path / "ledger" / "00000000.seg").write_bytes(old)
    with pytest.raises(StorageError, match="older version of Shoal"):
        async with ledger_in(tmp_path):
            pass


async def test_two_roles_of_one_node_sign_one_log(tmp_path: Path) -> None:
    world = RealWorld(AUTHOR, tmp_path)
    own, ledgers = Ledger(world), list[Ledger]()

    async def role(kind: str) -> None:
        ledger = await own.opened()
        ledgers.append(ledger)
        await ledger.append(kind, b"a" if kind == "verdict" else b"b")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(role, "verdict")
        nursery.start_soon(role, "receipt")
    await ledgers[0].append("verdict", b"c")
    assert ledgers[0].head == ledgers[1].head
    again = await Ledger(world).opened()
    assert sorted([entry.body async for entry in again.entries()]) == [b"a", b"b", b"c"]
