"""Each writer on a disk that refuses: what it does without, and how it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.errors import StorageError
from p2p.ledger.ledger import Ledger
from p2p.machine import RealWorld
from p2p.node.rundoc import PATH, RunBook
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.messages import Ask, ChunkHeader, PolicyNews, RosterNews, Taken
from p2p.shardcast.store import DiskTrial, PolicyStore
from roles.contract.core.file import open_run, sign_run
from roles.shared.durable import Durable
from tests.attacks.test_content_shardcast import INDEX, LOCAL, PEERS, TRAINER, Course, manifest
from tests.support.runs import OWNER, RUN, TERMS
from tests.unit.test_ledger import AUTHOR, chain, ledger_in, on_disk

PARENT, OTHER = PEERS[:2]


class Moody:
    """The disk of a world: it refuses to write while it is full."""

    def __init__(self, world: RealWorld) -> None:
        self._now = world.now
        self._disk: Any = world.disk
        self.full = True
        self.attempts: list[float] = []

    def __getattr__(self, name: str) -> Any:
        if self.full and name in {"write", "append", "replace", "rename", "reserve"}:
            return self._refuse
        return getattr(self._disk, name)

    async def _refuse(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()
        self.attempts.append(self._now())
        raise StorageError("No space left on device")


def moody_world(folder: Path) -> tuple[RealWorld, Moody]:
    world = RealWorld(AUTHOR, folder)
    disk = Moody(world)
    world.disk = disk
    return world, disk


async def test_a_newer_run_document_is_used_and_pinned_when_there_is_room(
    tmp_path: Path,
) -> None:
    world, disk = moody_world(tmp_path)
    book = RunBook(world, open_run)
    disk.full = False
    await book.offer(RUN.document)
    disk.full = True
    newer = sign_run(replace(TERMS, epoch=2), OWNER)
    assert await book.offer(newer.document)
    assert book.run == newer
    assert (tmp_path / PATH).read_bytes() == RUN.document
    disk.full = False
    await book.keep()
    assert (tmp_path / PATH).read_bytes() == newer.document


async def test_a_torn_ledger_opens_on_a_full_disk_and_is_cut_before_the_next_entry(
    tmp_path: Path,
) -> None:
    async with ledger_in(tmp_path) as ledger:
        await ledger.append_all([("verdict", b"one"), ("verdict", b"two")])
    segment = tmp_path / "ledger" / "00000000.seg"
    segment.write_bytes(segment.read_bytes() + on_disk(chain(1))[:-5])
    world, disk = moody_world(tmp_path)
    ledger = await Ledger(world).opened()
    assert len(ledger) == 2
    with pytest.raises(StorageError):
        await ledger.append("verdict", b"a")
    disk.full = False
    await ledger.append("verdict", b"b")
    async with ledger_in(tmp_path) as again:
        assert [entry.body async for entry in again.entries()][2:] == [b"b"]


async def test_a_role_waits_for_its_disk_and_says_so_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world, disk = moody_world(tmp_path)
    durable = Durable(world, "validator")

    async def write(name: str) -> None:
        await durable.insist(lambda: world.disk.replace(name, b"verdict"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, "one")
        nursery.start_soon(write, "two")
        await world.sleep(600)
        assert durable.waiting == 2
        assert len(disk.attempts) < 2 * 140  # one each 5 s, after a quick start
        disk.full = False
    assert durable.waiting == 0
    assert (tmp_path / "two").read_bytes() == b"verdict"
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(" until")[0] for line in said] == [
        "the validator stops",
        "the validator no longer waits for the disk",
    ]


async def test_a_full_disk_is_tried_ever_more_seldom(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    world, disk = moody_world(tmp_path)
    care = DiskTrial(world, "policies")
    with trio.move_on_after(3600):
        await care.wait()
    pauses = [b - a for a, b in zip(disk.attempts, disk.attempts[1:], strict=False)]
    assert pauses[0] == pytest.approx(10.0, abs=0.5)
    assert pauses[-1] == pytest.approx(30.0, abs=0.5)
    disk.full = False
    # a thread is slower than this clock
    disk._disk = SimpleNamespace(replace=_take, remove=_take)
    with trio.fail_after(60.0):
        await care.wait()


async def _take(*_: object) -> None:
    await trio.lowlevel.checkpoint()


def news(version: int) -> PolicyNews:
    return PolicyNews(manifest(version=version).encode(), INDEX.data)


def test_a_core_whose_disk_is_full_passes_news_on_fetches_nothing_and_catches_up() -> None:
    core = Course().core
    core.handle(ev.PeerUp(PARENT), 0.0)
    core.handle(ev.Heard(PARENT, news(1)), 0.1)
    held = ChunkHeader(manifest(version=1).digest, 0)
    assert core.offer(PARENT, held) is not None
    core.handle(ev.ChunkCame(PARENT, held, 7), 0.2)
    effects = core.handle(ev.Unwritable(), 0.3)
    assert ev.Abandon(manifest(version=1).digest) in effects
    assert core.downloads == ()
    assert core.offer(PARENT, ChunkHeader(manifest(version=1).digest, 1)) is None
    effects = core.handle(ev.Heard(OTHER, news(2), gossip=True), 0.4)
    assert effects == [ev.PassOn()]
    again = core.handle(ev.Heard(OTHER, news(2), gossip=True), 0.5)
    assert again == []
    effects = core.handle(ev.Writable(), 600.0)
    asked = {
        e.message.policy
        for e in effects
        if isinstance(e, ev.Send) and isinstance(e.message, Ask)
    }
    assert asked == {manifest(version=1).digest, manifest(version=2).digest}
    assert len(core.downloads) == 2


def test_parents_hear_that_a_full_disk_takes_nothing() -> None:
    core = Course().core
    roster = Roster.sign(
        TRAINER, b"run", 1, [RosterEntry(p, 1e6) for p in (PARENT, OTHER, LOCAL.peer_id)]
    )
    core.handle(ev.Heard(PARENT, RosterNews(roster.encode())), 0.0)
    core.handle(ev.Heard(PARENT, news(1)), 0.1)
    effects = core.handle(ev.Unwritable(), 0.3)
    declined = [e for e in effects if isinstance(e, ev.Send) and isinstance(e.message, Taken)]
    assert {e.peer for e in declined} == {PARENT, OTHER}
    assert all(e.message.ranges == ((0, 4),) for e in declined if isinstance(e.message, Taken))


def test_a_version_without_room_is_fetched_when_there_is_some() -> None:
    """It was over for ever, also for who had pulled nothing else."""
    core = Course().core
    core.handle(ev.PeerUp(PARENT), 0.0)
    core.handle(ev.Heard(PARENT, news(1)), 0.1)
    core.handle(ev.Unusable(manifest(version=1).digest, until_room=True), 0.2)
    assert core.downloads == ()
    core.handle(ev.Heard(PARENT, news(1)), 0.3)
    assert core.downloads == (), "nobody brings it meanwhile"
    effects = core.handle(ev.Writable(), 60.0)
    assert [d.manifest for d in core.downloads] == [manifest(version=1)]
    asked = [e.message for e in effects if isinstance(e, ev.Send)]
    assert any(isinstance(message, Ask) for message in asked)


async def test_what_is_being_fetched_counts_against_the_bytes_to_keep(tmp_path: Path) -> None:
    world = RealWorld(AUTHOR, tmp_path)
    store = PolicyStore(
        world, ShardcastConfig(keep_bytes=2 * (len(INDEX.data) + INDEX.size)), b"run"
    )
    for version in (1, 2):
        store.begin(manifest(version=version), INDEX)
        entry = store.entry(manifest(version=version).digest)
        assert entry is not None
        entry.stored = True
    assert await store.prune() == []
    store.begin(manifest(version=3), INDEX)
    assert await store.prune() == [manifest(version=1).digest]
