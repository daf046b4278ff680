"""What a member keeps on disk, and what it makes of files that are cut off or changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from p2p.errors import StorageError
from p2p.machine import open_world
from roles.contract.core.diloco import Codec, DilocoTerms
from roles.diloco.core.events import Keep
from roles.diloco.core.messages import Outcome, Plan, Ready, Record, Vote
from roles.diloco.core.outer import Arithmetic, digests_of
from roles.diloco.core.pieces import digest_of, root_of
from roles.diloco.core.round import genesis
from roles.diloco.exchange import Blob
from roles.diloco.store import MemberStore
from roles.engines.config import EngineConfig
from sim.workloads.inner import FakeInner
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN, digest

SIZE = 5000
TERMS = DilocoTerms(codec=Codec.INT8)
ARITHMETIC = Arithmetic(TERMS, SIZE)
GRID = ARITHMETIC.grid
ME = peer_named(0)
FIRST = genesis(RUN, [ME])


@asynccontextmanager
async def open_store(folder: Path, run: bytes = RUN) -> AsyncIterator[MemberStore]:
    async with open_world(folder) as world:
        engine = FakeInner(world, EngineConfig(kind="fake"), TERMS, SIZE)
        yield MemberStore(world, run, ARITHMETIC, engine)


def state_of(step: int) -> bytes:
    rng = np.random.default_rng(step)
    return ARITHMETIC.begun(rng.standard_normal(SIZE).astype(np.float32)).tobytes()


def chain(length: int) -> list[Record]:
    records = [FIRST]
    for step in range(1, length + 1):
        plan = Plan(step, records[-1].digest, ((ME, digest(b"r")),), (ME,))
        root = root_of(digests_of(ARITHMETIC.state_grid, state_of(step)))
        outcome = Outcome(plan, digest(b"s"), root)
        vote = Vote(step, 0, outcome, author=ME).signed(RUN, FakeSigner(ME))
        records.append(Record(0, outcome, ((ME, vote.signature),)))
    return records


async def test_records_are_read_as_they_were_added_whatever_a_write_has_left(
    tmp_path: Path,
) -> None:
    """They were appended to a part of one: all from there on were lost at the next start."""
    records, path = chain(3), tmp_path / "diloco/records"
    async with open_store(tmp_path) as store:
        assert await store.records(FIRST, fake_verify, None) == [FIRST]
        await store.add(records[1:2])
        with path.open("ab") as file:
            file.write(b"\0\0\0\1\2\3")  # what a full disk took of the next
        await store.add(records[2:3])
        await store.add(records[3:])
    async with open_store(tmp_path) as store:
        assert await store.records(FIRST, fake_verify, None) == records
        path.write_bytes(path.read_bytes()[:-7])
        assert await store.records(FIRST, fake_verify, None) == records[:3]
        await store.add(records[3:])  # and what follows is read again
        assert await store.records(FIRST, fake_verify, None) == records


async def test_records_of_a_run_that_began_with_others_are_put_aside(tmp_path: Path) -> None:
    """The history of months was gone at the next start."""
    records = chain(2)
    async with open_store(tmp_path) as store:
        await store.add(records[1:])
        whole = (tmp_path / "diloco/records").read_bytes()
        other = genesis(RUN, [ME, peer_named(1)])
        assert await store.records(other, fake_verify, None) == [other]
        assert (tmp_path / "diloco/records-before").read_bytes() == whole
        assert await store.records(other, fake_verify, None) == [other]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "diloco").iterdir())


async def kept(folder: Path, store: MemberStore, step: int, view: int = 0) -> Blob:
    (folder / store.mean_file(step, view).path).write_bytes(bytes(GRID.total_bytes))
    file = store.state_file(step, view)
    (folder / file.path).write_bytes(state_of(step))
    return Blob(tuple(digests_of(ARITHMETIC.state_grid, state_of(step))), file)


async def test_of_two_states_the_older_is_taken_when_the_newer_is_damaged(
    tmp_path: Path,
) -> None:
    records = chain(4)
    (tmp_path / "diloco").mkdir()
    async with open_store(tmp_path) as store:
        assert await store.state(records) is None
        for step in range(1, 5):
            state = await kept(tmp_path, store, step)
            await store.tidy(step, state, 3)
        assert files(tmp_path) == [
            "mean-2-0", "mean-3-0", "mean-4-0", "state-3-0", "state-4-0",
        ]  # fmt: skip
        assert await store.state(records) == (4, state)
        newest = tmp_path / "diloco/state-4-0"
        data = bytearray(newest.read_bytes())
        data[100] ^= 1
        newest.write_bytes(data)
        found = await store.state(records)
        assert found is not None
        assert found[0] == 3
        (tmp_path / "diloco/state-3-0").write_bytes(bytes(data[:-4]))
        assert await store.state(records) is None


async def test_views_that_fail_leave_no_files_behind(tmp_path: Path) -> None:
    """What was voted for stays, since it may have been decided."""
    (tmp_path / "diloco").mkdir()
    async with open_store(tmp_path) as store:
        voted = await kept(tmp_path, store, 7, 1)
        await kept(tmp_path, store, 6)
        for view in range(2, 6):
            await store.forget_views(7, view, voted)
            await kept(tmp_path, store, 7, view)
        assert files(tmp_path) == [
            "mean-6-0", "mean-7-1", "mean-7-4", "mean-7-5", "state-6-0", "state-7-1",
            "state-7-5",
        ]  # fmt: skip


async def test_a_piece_that_the_disk_has_spoilt_is_not_given(tmp_path: Path) -> None:
    """A peer would take it for a lie."""
    (tmp_path / "diloco").mkdir()
    async with open_store(tmp_path) as store:
        state = await kept(tmp_path, store, 1)
        assert await state.read(1) == state_of(1)[1024:2048]
        data = bytearray(state_of(1))
        data[1024] ^= 1
        (tmp_path / state.file.path).write_bytes(data)
        assert await state.read(0) == state_of(1)[:1024]
        with pytest.raises(StorageError, match="damaged"):
            await state.read(1)
        (tmp_path / state.file.path).unlink()
        with pytest.raises(StorageError, match="gone"):
            await state.read(0)


async def test_what_was_signed_is_there_again_and_not_if_it_is_damaged(tmp_path: Path) -> None:
    outcome = chain(1)[1].outcome
    update = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
    pieces, norms = ARITHMETIC.encoded(update, 1)
    ready = Ready(
        1, 0, FIRST.digest, 9, 0.0, tuple(norms), tuple(map(digest_of, pieces)), author=ME
    ).signed(RUN, FakeSigner(ME))
    vote = Vote(1, 2, outcome, author=ME).signed(RUN, FakeSigner(ME))
    said = Keep(1, 2, -1, ready, vote)
    async with open_store(tmp_path) as store:
        assert await store.kept() is None
        await store.keep(said)
        file = store.update_file(1)
        (tmp_path / file.path).write_bytes(b"".join(pieces))
        assert await store.kept() == said
        assert await store.found("update", 1) == [Blob(ready.digests, file)]
        assert await store.found("update", 2) == []
        (tmp_path / file.path).write_bytes(b"short")
        assert await store.found("update", 1) == []
        path = tmp_path / "diloco/signed"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert await store.kept() is None
    async with open_store(tmp_path, bytes(32)) as other:
        assert await other.kept() is None
