"""The store: what survives a crash, what is believed afterwards, what is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
import trio

from p2p.identity import KeyPair
from p2p.machine import RealWorld, open_world
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.codec import encode_spans
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.manifest import (
    NO_POLICY,
    Encoding,
    Index,
    Manifest,
    ManifestBody,
    PolicyVersion,
    digest_of,
)
from p2p.shardcast.store import PolicyStore, StoredPolicy, chunks_at
from p2p.wire import KI, MIB

KEY = KeyPair(digest_of(b"trainer"))
RUN = b"run"


def policy(version: int, size: int = 300_000) -> tuple[Manifest, Index, list[bytes], bytes]:
    raw = Random(version).randbytes(size)
    encoded = encode_spans(raw, 32 * KI)
    index = Index.of([chunk for chunk, _ in encoded])
    draft = ManifestBody(
        RUN,
        PolicyVersion(version),
        NO_POLICY,
        b"",
        digest_of(raw),
        size,
        0,
        (Encoding.of(index),),
    )
    return draft.sign(KEY), index, [wire for _, wire in encoded], raw


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RealWorld]:
    async with open_world(tmp_path, KEY) as world:
        yield world


def open_store(world: RealWorld, **config: int) -> PolicyStore:
    return PolicyStore(world, ShardcastConfig(**config), RUN)


async def fetch(store: PolicyStore, version: int) -> StoredPolicy:
    manifest, index, wires, _ = policy(version)
    store.begin(manifest, index)
    for chunk, wire in enumerate(wires):
        store.keep_nowait(manifest.digest, chunk, wire)
    assert await store.finish(manifest.digest)
    entry = store.stored(PolicyVersion(version))
    assert entry is not None
    return entry


async def test_a_whole_policy_survives_and_is_served(world: RealWorld) -> None:
    await fetch(open_store(world), 1)
    manifest, index, wires, raw = policy(1)
    store = open_store(world)
    (entry,) = await store.load()
    assert entry.stored
    assert (entry.manifest, entry.index) == (manifest, index)
    assert [await store.chunk(manifest.digest, chunk) for chunk in range(len(wires))] == wires
    assert await world.disk.read(entry.weights) == raw


async def test_what_was_flushed_before_a_crash_is_resumed(world: RealWorld) -> None:
    manifest, index, wires, _ = policy(1)
    store = open_store(world)
    store.begin(manifest, index)
    for chunk in (0, 1, 4):
        store.keep_nowait(manifest.digest, chunk, wires[chunk])
    await store.flush(manifest.digest)
    store.keep_nowait(manifest.digest, 2, wires[2])  # never written
    again = open_store(world)
    (entry,) = await again.load()
    assert (entry.verified, entry.stored) == (ChunkSet.of([0, 1, 4]), False)
    assert await again.chunk(manifest.digest, 4) == wires[4]
    assert await again.chunk(manifest.digest, 2) is None


async def test_a_decayed_chunk_is_not_believed(world: RealWorld) -> None:
    entry = await fetch(open_store(world), 1)
    await world.disk.write(
        entry.path, b"decay", chunks_at(len(entry.index)) + entry.index.offsets[3]
    )
    (again,) = await open_store(world).load()
    assert again.verified == ChunkSet.below(len(entry.index)).excluding(3)
    assert not again.stored


async def test_a_torn_head_is_removed(world: RealWorld) -> None:
    entry = await fetch(open_store(world), 1)
    await world.disk.write(entry.path, bytes(50), 0)
    assert await open_store(world).load() == []
    assert await world.disk.size(entry.path) is None


async def test_torn_weights_are_assembled_again(world: RealWorld) -> None:
    entry = await fetch(open_store(world), 1)
    await world.disk.write(entry.weights, b"torn")
    (again,) = await open_store(world).load()
    assert again.stored
    assert await world.disk.read(again.weights) == policy(1)[3]


async def test_weights_that_are_not_what_the_manifest_says(world: RealWorld) -> None:
    manifest, index, wires, _ = policy(1)
    lying = ManifestBody(
        RUN, PolicyVersion(1), NO_POLICY, b"", bytes(32), 300_000, 0, (Encoding.of(index),)
    ).sign(KEY)
    store = open_store(world)
    store.begin(lying, index)
    for chunk, wire in enumerate(wires):
        store.keep_nowait(lying.digest, chunk, wire)
    assert not await store.finish(lying.digest)
    assert store.stored(PolicyVersion(1)) is None
    assert manifest.digest != lying.digest


async def test_limits_by_versions_bytes_and_pins(world: RealWorld) -> None:
    store = open_store(world, keep_versions=2)
    first = await fetch(store, 0)
    with first.pin():
        for version in range(1, 4):
            await fetch(store, version)
            await store.prune()
    assert [store.stored(PolicyVersion(version)) is not None for version in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    tight = open_store(world, keep_versions=9, keep_bytes=700_000)
    assert [entry.version for entry in await tight.load()] == [0, 2, 3]
    assert len(await tight.prune()) == 2
    assert tight.stored(PolicyVersion(3)) is not None


async def test_memory_for_chunks_is_bounded(world: RealWorld) -> None:
    store = open_store(world, cache_bytes=100_000)
    for version in range(3):
        await fetch(store, version)
    assert store._cached <= 100_000
    manifest, _, wires, _ = policy(0)
    assert await store.chunk(manifest.digest, 0) == wires[0]


async def test_a_draft_is_all_or_nothing(world: RealWorld) -> None:
    manifest, index, wires, _ = policy(1)
    store = open_store(world)
    await store.write_draft(chunks_at(len(index)), b"".join(wires))
    assert await open_store(world).load() == []
    await store.write_draft(chunks_at(len(index)), b"".join(wires))
    await store.commit_draft(manifest, index, "weights")
    (entry,) = await open_store(world).load()
    assert entry.stored
    assert entry.footprint < MIB


async def test_the_roster_is_there_in_the_next_life(world: RealWorld) -> None:
    assert await open_store(world).load_roster() is None
    roster = Roster.sign(KEY, RUN, 7, [RosterEntry(KeyPair(digest_of(b"other")).peer_id, 1e6)])
    await open_store(world).keep_roster(roster)
    assert await open_store(world).load_roster() == roster
    assert await open_store(world).load() == [], "it is no policy"
    await world.disk.write(f"policies/{RUN.hex()}/roster", b"torn", 0)
    assert await open_store(world).load_roster() is None


async def test_a_chunk_that_two_ask_for_at_once_counts_once(world: RealWorld) -> None:
    manifest, _, wires, _ = policy(0)
    await fetch(open_store(world), 0)
    store = open_store(world)
    await store.load()
    store._cache.clear()
    store._cached = 0
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(store.chunk, manifest.digest, 0)
    assert store._cached == len(wires[0])


async def test_a_policy_pinned_while_another_is_removed_stays(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(world, keep_versions=1)
    entries = [await fetch(store, version) for version in range(3)]
    forget, pins = store.forget, ExitStack()

    async def pin_meanwhile(digest: bytes) -> None:
        await forget(digest)
        pins.enter_context(entries[0].pin())

    monkeypatch.setattr(store, "forget", pin_meanwhile)
    assert await store.prune() == [entries[1].manifest.digest]
    assert store.stored(PolicyVersion(0)) is entries[0]
