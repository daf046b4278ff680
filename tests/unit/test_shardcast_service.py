"""Real drivers over real hosts in memory: publish, fetch, restart, prune."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
import trio

from p2p.errors import LocalProtocolError
from p2p.shardcast import (
    PolicyVersion,
    publisher,
)
from p2p.shardcast.core import events as ev
from p2p.shardcast.store import StoredPolicy
from p2p.wire import KI
from tests.support.shardcast_town import Town, everybody, publish


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


async def test_five_receivers_get_what_was_published(town: Town) -> None:
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            trainer, *others = await everybody(town, stack, 6)
            for version in range(3):
                weights = await publish(trainer, version)
                for other in others:
                    assert await other.shardcast.wait_policy(PolicyVersion(version)) == version
                    path = other.shardcast.weights(PolicyVersion(version))
                    assert await other.world.disk.read(path) == weights
                    manifest = other.shardcast.manifest(PolicyVersion(version))
                    assert manifest.size == len(weights)
            sent = trainer.shardcast.stats.uploaded_as_origin
            assert sent <= 1.1 * 3 * 420_000
            from_peers = sum(other.shardcast.stats.from_peers for other in others)
            from_origin = sum(other.shardcast.stats.from_origin for other in others)
            assert from_peers / (from_peers + from_origin) >= 0.7


async def test_a_late_joiner_and_a_restarted_node_catch_up(town: Town) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, *_ = await everybody(town, stack, 3)
            weights = await publish(trainer, 5, 3_000_000)
            async with town.member(3) as late:
                await late.shardcast.wait_policy(PolicyVersion(5))
                assert (
                    await late.world.disk.read(late.shardcast.weights(PolicyVersion(5)))
                    == weights
                )
            async with town.member(3) as again:
                assert again.shardcast.newest == 5
                assert again.shardcast.stats.from_peers + again.shardcast.stats.from_origin == 0


async def test_a_restarted_origin_never_equivocates(town: Town) -> None:
    with trio.fail_after(20):
        async with town.member(0) as trainer:
            await publish(trainer, 1)
            first = trainer.shardcast.manifest(PolicyVersion(1))
        async with town.member(0) as trainer:
            assert trainer.shardcast.newest == 1
            again = await trainer.shardcast.publish(PolicyVersion(1), "weights-1")
            assert again.encode() == first.encode()
            await trainer.world.disk.write("other", b"other weights")
            with pytest.raises(LocalProtocolError, match="is out"):
                await trainer.shardcast.publish(PolicyVersion(1), "other")
            async with town.member(1) as other:
                await other.shardcast.wait_policy(PolicyVersion(1))


async def test_two_who_publish_one_version_at_once_do_not_equivocate(town: Town) -> None:
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, other = await everybody(town, stack, 2)
            refused = []

            async def publish_either(seed: int) -> None:
                await trainer.world.disk.write(
                    f"weights-{seed}", Random(seed).randbytes(100_000)
                )
                try:
                    await trainer.shardcast.publish(PolicyVersion(1), f"weights-{seed}")
                except LocalProtocolError:
                    refused.append(seed)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish_either, 1)
                nursery.start_soon(publish_either, 2)
            assert len(refused) == 1
            await other.shardcast.wait_policy(PolicyVersion(1))
            assert not other.shardcast.halted


async def test_the_first_chunk_leaves_before_the_last_is_packed(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signing needs digests of raw bytes only: of a large policy little is packed before."""
    monkeypatch.setattr(publisher, "PACKED_AHEAD", 64 * KI)
    steps: list[str] = []
    with trio.fail_after(20):
        async with AsyncExitStack() as stack:
            trainer, other = await everybody(town, stack, 2)
            pack, handle = trainer.shardcast._store._pack, other.shardcast._receiver._handle

            async def note_packed(entry: StoredPolicy, chunk: int) -> bytes | None:
                steps.append("packed")
                return await pack(entry, chunk)

            def note_came(event: ev.Event) -> object:
                steps.append("came" if isinstance(event, ev.ChunkCame) else "")
                return handle(event)

            monkeypatch.setattr(trainer.shardcast._store, "_pack", note_packed)
            monkeypatch.setattr(other.shardcast._receiver, "_handle", note_came)
            weights = await publish(trainer, 1, 3_000_000)
            assert steps == []
            await other.shardcast.wait_policy(PolicyVersion(1))
            manifest = trainer.shardcast.manifest(PolicyVersion(1))
            assert 0.9 * len(weights) < manifest.anchor.wire < 1.1 * len(weights)
    assert steps.index("came") < steps.index("packed")
    assert steps.count("packed") == manifest.anchor.chunks - 2, "each once"
