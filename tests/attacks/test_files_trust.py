"""Files of runs with lots, invites or stamps, flipped, cut and removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.node.admission import Capability
from p2p.node.bearer import PASS_PATH, shown_by, take_invite
from p2p.node.guests import GUESTS
from p2p.node.rest import PAUSED, Rest
from p2p.node.share import ShareConfig
from roles.inference.work_stamp import WORK_PATH, keep_stamped
from roles.protocol.beacon import beacon_of
from roles.protocol.core.beacon import HeardLinks
from roles.protocol.core.lots import SignedWindow, WitnessedWindow
from roles.protocol.core.settlement import Settlement
from roles.run.core.file import AdmissionRules, sign_run
from roles.shared.checked_json import keep
from roles.shared.durable import Durable
from roles.trainer.beacon import PATH as BEACON, BeaconTeller
from roles.trainer.lots import STANDING, WINDOWS, LotDesk
from tests.trainer_bench import JUDGE, VERSION, WORKER, Bench, open_bench
from tests.unit.test_invites import GENERATE, GUEST, Wall, book_at, invite, shown
from tests.unit.test_lots import window
from tests.unit.test_run_file import OWNER, TERMS


def harms(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    for length in range(len(data)):
        yield data[:length]


@asynccontextmanager
async def desk_on(bench: Bench) -> Any:
    """A trainer's desk for lots, at work, in its next life."""
    node: Any = bench.node
    node.gossip = type(node.gossip)()  # another life hears anew
    node.shardcast.newest = VERSION
    node.membership = SimpleNamespace(find=lambda _: [])
    node.host = SimpleNamespace(serving=lambda *_: pytest.MonkeyPatch.context())
    scoring: Any = SimpleNamespace()
    desk = LotDesk(node, bench.intake, scoring, Durable(bench.world, "trainer"))
    await desk.recall()
    yield desk


async def test_a_window_that_has_changed_on_the_disk_is_removed_and_the_rest_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its worker was in standing, and whether it is settled, nobody had signed: a bit
    flipped there was believed, or ended the trainer with a traceback."""
    async with open_bench(tmp_path) as bench:
        said = []
        for first in (0, 32):
            one = window(run=bench.run.id, version=VERSION, node=WORKER.peer_id, first=first)
            signed = SignedWindow.sign(one, WORKER)
            said.append(WitnessedWindow.sign(signed, 0.5, JUDGE))
        async with desk_on(bench) as desk:
            desk.standings.note_accepted(WORKER.peer_id, 500, bench.world.wall())
            for witnessed in said:
                await desk.settle(JUDGE.peer_id, Settlement(witnessed, ()).to_bytes())
        path = tmp_path / WINDOWS / said[0].digest.hex()
        data = path.read_bytes()
        for changed in (*list(harms(data))[:: len(data) // 40], b"", data[:-1]):
            path.write_bytes(changed)
            caplog.clear()
            async with desk_on(bench) as desk:
                assert desk.book.find(said[0].digest) is None
                assert desk.book.find(said[1].digest) is not None
            assert "is damaged and is removed" in caplog.text
            assert not path.exists()


async def test_standing_that_has_changed_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then all are newcomers, and checked whole."""
    async with open_bench(tmp_path) as bench:
        async with desk_on(bench) as desk:
            desk.standings.note_accepted(WORKER.peer_id, 50, bench.world.wall())
            await keep(bench.world.disk, STANDING, desk.standings.to_list())
        path = tmp_path / STANDING
        data = path.read_bytes()
        async with desk_on(bench) as desk:
            assert desk.standings.to_list()
        for changed in list(harms(data))[:: len(data) // 20]:
            path.write_bytes(changed)
            caplog.clear()
            async with desk_on(bench) as desk:
                assert desk.standings.to_list() == []
            assert "is damaged and is removed" in caplog.text


@pytest.mark.parametrize("harm", ["flipped", "cut", "removed"])
async def test_a_beacon_that_has_changed_is_followed_by_a_later_chain(
    tmp_path: Path, harm: str, autojump_clock: trio.abc.Clock
) -> None:
    """What it pledged is pledged no second time, not even by a life that begins in the same
    second; lots of the chain before do not fall."""
    path = tmp_path / BEACON
    async with open_bench(tmp_path) as bench:
        bench.world.wall = lambda: 1e9 + bench.world.now()  # type: ignore[method-assign]
        heard = await told(bench)
        data = path.read_bytes()
        (chain, number), again = heard.newest, (await told(bench)).newest
        assert again[0] == chain  # it goes on
        assert again[1] > number
        path.unlink() if harm == "removed" else path.write_bytes(
            data[:-9] if harm == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        )
        after = await told(bench)
        assert after.newest[0] > chain


async def told(bench: Bench) -> HeardLinks:
    """What is heard of a life of the trainer's beacon, up to its first link."""
    bench.node.gossip = type(bench.node.gossip)()
    disk = bench.world.disk
    before = await disk.read(BEACON) if await disk.size(BEACON) else b""
    async with trio.open_nursery() as nursery:
        teller = BeaconTeller(bench.node, Durable(bench.world, "trainer"))
        links = beacon_of(bench.node).links
        nursery.start_soon(teller.tell_forever)
        while not links.newest[1] or (await disk.read(BEACON)) == before:
            await bench.world.sleep(0.1)
        nursery.cancel_scope.cancel()
    return links


async def test_a_stamp_that_has_changed_is_made_again(tmp_path: Path) -> None:
    """It is shown only if it is worth what the run asks."""
    rules = AdmissionRules(stamp_bits=8)
    run = sign_run(replace(TERMS, admission=rules), OWNER)
    book, world = await book_at(tmp_path, run)
    peer, nonces = world.signer.peer_id, []
    for data in (None, bytes(8), b"", b"\xff" * 3):
        if data is not None:
            (tmp_path / WORK_PATH).write_bytes(data)
        fresh, _ = await book_at(tmp_path, run)
        me = SimpleNamespace(update=lambda **_: None)
        contact = SimpleNamespace(peer=peer, nonce=b"")
        node: Any = SimpleNamespace(
            book=fresh, world=world, run=run, peer_id=peer,
            membership=SimpleNamespace(me=me), dht=SimpleNamespace(contact=contact),
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_stamped, node)
            while fresh.lacks_work(peer, shown_by(fresh, node.dht)):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        nonces.append((tmp_path / WORK_PATH).read_bytes())
    assert nonces == [nonces[0]] * 4
    assert not book.may(GUEST.peer_id, Capability.PUBLISH)


async def test_a_pass_that_has_changed_admits_nobody_and_ends_no_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The node says so, and joins with its invite as before."""
    book, world = await book_at(tmp_path)
    run, text = book.run, invite().to_text()
    assert run is not None
    await take_invite(world, book, run, text)
    path = tmp_path / PASS_PATH
    data = path.read_bytes()
    for changed in list(harms(data))[:: len(data) // 10]:
        path.write_bytes(changed)
        fresh, world = await book_at(tmp_path)
        caplog.clear()
        await take_invite(world, fresh, run, "")
        assert "does not admit it now" in caplog.text
        assert not fresh.may(world.signer.peer_id, GENERATE)
    path.unlink()
    fresh, world = await book_at(tmp_path)
    await take_invite(world, fresh, run, text)
    assert fresh.may(world.signer.peer_id, GENERATE)


async def test_a_guest_whose_file_has_changed_is_counted_anew(tmp_path: Path) -> None:
    book, world = await book_at(tmp_path)
    book.see(GUEST.peer_id, shown(invite(), GUEST.peer_id))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.guests.keep_forever)
        while not (names := await world.disk.list(GUESTS)):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    path = tmp_path / GUESTS / names[0]
    data = path.read_bytes()
    run = book.run
    assert run is not None
    for changed in list(harms(data))[:: len(data) // 20]:
        path.write_bytes(changed)
        fresh, _ = await book_at(tmp_path)
        await fresh.guests.recall(run)
        assert not fresh.may(GUEST.peer_id, GENERATE)
        assert not path.exists()
        fresh.see(GUEST.peer_id, shown(invite(), GUEST.peer_id))
        assert fresh.may(GUEST.peer_id, GENERATE)


async def test_a_pause_is_a_file_whatever_is_in_it(tmp_path: Path) -> None:
    world = Wall(tmp_path)
    for data in (b"", b"rubbish", None):
        rest = Rest(world, ShareConfig(), lambda: None)
        await rest.pause()
        (tmp_path / PAUSED).write_bytes(data) if data is not None else (
            tmp_path / PAUSED
        ).unlink()
        again = Rest(world, ShareConfig(), lambda: None)
        await again.load()
        assert bool(again.why_not) is (data is not None)
