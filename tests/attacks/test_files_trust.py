"""Files of runs with invites or stamps, flipped, cut and removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.node.admission import Capability
from p2p.node.guests import GUESTS
from p2p.node.share import PAUSED, Rest, ShareConfig
from p2p.node.wiring import PASS_PATH, shown_by, take_invite
from roles.contract.core.file import AdmissionRules, sign_run
from roles.inference.work_stamp import WORK_PATH, keep_stamped
from tests.support.invites import GENERATE, GUEST, book_at, invite, shown
from tests.support.runs import OWNER, TERMS
from tests.support.wall import Wall


def harms(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    for length in range(len(data)):
        yield data[:length]


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
