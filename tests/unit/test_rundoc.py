"""How a node comes by its run: pinned, never rolled back, from whoever has it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage, ConfigError, PeerUnreachable, ProtocolNotSupported
from p2p.host import Host, StreamHandler, request, serve_requests
from p2p.identity import KeyPair, ProtocolId
from p2p.machine import RealWorld
from p2p.multiaddr import Multiaddr
from p2p.node.admission import Capability
from p2p.node.rundoc import (
    EXPIRY_TOLERANCE,
    MAX_HINTS,
    PATH,
    PROTOCOL_ID,
    RIVAL_PATH,
    RIVAL_PROTOCOL,
    OtherRun,
    RunBook,
    RunConfig,
)
from p2p.swarm.swarm import open_host
from p2p.transport.memory import MemoryNetwork
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.contract.core.file import Run, open_run, sign_run
from tests.support.runs import OWNER, RUN, STRANGER, TERMS, TRAINER
from tests.support.wall import Wall

NEWER = sign_run(replace(TERMS, epoch=2), OWNER)
OTHER = sign_run(replace(TERMS, name="other"), OWNER)
STOLEN = sign_run(replace(TERMS, epoch=9), STRANGER)
EXPIRED = sign_run(replace(TERMS, epoch=3, expiry=1), OWNER)
RIVAL = sign_run(replace(TERMS, validators=(STRANGER.peer_id,)), OWNER)
THIRD = sign_run(replace(TERMS, validators=(TRAINER.peer_id,)), OWNER)


def book_in(folder: Path, key: bytes = b"k") -> RunBook:
    return RunBook(RealWorld(KeyPair(key * 32), folder), open_run)


async def test_a_book_pins_the_first_run_and_only_goes_forward(tmp_path: Path) -> None:
    book = book_in(tmp_path)
    assert book.run is None
    assert not book.may(TRAINER.peer_id, Capability.PUBLISH)
    assert await book.offer(RUN.document)
    assert not await book.offer(RUN.document)
    assert await book.offer(NEWER.document)
    assert not await book.offer(RUN.document)
    assert book.run == NEWER
    assert book.may(TRAINER.peer_id, Capability.PUBLISH)
    again = book_in(tmp_path)
    await again.load()
    assert again.run == NEWER
    await again.load(RUN.document)
    assert again.run == NEWER


@pytest.mark.parametrize(
    "run", [OTHER, STOLEN, EXPIRED], ids=["another name", "another owner", "expired"]
)
async def test_a_pinned_book_refuses_the_rest(tmp_path: Path, run: Run) -> None:
    book = book_in(tmp_path)
    await book.offer(RUN.document)
    with pytest.raises(BadMessage):
        await book.offer(run.document)
    with pytest.raises(ConfigError, match="the run file cannot be used"):
        await book.load(run.document)
    assert book.run == RUN


def old_host(host: Host) -> Host:
    """A node of the version before, which knows one question only."""

    def set_handler(protocol: ProtocolId, handler: StreamHandler) -> None:
        if protocol == PROTOCOL_ID:
            host.set_handler(protocol, handler)

    old: Any = SimpleNamespace(set_handler=set_handler)
    return cast(Host, old)


@asynccontextmanager
async def two_hosts(
    folder: Path, *, is_first_old: bool = False
) -> AsyncIterator[tuple[tuple[Host, RunBook], tuple[Host, RunBook]]]:
    network = MemoryNetwork()
    worlds = [RealWorld(KeyPair(key * 32), folder / key.hex()) for key in (b"a", b"b")]
    listen = ["/memory/0"]
    async with (
        open_host(network=network, world=worlds[0], listen=listen) as first,
        open_host(network=network, world=worlds[1], listen=listen) as second,
    ):
        books = [RunBook(world, open_run) for world in worlds]
        for host, book in zip((first, second), books, strict=True):
            book.serve(old_host(host) if host is first and is_first_old else host)
        yield (first, books[0]), (second, books[1])


async def test_who_is_asked_by_a_node_with_a_newer_edition_asks_in_return(
    tmp_path: Path,
) -> None:
    """Each asked one random member a minute: two of eight lacked it 3.5 minutes later."""
    later = sign_run(replace(TERMS, epoch=2), OWNER)
    async with two_hosts(tmp_path) as ((host, book), (other, asker)):
        await book.offer(RUN.document)
        await asker.offer(later.document)
        await other.connect_addr(host.addrs[0])
        assert not await asker.ask(other, host.peer_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(book.follow_hints, host, 5.0)
            with trio.fail_after(10):
                assert await book.wait_edition(1) == later
            nursery.cancel_scope.cancel()


async def test_a_newcomer_goes_on_asking(tmp_path: Path) -> None:
    config = RunConfig(ask_interval=0.01, ask_timeout=5)
    async with two_hosts(tmp_path) as ((host, book), (other, newcomer)):
        nobody = Multiaddr.parse("/memory/4711").with_peer(STRANGER.peer_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(newcomer.wait_for_document, other, [nobody, *host.addrs], config)
            with trio.fail_after(10):
                while other.peer_id not in host.connected:  # it has asked in vain at least once
                    await trio.testing.wait_all_tasks_blocked()
                await book.offer(RUN.document)
        assert newcomer.run == RUN


async def test_a_pinned_node_learns_that_a_peer_is_in_another_run(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as ((host, book), (other, pinned)):
        await book.offer(OTHER.document)
        await pinned.offer(RUN.document)
        await other.connect_addr(host.addrs[0])
        with pytest.raises(OtherRun, match="it is of run 'other'"):
            await pinned.ask(other, host.peer_id)
        assert pinned.run == RUN


async def test_an_expired_pin_waits_for_the_next_edition_and_keeps_out_the_rest(
    tmp_path: Path,
) -> None:
    (tmp_path / PATH).write_bytes(sign_run(replace(TERMS, expiry=1), OWNER).document)
    book = book_in(tmp_path)
    await book.load()
    assert book.run is None
    assert book.expired is not None
    with pytest.raises(BadMessage):
        await book.offer(OTHER.document)
    assert not await book.offer(RUN.document)
    assert await book.offer(NEWER.document)
    assert (book.run, book.expired) == (NEWER, None)


async def test_an_edition_ends_while_the_node_runs(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was in force until the next restart. Told a day and an hour before, and at
    the end.
    """
    run = sign_run(replace(TERMS, expiry=1_000_000), OWNER)
    wall = Wall(tmp_path, 0.0)
    book = RunBook(wall, open_run)
    await book.offer(run.document)
    start = autojump_clock.current_time()
    wall.wall = lambda: 900_000.0 + autojump_clock.current_time() - start  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.watch)
        await book.wait_change()
        assert wall.wall() == pytest.approx(1_000_000 + EXPIRY_TOLERANCE, abs=0.01)
        assert not book.in_force
        assert book.run == run
        assert book.may(STRANGER.peer_id, Capability.GOSSIP)
        assert not book.may(TRAINER.peer_id, Capability.PUBLISH)
        said = [record.getMessage() for record in caplog.records]
        assert ["24 h" in said[0], "60 min" in said[1], "has expired" in said[2]] == [True] * 3
        assert len(said) == 3
        newer = sign_run(replace(TERMS, expiry=3_000_000, epoch=2), OWNER)
        assert await book.offer(newer.document)
        assert book.in_force
        assert book.may(TRAINER.peer_id, Capability.PUBLISH)
        nursery.cancel_scope.cancel()


async def test_a_clock_within_the_tolerance_ends_nothing_and_one_set_right_begins_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Clocks lie; one that was 10 minutes ahead must not stop a node for good."""
    wall = Wall(tmp_path, 0.0)
    book = RunBook(wall, open_run)
    await book.offer(RUN.document)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.watch)
        wall.at = TERMS.expiry + EXPIRY_TOLERANCE - 1
        assert book.in_force
        wall.at += 600
        await book.wait_change()
        assert not book.in_force
        wall.at -= 600
        await book.wait_change()
        assert book.in_force
        nursery.cancel_scope.cancel()


async def test_hints_are_few_and_each_peer_is_asked_once_a_minute(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever claims another edition can cause a question, and no more than
    that.
    """
    wall = Wall(tmp_path, 0.0)
    wall.now = autojump_clock.current_time  # type: ignore[method-assign]
    wall.sleep_until = trio.sleep_until  # type: ignore[method-assign]
    book = RunBook(wall, open_run)
    asked: list[tuple[float, object]] = []

    async def ask(host: Host, peer: object, timeout: float) -> None:
        await trio.lowlevel.checkpoint()
        asked.append((autojump_clock.current_time(), peer))

    book.ask_quietly = ask  # type: ignore[method-assign]
    peers = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, 2 * MAX_HINTS)]
    taken = [book.hint(peer) for peer in peers]
    assert taken == [True] * MAX_HINTS + [False] * (MAX_HINTS - 1)
    assert book.hint(peers[0])
    host: Host = None  # type: ignore[assignment]
    with trio.move_on_after(1000.0):
        await book.follow_hints(host, 1.0)
    assert [peer for _, peer in asked] == peers[:MAX_HINTS]
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(asked)]
    assert min(gaps) >= 10.0
    asked.clear()
    async with trio.open_nursery() as nursery:  # each question may bring a document to verify
        nursery.start_soon(book.follow_hints, host, 1.0)
        for _ in range(1_000):
            book.hint(peers[-1])
            await wall.sleep_until(wall.now() + 1)
        nursery.cancel_scope.cancel()
    assert len(asked) == 1 + 1_000 // 60


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


async def test_the_second_edition_of_an_epoch_is_kept_as_proof_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was ignored in silence, while its holders refused the work of this node."""
    book = book_in(tmp_path)
    await book.offer(RUN.document)
    assert book.rival is None
    for other in (RIVAL, RIVAL, THIRD, RUN):
        assert not await book.offer(other.document)
    assert book.run == RUN
    assert book.rival == RIVAL
    (said,) = warnings_of(caplog)
    assert "signed two run files of epoch 1" in said
    assert "ask the owner for one with a higher epoch" in said
    assert (tmp_path / PATH).read_bytes() == RUN.document
    assert (tmp_path / RIVAL_PATH).read_bytes() == RIVAL.document


async def test_a_proof_that_the_owner_contradicts_himself_survives_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = book_in(tmp_path)
    await book.offer(RUN.document)
    await book.offer(RIVAL.document)
    caplog.clear()
    again = book_in(tmp_path)
    await again.load(RIVAL.document)  # and not the other, because a person has it at hand
    assert again.run == RUN
    assert again.rival == RIVAL
    assert len(warnings_of(caplog)) == 1
    assert await again.offer(NEWER.document)
    assert again.rival is None
    assert not (tmp_path / RIVAL_PATH).exists()
    assert not await again.offer(RIVAL.document)
    assert again.rival is None


@pytest.mark.parametrize("run", [OTHER, STOLEN, NEWER], ids=["name", "owner", "epoch"])
async def test_a_file_that_is_no_rival_is_removed(tmp_path: Path, run: Run) -> None:
    await book_in(tmp_path).offer(RUN.document)
    for content in (run.document, RUN.document, RIVAL.document[:-1], b""):
        (tmp_path / RIVAL_PATH).write_bytes(content)
        book = book_in(tmp_path)
        await book.load()
        assert (book.run, book.rival) == (RUN, None)
        assert not (tmp_path / RIVAL_PATH).exists()


async def test_nobody_without_the_owners_key_makes_two_editions(tmp_path: Path) -> None:
    """The same terms in another encoding, or under another signature, say nothing else."""
    book = book_in(tmp_path)
    await book.offer(RUN.document)
    form, owner, body, signature = fields_untrusted(
        unpack_untrusted(RUN.document), int, bytes, bytes, bytes, what="run file"
    )
    long_form = b"".join(
        b"\xc6" + len(part).to_bytes(4, "big") + part for part in (owner, body, signature)
    )
    reencoded = b"\x94" + pack(form) + long_form
    assert reencoded != RUN.document
    assert not await book.offer(reencoded)
    for forged in (
        pack([form, STRANGER.peer_id.digest, body, signature]),
        pack([form, owner, unpack_body(RIVAL), signature]),
        sign_run(RIVAL.terms, STRANGER).document,
    ):
        with pytest.raises(BadMessage):
            await book.offer(forged)
    assert book.rival is None


def unpack_body(run: Run) -> bytes:
    parts = unpack_untrusted(run.document)
    assert isinstance(parts, list)
    body: bytes = parts[2]
    return body


async def test_of_two_nodes_that_hold_two_editions_both_learn_by_one_question(
    tmp_path: Path,
) -> None:
    async with two_hosts(tmp_path) as ((host, book), (other, asker)):
        await book.offer(RUN.document)
        await asker.offer(RIVAL.document)
        await other.connect_addr(host.addrs[0])
        assert not await asker.ask(other, host.peer_id)
        assert asker.rival == RUN
        async with trio.open_nursery() as nursery:  # it was hinted at the asker
            nursery.start_soon(book.follow_hints, host, 5.0)
            with trio.fail_after(10):
                while book.rival is None:
                    await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert book.rival == RIVAL
        assert (book.run, asker.run) == (RUN, RIVAL)


async def test_what_a_peer_hands_over_as_a_rival_is_judged(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as ((host, book), (other, asker)):
        await book.offer(RUN.document)
        await asker.offer(RUN.document)
        peer = await other.connect_addr(host.addrs[0])
        for question in (b"garbage", pack([RUN.id, 1]), pack([RUN.id, "1", RUN.digest])):
            with pytest.raises((trio.BrokenResourceError, BadMessage, PeerUnreachable)):
                await request(other, peer, RIVAL_PROTOCOL, question)
            peer = await other.connect_addr(host.addrs[0])
    async with two_hosts(tmp_path / "lies") as ((host, book), (other, asker)):
        await book.offer(RUN.document)
        await asker.offer(RUN.document)
        lie = sign_run(RIVAL.terms, STRANGER).document

        async def answer(*_: object) -> bytes:
            return lie

        host.set_handler(RIVAL_PROTOCOL, serve_requests(answer), replaces=True)
        await other.connect_addr(host.addrs[0])
        with pytest.raises(BadMessage):
            await asker.ask(other, host.peer_id)
        assert asker.rival is None


async def test_a_node_that_knows_no_such_question_is_left_in_peace(tmp_path: Path) -> None:
    """One of an older version answers what it knows; nothing is broken between the two."""
    async with two_hosts(tmp_path, is_first_old=True) as ((host, book), (other, asker)):
        await book.offer(RUN.document)
        await asker.offer(RIVAL.document)
        peer = await other.connect_addr(host.addrs[0])
        with pytest.raises(ProtocolNotSupported):
            await request(other, peer, RIVAL_PROTOCOL, b"")
        assert not await asker.ask(other, host.peer_id)
        assert asker.rival is None
