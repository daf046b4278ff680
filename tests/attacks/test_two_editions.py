"""Strangers who claim other editions, and clocks that lie, beside two editions of one epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trio
import trio.testing

from p2p.host import Host
from p2p.identity import KeyPair, PeerId
from p2p.node.rundoc import EXPIRY_TOLERANCE, MAX_HINTS, RunBook
from roles.contract.core.file import open_run, sign_run
from tests.support.runs import OWNER, RUN, STRANGER, TERMS, VALIDATOR
from tests.support.wall import Wall

RIVAL = sign_run(replace(TERMS, validators=(STRANGER.peer_id,)), OWNER)


async def test_strangers_that_claim_editions_keep_no_officer_from_being_asked(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """64 names with a digest that does not exist kept a validator's edition away from the
    trainer for eleven minutes, and the trainer threw its deliveries away."""
    wall = Wall(tmp_path, 0.0)
    wall.now = autojump_clock.current_time  # type: ignore[method-assign]
    wall.sleep_until = trio.sleep_until  # type: ignore[method-assign]
    book = RunBook(wall, open_run)
    await book.offer(RUN.document)
    asked: list[PeerId] = []

    async def ask(host: Host, peer: PeerId, timeout: float) -> None:
        await trio.lowlevel.checkpoint()
        asked.append(peer)
        book.hint(mob[len(asked)])  # another takes the place

    book.ask_quietly = ask  # type: ignore[method-assign]
    mob = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, 999)]
    assert all(book.hint(peer) for peer in mob[:MAX_HINTS])
    assert not book.hint(mob[-1])
    assert book.hint(VALIDATOR.peer_id)
    host: Host = None  # type: ignore[assignment]
    with trio.move_on_after(15.0):
        await book.follow_hints(host, 1.0)
    assert VALIDATOR.peer_id in asked
    assert len(book._hints) <= MAX_HINTS


async def test_a_clock_that_is_set_right_settles_no_rivalry(tmp_path: Path) -> None:
    """The node took its own edition up again, and dropped the proof against its owner."""
    wall = Wall(tmp_path, 0.0)
    before = RunBook(wall, open_run)
    await before.offer(RUN.document)
    await before.offer(RIVAL.document)
    assert before.rival == RIVAL
    wall.at = TERMS.expiry + EXPIRY_TOLERANCE + 600
    book = RunBook(wall, open_run)
    await book.load()
    assert (book.run, book.rival) == (None, RIVAL)
    wall.at -= 3600
    assert await book.offer(RUN.document)
    assert book.rival == RIVAL
    again = RunBook(wall, open_run)
    await again.load()
    assert again.rival == RIVAL
    assert await again.offer(sign_run(replace(TERMS, epoch=2), OWNER).document)
    assert again.rival is None
