"""Patches on their whole way: offered by a trainer, brought by the forest, applied, proven."""

from __future__ import annotations

import json
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import numpy as np
import pytest
import trio

from p2p.errors import BadMessage
from p2p.machine import open_world
from p2p.shardcast import PolicyVersion, ShardcastConfig
from p2p.shardcast.codec import PATCH
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.patch import (
    TAIL,
    apply_run_untrusted,
    decode_table_untrusted,
    encode_run,
    encode_table,
    patch_runs_untrusted,
    runs_of,
    table_bytes_untrusted,
)
from p2p.shardcast.store import PolicyStore
from tests.support.shardcast_town import RUN, Member, Town, everybody
from tests.unit.test_shardcast_delta import updated, weights

VALUES = 600_000


def v(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def safetensors(values: np.ndarray) -> bytes:
    """One bf16 matrix, and a few opaque bytes."""
    size = values.nbytes
    header = json.dumps(
        {
            "a.weight": {"dtype": "BF16", "shape": [len(values)], "data_offsets": [0, size]},
            "steps": {"dtype": "I64", "shape": [1], "data_offsets": [size, size + 8]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + values.tobytes() + bytes(8)


class Course:
    """A policy that learns a little each version."""

    def __init__(self) -> None:
        self.values = {0: weights(VALUES, 1)}

    def file(self, version: int) -> bytes:
        for number in range(len(self.values), version + 1):
            self.values[number] = updated(self.values[number - 1], 3e-7, number)
        return safetensors(self.values[version])

    async def publish(self, trainer: Member, version: int) -> None:
        path = f"policy-{version}.safetensors"
        await trainer.world.disk.write(path, self.file(version))
        await trainer.shardcast.publish(v(version), path)

    async def is_right_at(self, member: Member, version: int) -> bool:
        await member.shardcast.wait_policy(v(version))
        found = await member.world.disk.read(member.shardcast.weights(v(version)))
        return found == self.file(version)


@pytest.fixture
def course() -> Course:
    return Course()


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


def came(member: Member) -> int:
    return member.shardcast.stats.from_origin + member.shardcast.stats.from_peers


async def test_an_update_travels_as_a_patch(town: Town, course: Course) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, *others = await everybody(town, stack, 5)
            await course.publish(trainer, 0)
            for other in others:
                assert await course.is_right_at(other, 0)
            anchor = trainer.shardcast.manifest(v(0)).anchor.wire
            before = [came(other) for other in others]
            sent = trainer.shardcast.stats.uploaded_as_origin
            await course.publish(trainer, 1)
            for other in others:
                assert await course.is_right_at(other, 1)
            manifest = trainer.shardcast.manifest(v(1))
            (patch,) = manifest.patches
            assert (patch.name, patch.base) == (PATCH, 0)
            assert patch.wire < anchor / 50
            for other, count in zip(others, before, strict=True):
                assert came(other) - count < 1.1 * patch.wire
            assert trainer.shardcast.stats.uploaded_as_origin - sent < 1.2 * patch.wire


async def test_a_joiner_takes_one_anchor_and_none_of_it_from_the_origin(
    town: Town, course: Course
) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, *others = await everybody(town, stack, 4)
            for version in range(3):
                await course.publish(trainer, version)
                for other in others:
                    assert await course.is_right_at(other, version)
            joiner = await stack.enter_async_context(town.member(4))
            assert await course.is_right_at(joiner, 2)
            anchor = trainer.shardcast.manifest(v(2)).anchor.wire
            assert came(joiner) <= 1.02 * anchor
            assert joiner.shardcast.stats.from_origin == 0


@pytest.mark.parametrize(("room", "kept"), [(0, (1,)), (1, (1, 0))])
async def test_patches_count_against_what_a_disk_keeps(
    town: Town, course: Course, room: int, kept: tuple[int, ...]
) -> None:
    with trio.fail_after(20):
        async with town.member(0) as trainer, town.member(1) as other:
            for version in (0, 1):
                await course.publish(trainer, version)
                assert await course.is_right_at(other, version)
            index = other.shardcast.index(v(0))
            (patch,) = other.shardcast.manifest(v(1)).patches
        policies = 2 * (index.size + len(index.data))
        config = ShardcastConfig(keep_bytes=policies + room * (patch.wire + 100 * patch.chunks))
        async with open_world(town.folder / "1", town.keys[1]) as world:
            store = PolicyStore(world, config, RUN)
            await store.load()
            await store.prune()
            assert store.versions == kept


async def test_a_base_that_rotted_costs_the_spans_that_rotted(
    town: Town, course: Course
) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, sound, rotten = await everybody(town, stack, 3)
            await course.publish(trainer, 0)
            for other in (sound, rotten):
                assert await course.is_right_at(other, 0)
            path = rotten.shardcast.weights(v(0))
            await rotten.world.disk.write(path, b"\xff" * 8, 500_000)
            before = came(rotten)
            await course.publish(trainer, 1)
            assert await course.is_right_at(sound, 1)
            assert await course.is_right_at(rotten, 1)
            manifest = trainer.shardcast.manifest(v(1))
            (patch,) = manifest.patches
            span = manifest.anchor.wire / manifest.anchor.chunks
            assert 0.5 * span < came(rotten) - before - patch.wire < 2.5 * span


async def test_what_learned_nothing_in_common_is_no_patch(town: Town) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, other = await everybody(town, stack, 2)
            for version in range(2):
                await trainer.world.disk.write(f"w{version}", Random(version).randbytes(99_000))
                await trainer.shardcast.publish(v(version), f"w{version}")
            assert trainer.shardcast.manifest(v(1)).patches == ()
            await other.shardcast.wait_policy(v(1))


async def test_a_node_that_died_with_a_patch_in_hand_goes_on(
    town: Town, course: Course
) -> None:
    with trio.fail_after(30):
        async with AsyncExitStack() as stack:
            trainer, _ = await everybody(town, stack, 2)
            await course.publish(trainer, 0)
            async with town.member(2) as member:
                assert await course.is_right_at(member, 0)
            await course.publish(trainer, 1)
            async with town.member(2) as member:
                assert await course.is_right_at(member, 1)
                final = member.shardcast.weights(v(1))
                part = final.removesuffix(".safetensors") + ".part"
            # as if it had died after the patch came, before it was applied
            await member.world.disk.rename(final, part)
            await member.world.disk.write(part, b"\0" * len(course.file(1)))
            async with town.member(2) as member:
                assert await course.is_right_at(member, 1)


# The format


def policy(values: np.ndarray, sizes: list[int], kind: int = 2) -> Index:
    raw, spans, at = values.tobytes(), [], 0
    for size in sizes:
        spans.append(Span(digest_of(raw[at : at + size]), size, kind))
        at += size
    assert at == len(raw)
    return Index.of([PolicyFile("", len(raw))], spans)


def test_a_patch_is_runs_and_a_table() -> None:
    old, new = weights(50_000, 1), updated(weights(50_000, 1), 1e-6, 2)
    sizes = [40_000, 40_000, 20_000]
    base, index = policy(old, sizes), policy(new, sizes)
    (run,) = runs_of(index)
    assert (run.first, run.end, run.size, run.kind) == (0, 3, 100_000, 2)
    delta = encode_run(run, base.spans, old.tobytes(), new.tobytes())
    assert delta is not None
    patch = delta + encode_table(base, index, [run], [len(delta)])
    room = len(patch) - table_bytes_untrusted(patch[-TAIL.size :], len(patch))
    table = decode_table_untrusted(patch[room:])
    assert (table.base, table.index) == (base.digest, index.data)
    (row,) = patch_runs_untrusted(table, index, room)
    raw, mask = apply_run_untrusted(row.run, index.spans, old.tobytes(), patch[:room])
    assert (raw, mask) == (new.tobytes(), 0b111)
    old[25_000] ^= 1
    assert apply_run_untrusted(row.run, index.spans, old.tobytes(), patch[:room])[1] == 0b101
    assert apply_run_untrusted(row.run, index.spans, old.tobytes(), b"\xff")[1] == 0
    assert encode_run(run, base.spans, old.tobytes(), new.tobytes()) is None


@pytest.mark.parametrize(
    ("rows", "room"),
    [
        ([(2, 5)], 5),
        ([(1, 5), (2, 5)], 10),
        ([(3, 5)], 4),
        ([(3, 5), (0, 0)], 5),
        ([(4, 5)], 5),
    ],
)
def test_runs_that_do_not_add_up_are_bad_messages(
    rows: list[tuple[int, int]], room: int
) -> None:
    spans = [Span(digest_of(b""), 10, kind) for kind in (2, 2, 0)]
    index = Index.of([PolicyFile("", 30)], spans)
    packed = b"".join(struct.pack(">II", *row) for row in rows)
    tail = index.digest + struct.pack(">II", len(rows), len(index.data))
    table = decode_table_untrusted(packed + index.data + tail)
    with pytest.raises(BadMessage):
        patch_runs_untrusted(table, index, room)


@pytest.mark.parametrize(
    "tail", [b"", bytes(TAIL.size), bytes(32) + struct.pack(">II", 1, 1 << 31)]
)
def test_tails_that_cannot_be_are_bad_messages(tail: bytes) -> None:
    with pytest.raises(BadMessage):
        table_bytes_untrusted(tail, 1_000)
