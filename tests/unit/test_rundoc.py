"""How a node comes by its run: pinned, never rolled back, from whoever has it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage, ConfigError, PeerUnreachable
from p2p.host import Host, request
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.multiaddr import Multiaddr
from p2p.node.admission import Capability
from p2p.node.rundoc import (
    EXPIRY_TOLERANCE,
    HINT_PAUSE,
    MAX_HINTS,
    PATH,
    PROTOCOL_ID,
    OtherRun,
    RunBook,
    RunConfig,
)
from p2p.swarm import open_host
from p2p.transport.memory import MemoryNetwork
from p2p.wire import pack
from roles.run.core.file import Run, open_run, sign_run
from tests.unit.test_run_file import OWNER, RUN, STRANGER, TERMS, TRAINER

NEWER = sign_run(replace(TERMS, epoch=2), OWNER)
OTHER = sign_run(replace(TERMS, name="other"), OWNER)
STOLEN = sign_run(replace(TERMS, epoch=9), STRANGER)
EXPIRED = sign_run(replace(TERMS, epoch=3, expiry=1), OWNER)


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


async def test_a_rotten_pin_says_so(tmp_path: Path) -> None:
    (tmp_path / PATH).write_bytes(RUN.document[:-1])
    with pytest.raises(ConfigError, match="the pinned run file cannot be used"):
        await book_in(tmp_path).load()


@asynccontextmanager
async def two_hosts(
    folder: Path,
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
            book.serve(host)
        yield (first, books[0]), (second, books[1])


async def test_a_newcomer_gets_the_run_from_its_bootstrap_peer(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as ((host, book), (other, newcomer)):
        await book.offer(RUN.document)
        with trio.fail_after(10):
            run = await newcomer.wait_for_document(other, host.addrs, RunConfig())
        assert run == newcomer.run == RUN
        assert not await newcomer.ask(other, host.peer_id)
        await book.offer(NEWER.document)
        assert await newcomer.ask(other, host.peer_id)
        assert newcomer.run == NEWER
        assert not await book.ask(host, other.peer_id)


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


async def test_garbage_costs_the_asker_its_stream(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as ((host, book), (other, _)):
        await book.offer(RUN.document)
        peer = await other.connect_addr(host.addrs[0])
        for question in (b"garbage", pack([b"", "0"]), pack([bytes(99), 0])):
            with pytest.raises((trio.BrokenResourceError, BadMessage, PeerUnreachable)):
                await request(other, peer, PROTOCOL_ID, question)


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


async def test_an_expired_pin_is_replaced_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / PATH).write_bytes(sign_run(replace(TERMS, expiry=1), OWNER).document)
    book = book_in(tmp_path)
    await book.load(NEWER.document)
    assert book.run == NEWER


class Wall:
    """A wall clock that the test sets."""

    def __init__(self, folder: Path, at: float) -> None:
        self.at = at
        self.world = RealWorld(KeyPair(b"k" * 32), folder)
        self.world.wall = lambda: self.at  # type: ignore[method-assign]


async def test_an_edition_ends_while_the_node_runs(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 10.9: it was in force until the next restart. Told a day and an hour before, and at
    the end.
    """
    run = sign_run(replace(TERMS, expiry=1_000_000), OWNER)
    wall = Wall(tmp_path, 0.0)
    book = RunBook(wall.world, open_run)
    await book.offer(run.document)
    start = autojump_clock.current_time()
    wall.world.wall = lambda: 900_000.0 + autojump_clock.current_time() - start  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.watch)
        await book.wait_change()
        assert wall.world.wall() == pytest.approx(1_000_000 + EXPIRY_TOLERANCE, abs=0.01)
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
    """Issue 10.9: clocks lie; one that was 10 minutes ahead must not stop a node for good."""
    wall = Wall(tmp_path, 0.0)
    book = RunBook(wall.world, open_run)
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
    """Issue 10.9: whoever claims another edition can cause a question, and no more than
    that.
    """
    wall = Wall(tmp_path, 0.0)
    wall.world.now = autojump_clock.current_time  # type: ignore[method-assign]
    wall.world.sleep_until = trio.sleep_until  # type: ignore[method-assign]
    book = RunBook(wall.world, open_run)
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
    with trio.move_on_after(100 * HINT_PAUSE):
        await book.follow_hints(host, 1.0)
    assert [peer for _, peer in asked] == peers[:MAX_HINTS]
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(asked)]
    assert min(gaps) >= HINT_PAUSE
    assert book.hint(peers[-1])
