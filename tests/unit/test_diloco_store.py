"""What a member keeps on disk, and what it makes of files that are cut off or changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2p.errors import StorageError
from p2p.machine import open_world
from roles.contract.core.diloco import Codec
from roles.diloco.core.events import Keep
from roles.diloco.core.messages import Outcome, Plan, Ready, Record, Vote
from roles.diloco.core.outer import OuterState
from roles.diloco.core.pieces import PieceGrid, digest_of, norm_of
from roles.diloco.core.round import genesis
from roles.diloco.store import MemberStore
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN, digest

SIZE = 5000
GRID = PieceGrid.of(SIZE, Codec.INT8)
ME = peer_named(0)
FIRST = genesis(RUN, [ME])


def state_of(step: int) -> OuterState:
    rng = np.random.default_rng(step)
    weights, momentum = (rng.standard_normal(SIZE).astype(np.float32) for _ in range(2))
    return OuterState(weights, (momentum,))


def chain(length: int) -> list[Record]:
    records = [FIRST]
    for step in range(1, length + 1):
        plan = Plan(step, records[-1].digest, ((ME, digest(b"r")),), (ME,))
        outcome = Outcome(plan, digest(b"s"), state_of(step).root)
        vote = Vote(step, 0, outcome, author=ME).signed(RUN, FakeSigner(ME))
        records.append(Record(0, outcome, ((ME, vote.signature),)))
    return records


async def test_records_are_read_as_they_were_added_and_a_cut_one_is_dropped(
    tmp_path: Path,
) -> None:
    records = chain(3)
    async with open_world(tmp_path) as world:
        store = MemberStore(world, RUN)
        assert await store.records(FIRST, fake_verify, None) == [FIRST]
        await store.add(records[1:3])
        await store.add(records[3:])
        assert await store.records(FIRST, fake_verify, None) == records
        path = tmp_path / "diloco/records"
        path.write_bytes(path.read_bytes()[:-7])
        assert await store.records(FIRST, fake_verify, None) == records[:3]
        await store.add(records[3:])  # and what follows is read again
        assert await store.records(FIRST, fake_verify, None) == records


async def test_records_of_another_run_are_not_believed(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await MemberStore(world, RUN).add(chain(2)[1:])
        other = MemberStore(world, bytes(32))
        assert await other.records(FIRST, fake_verify, None) == [FIRST]


async def test_of_two_states_the_older_is_taken_when_the_newer_is_damaged(
    tmp_path: Path,
) -> None:
    records = chain(4)
    async with open_world(tmp_path) as world:
        store = MemberStore(world, RUN)
        assert await store.state(records, SIZE, 1) is None
        for step in range(1, 5):
            await store.save_state(step, state_of(step))
        assert sorted(path.name for path in (tmp_path / "diloco").iterdir()) == [
            "state-3", "state-4",
        ]  # fmt: skip
        found = await store.state(records, SIZE, 1)
        assert found is not None
        assert found[0] == 4
        assert found[1].root == state_of(4).root
        newest = tmp_path / "diloco/state-4"
        data = bytearray(newest.read_bytes())
        data[100] ^= 1
        newest.write_bytes(data)
        found = await store.state(records, SIZE, 1)
        assert found is not None
        assert found[0] == 3
        newest.write_bytes(b"\xff" * len(data))  # NaN
        (tmp_path / "diloco/state-3").write_bytes(bytes(data[:-4]))
        assert await store.state(records, SIZE, 1) is None


async def test_a_disk_that_refuses_a_state_leaves_the_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path) as world:
        store = MemberStore(world, RUN)
        await store.save_state(3, state_of(3))

        async def full(path: str, data: bytes) -> None:
            raise StorageError("no space left")

        monkeypatch.setattr(world.disk, "replace", full)
        with pytest.raises(StorageError):
            await store.save_state(4, state_of(4))
        found = await store.state(chain(4), SIZE, 1)
        assert found is not None
        assert found[0] == 3


async def test_what_was_signed_is_there_again_and_not_if_it_is_damaged(tmp_path: Path) -> None:
    outcome = chain(1)[1].outcome
    pieces = GRID.encode_all(state_of(1).weights)
    norms = tuple(
        float(np.float32(norm_of(GRID.decode_untrusted(at, one))))
        for at, one in enumerate(pieces)
    )
    ready = Ready(
        1, 0, FIRST.digest, 9, 0.0, norms, tuple(map(digest_of, pieces)), author=ME
    ).signed(RUN, FakeSigner(ME))
    vote = Vote(1, 2, outcome, author=ME).signed(RUN, FakeSigner(ME))
    kept = Keep(1, 2, -1, ready, vote)
    async with open_world(tmp_path) as world:
        store = MemberStore(world, RUN)
        assert await store.kept() is None
        await store.keep(kept)
        await store.save_update(pieces)
        assert await store.kept() == kept
        assert await store.update(ready, GRID) == pieces
        assert await MemberStore(world, bytes(32)).kept() is None
        for name in ("signed", "contribution"):
            path = tmp_path / "diloco" / name
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        assert await store.kept() is None
        assert await store.update(ready, GRID) is None
        (tmp_path / "diloco/contribution").unlink()
        assert await store.update(ready, GRID) is None


async def test_a_mean_is_there_again(tmp_path: Path) -> None:
    pieces = GRID.encode_all(state_of(1).weights)
    async with open_world(tmp_path) as world:
        store = MemberStore(world, RUN)
        await store.save_mean(4, pieces)
        assert await store.means(3, GRID) == [pieces]
        assert await store.means(4, GRID) == [pieces]
        assert await store.means(5, GRID) == []
        (tmp_path / "diloco/mean-4").write_bytes(b"short")
        assert await store.means(4, GRID) == []
