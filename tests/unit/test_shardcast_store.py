"""The store: what survives a crash, what is believed afterwards, what is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
import trio

from p2p.errors import StorageError
from p2p.identity import KeyPair
from p2p.machine import RealWorld, open_world
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.index import Index, digest_of
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.shardcast.store import PolicyStore, StoredPolicy
from p2p.wire import KI
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld
from tests.shardcast_policies import pack_policy

KEY = KeyPair(digest_of(b"trainer"))
RUN = b"run"


def policy(version: int, size: int = 300_000) -> tuple[Manifest, Index, list[bytes], bytes]:
    raw = Random(version).randbytes(size)
    index, wires = pack_policy(raw, 32 * KI)
    manifest = Manifest(
        KEY.peer_id,
        RUN,
        PolicyVersion(version),
        NO_POLICY,
        b"",
        index.digest,
        size,
        (Encoding.anchor(index, sum(map(len, wires))),),
    ).sign(KEY)
    return manifest, index, wires, raw


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RealWorld]:
    async with open_world(tmp_path, KEY) as world:
        yield world


def open_store(world: RealWorld, **config: int) -> PolicyStore:
    return PolicyStore(world, ShardcastConfig(**config), RUN)


async def keep(store: PolicyStore, version: int, spans: Iterable[int] | None = None) -> None:
    """Bring spans of a policy, all of them unless said otherwise."""
    manifest, index, wires, raw = policy(version)
    store.begin(manifest, index)
    for span in range(len(index)) if spans is None else spans:
        piece = raw[index.offsets[span] : index.offsets[span + 1]]
        store.keep_nowait(manifest.digest, span, wires[span], piece)
        await store.flush(manifest.digest)


async def fetch(store: PolicyStore, version: int) -> StoredPolicy:
    await keep(store, version)
    assert await store.finish(policy(version)[0].digest)
    entry = store.stored(PolicyVersion(version))
    assert entry is not None
    return entry


async def used(world: RealWorld) -> int:
    """Bytes of all files of the store."""
    return sum(entry.size for entry in await world.disk.walk("policies", 100))


async def test_a_whole_policy_survives_and_is_served(world: RealWorld) -> None:
    await fetch(open_store(world), 1)
    manifest, index, wires, raw = policy(1)
    store = open_store(world)
    (entry,) = await store.load()
    assert entry.stored
    assert (entry.manifest, entry.index) == (manifest, index)
    assert [await store.chunk(manifest.digest, chunk) for chunk in range(len(wires))] == wires
    assert await world.disk.read(entry.weights) == raw


async def test_a_policy_is_on_the_disk_once(world: RealWorld) -> None:
    await fetch(open_store(world), 1)
    assert await used(world) <= 1.05 * 300_000


async def test_every_span_is_in_its_place_before_the_next_is_read(world: RealWorld) -> None:
    """A kill -9 loses what is in memory: nothing that was flushed."""
    manifest, _, wires, raw = policy(1)
    await keep(open_store(world), 1, (0, 1, 4))
    again = open_store(world)
    (entry,) = await again.load()
    assert (entry.verified, entry.stored) == (ChunkSet.of([0, 1, 4]), False)
    assert entry.weights.endswith(".part")
    assert await again.chunk(manifest.digest, 4) == wires[4]
    assert await again.chunk(manifest.digest, 2) is None
    await keep(again, 1, (2, 3, *range(5, len(wires))))
    assert await again.finish(manifest.digest)
    assert await world.disk.read(entry.weights) == raw
    assert entry.weights.endswith(".safetensors")


async def test_nothing_unverified_has_a_final_name(world: RealWorld) -> None:
    store = open_store(world)
    await keep(store, 1, range(9))
    assert not await store.finish(policy(1)[0].digest)
    assert not [name for name in await world.disk.list(store.folder) if "safetensors" in name]


async def test_what_decayed_is_fetched_again_and_nothing_else(world: RealWorld) -> None:
    entry = await fetch(open_store(world), 1)
    await world.disk.write(entry.weights, b"decay", entry.index.offsets[3])
    store = open_store(world)
    (again,) = await store.load()
    assert again.verified == ChunkSet.below(len(entry.index)).excluding(3)
    assert not again.stored
    assert await world.disk.size(again.final) is None
    await keep(store, 1, (3,))
    assert await store.finish(again.name)
    assert await world.disk.read(again.weights) == policy(1)[3]


async def test_what_decays_meanwhile_is_not_served_and_not_loaded(world: RealWorld) -> None:
    store = open_store(world, cache_bytes=0)
    entry = await fetch(store, 1)
    await world.disk.write(entry.weights, b"decay", entry.index.offsets[3])
    assert await store.chunk(entry.name, 3) is None
    assert await store.chunk(entry.name, 2) == policy(1)[2][2]
    with pytest.raises(StorageError, match="is damaged"):
        await store.check_weights(entry)


async def test_a_chunk_is_served_while_its_policy_gets_its_final_name(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename is seen before it is durable. Whoever asked in between found no file, and the
    chunk was taken for damaged for the rest of the node's life.
    """
    store, (manifest, _, wires, _) = open_store(world, cache_bytes=0), policy(1)
    renamed, asked, rename = trio.Event(), trio.Event(), world.disk.rename

    async def rename_slowly(old: str, new: str) -> None:
        await rename(old, new)
        renamed.set()
        await asked.wait()

    await keep(store, 1)
    monkeypatch.setattr(world.disk, "rename", rename_slowly)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.finish, manifest.digest)
            await renamed.wait()
            assert await store.chunk(manifest.digest, 3) == wires[3]
            asked.set()
    entry = store.stored(PolicyVersion(1))
    assert entry is not None
    assert entry.is_whole


async def test_a_torn_head_is_removed(world: RealWorld) -> None:
    entry = await fetch(open_store(world), 1)
    await world.disk.write(entry.head, bytes(50), 0)
    assert await open_store(world).load() == []
    assert await used(world) == 0


def test_a_disk_that_is_too_small_says_so_before_anything_is_fetched() -> None:
    async def main(simulation: Simulation) -> None:
        small = SimWorld(simulation, "node")
        small.sim_disk.limit(200_000)
        manifest, index, wires, raw = policy(1)
        store = PolicyStore(small, ShardcastConfig(), RUN)
        store.begin(manifest, index)
        store.keep_nowait(manifest.digest, 0, wires[0], raw[: 32 * KI])
        with pytest.raises(StorageError, match="no room for version 1, of 300000 bytes"):
            await store.flush(manifest.digest)
        await store.forget(manifest.digest)
        assert small.sim_disk.used == 0

    run_simulation(main, seed=1)


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
    assert len(await tight.prune()) == 1
    assert tight.stored(PolicyVersion(3)) is not None


async def publish(store: PolicyStore, world: RealWorld, version: int = 1) -> Manifest:
    manifest, index, _, raw = policy(version)
    await world.disk.write("weights", raw)
    await store.commit_own(manifest, index, {}, source="weights")
    return manifest


async def test_what_this_node_published_is_served_from_where_it_is(world: RealWorld) -> None:
    manifest = await publish(open_store(world), world)
    store = open_store(world)
    (entry,) = await store.load()
    assert entry.stored
    assert entry.weights == "weights"
    assert await used(world) < 2000
    assert await store.chunk(manifest.digest, 3) == policy(1)[2][3]
    await store.forget(manifest.digest)
    assert await world.disk.size("weights") == 300_000, "it is the trainer's"


@pytest.mark.parametrize("is_gone", [True, False])
async def test_what_was_published_and_changed_is_fetched_like_any_other(
    world: RealWorld, is_gone: bool
) -> None:
    manifest = await publish(open_store(world), world)
    if is_gone:
        await world.disk.remove("weights")
    else:
        await world.disk.write("weights", b"other", 100_000)
    store = open_store(world)
    (entry,) = await store.load()
    assert not entry.stored
    assert not entry.verified
    assert store.newest_own == manifest, "it is out, and must not be contradicted"
    await fetch(store, 1)
    (again,) = await open_store(world).load()
    assert again.stored
    assert again.weights.startswith("policies/")


async def test_the_roster_is_there_in_the_next_life(world: RealWorld) -> None:
    assert await open_store(world).load_roster() is None
    roster = Roster.sign(KEY, RUN, 7, [RosterEntry(KeyPair(digest_of(b"other")).peer_id, 1e6)])
    await open_store(world).keep_roster(roster)
    assert await open_store(world).load_roster() == roster
    assert await open_store(world).load() == [], "it is no policy"
    await world.disk.write(f"policies/{RUN.hex()}/roster", b"torn", 0)
    assert await open_store(world).load_roster() is None


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
