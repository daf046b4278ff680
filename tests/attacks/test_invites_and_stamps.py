"""Invites and work stamps at the door: what takes an honest node's place away, and what gets a
place for nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.dht.stamp import make_stamp
from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId
from p2p.membership.core.verifier import HeartbeatVerifier
from p2p.node.admission import Capability, Credential, find_work
from p2p.node.node import _is_stamped
from p2p.node.rundoc import RunBook
from p2p.node.wiring import shown_by
from roles.contract.core.diloco import Joining
from roles.contract.core.file import AdmissionRules, Run, open_run, sign_run
from roles.diloco.session import RunMembers
from tests.support.invites import (
    GENERATE,
    GOSSIP,
    GUEST,
    INVITER,
    OTHER,
    book_at,
    edition,
    invite,
    shown,
)
from tests.support.runs import OWNER, TERMS
from tests.support.wall import ENDS, Wall

BITS, PLACE = 8, 4  # of the run's work stamp, and of the DHT's


def open_run_of(epoch: int = 1, stamp_bits: int = BITS) -> Run:
    rules = AdmissionRules(inviters=(INVITER.peer_id,), stamp_bits=stamp_bits)
    return sign_run(replace(TERMS, epoch=epoch, admission=rules), OWNER)


class Door:
    """A node that hears heartbeats; whose signature is good says ``is_signed``."""

    def __init__(self, book: RunBook) -> None:
        self.book, self.is_signed, self.blamed = book, True, 0
        self.heard: dict[PeerId, bytes] = {}
        world: Any = book._world
        self.verifier = HeartbeatVerifier(
            lambda *_: self.is_signed,
            lambda peer: book.may(peer, Capability.GOSSIP),
            world.wall,
            1800.0,
            self.blame,
            partial(_is_stamped, book, PLACE),
        )

    def blame(self, _: object) -> None:
        self.blamed += 1

    def hears(self, peer: PeerId, said: bytes) -> bool:
        profile = SimpleNamespace(stamp=said)
        heartbeat = SimpleNamespace(peer=peer, expires=ENDS, profile=profile)
        signed: Any = SimpleNamespace(peer=peer, heartbeat=heartbeat, wire=bytes(100))
        is_heard = self.verifier.is_genuine(signed, peer)
        if is_heard:
            self.heard[peer] = said
        return is_heard

    def lacks_work(self, peer: PeerId, *, at_once: bool = True) -> bool:
        return self.book.lacks_work(peer, self.heard.get(peer, b""), at_once=at_once)


async def door_at(folder: Path, run: Run) -> Door:
    book = RunBook(Wall(folder), open_run)
    await book.offer(run.document)
    return Door(book)


def worked(run: Run, peer: PeerId, invited: bytes = b"") -> bytes:
    work = find_work(run.id, peer, BITS)
    return Credential(make_stamp(peer, PLACE), invited, work).to_bytes()


async def test_a_stamp_that_came_before_its_edition_counts(tmp_path: Path) -> None:
    """Workers hear of an edition before some validator does: those that had made the stamp by
    then were refused by it until one of the two was started again."""
    door, newer = await door_at(tmp_path, open_run_of(stamp_bits=0)), open_run_of(2)
    peer = GUEST.peer_id
    assert door.hears(peer, worked(newer, peer))
    await door.book.offer(newer.document)
    assert door.hears(peer, worked(newer, peer))
    assert not door.lacks_work(peer)
    await door.book.offer(open_run_of(3, stamp_bits=30).document)
    assert door.lacks_work(peer)  # the bits of the newest edition, all of them


async def test_an_edition_that_asks_for_more_gives_time_to_make_it(tmp_path: Path) -> None:
    """Workers rested from that instant: drawn places of windows that they had committed to were
    shown to nobody, which ends standing."""
    run = open_run_of()
    door, peer = await door_at(tmp_path, run), GUEST.peer_id
    world: Any = door.book._world
    now = 100.0
    world.now = lambda: now
    assert door.hears(peer, worked(run, peer))
    assert not door.hears(OTHER.peer_id, b"")
    await door.book.offer(open_run_of(2, stamp_bits=30).document)
    assert door.lacks_work(peer)  # it is to make another one at once
    assert not door.lacks_work(peer, at_once=False)
    assert door.lacks_work(OTHER.peer_id, at_once=False)
    now += 3600.0
    assert door.lacks_work(peer, at_once=False)
    await door.book.offer(open_run_of(3, stamp_bits=29).document)  # one that asks for less
    assert door.lacks_work(peer, at_once=False)


async def test_stamps_of_names_that_nobody_has_push_out_no_workers(tmp_path: Path) -> None:
    """Unsigned heartbeats of made-up names, over one connection and without a point: after
    8,192 of them all workers of the run were shut out."""
    run = open_run_of()
    door, peer = await door_at(tmp_path, run), GUEST.peer_id
    assert door.hears(peer, worked(run, peer))
    door.is_signed = False
    for number in range(64):
        name = KeyPair(bytes([number + 50]) * 32).peer_id
        work = find_work(run.id, name, BITS)
        assert not door.hears(name, Credential(work=work).to_bytes())
        assert door.lacks_work(name)
    assert not door.lacks_work(peer)


@pytest.mark.parametrize("expiry", [ENDS - 5000, ENDS])
async def test_in_an_open_run_a_void_invite_takes_no_stamp_away(
    tmp_path: Path, expiry: int
) -> None:
    """A node whose invite had expired, or was used up by others, was heard by nobody any more,
    whatever work it showed."""
    run, peer = open_run_of(), GUEST.peer_id
    door = await door_at(tmp_path, run)
    one = invite(expiry=expiry, uses=1)
    if expiry == ENDS:
        assert door.hears(OTHER.peer_id, shown(one, OTHER.peer_id))
    assert door.hears(peer, worked(run, peer, one.pass_for(peer).to_bytes()))
    assert not door.lacks_work(peer)


async def test_an_invited_node_shows_its_place_in_the_dht_as_well(tmp_path: Path) -> None:
    door = await door_at(tmp_path / "other", open_run_of())
    one, book = invite(uses=1), (await door_at(tmp_path, open_run_of())).book
    own = book._world.signer.peer_id
    assert door.hears(OTHER.peer_id, shown(one, OTHER.peer_id))
    book.own_pass = one.pass_for(own).to_bytes()
    book.see(own, Credential(invite=book.own_pass).to_bytes())
    contact = SimpleNamespace(peer=own, nonce=make_stamp(own, PLACE))
    dht: Any = SimpleNamespace(contact=contact)
    assert door.hears(own, shown_by(book, dht))


@pytest.mark.parametrize(("role", "lacks"), [("relay", True), ("inference", False)])
async def test_an_invite_for_another_role_frees_of_no_stamp(
    tmp_path: Path, role: str, lacks: bool
) -> None:
    """A relay's invite for a thousand names was a thousand workers without a stamp."""
    door = await door_at(tmp_path, open_run_of(stamp_bits=30))
    peer = GUEST.peer_id
    assert door.hears(peer, shown(invite(role=role, uses=1000), peer))
    assert door.lacks_work(peer) is lacks


@pytest.mark.parametrize("role", ["relay", "inference", "trainer"])
async def test_only_an_invite_to_train_makes_a_member_of_a_run_without_trainers(
    tmp_path: Path, role: str
) -> None:
    """A relay's guest had its updates summed."""
    book, _ = await book_at(tmp_path)
    book.see(GUEST.peer_id, shown(invite(role=role), GUEST.peer_id))
    node: Any = SimpleNamespace(may=book.may, book=book)
    members = RunMembers(node, Joining.ADMITTED)
    assert members.may_train(GUEST.peer_id) is (role == "trainer")
    assert ("not to train" in members.why_not(GUEST.peer_id)) is (role != "trainer")
    assert not members.may_train(OTHER.peer_id)


async def test_an_old_pass_in_a_forged_heartbeat_takes_no_role_and_no_use(
    tmp_path: Path,
) -> None:
    """Passes are no secret, and what a heartbeat shows is looked at before its signature: who
    showed a guest's two passes by turns took its role, and all uses of both invites."""
    book, world = await book_at(tmp_path)
    peer, uses = GUEST.peer_id, 3
    relay = invite(role="relay", secret=b"r" * 32, uses=uses, expiry=ENDS + 10**6)
    work = invite(secret=b"w" * 32, uses=uses)
    for one in (relay, work, relay, work, relay):
        book.see(peer, shown(one, peer))
        book.see(peer, shown(one, peer))
    assert book.may(peer, GENERATE)
    for number in range(uses - 1):
        other = KeyPair(bytes([number + 50]) * 32).peer_id
        book.see(other, shown(work, other))
        assert book.may(other, GENERATE)
    with pytest.raises(BadMessage, match="all 3 uses"):
        book.see(OTHER.peer_id, shown(work, OTHER.peer_id))
    longer = invite(secret=b"l" * 32, expiry=ENDS + 1)  # one that is renewed goes on
    book.see(peer, shown(longer, peer))
    await book.offer(edition(2, revoked=(longer.grant.id,)).document)
    assert not book.may(peer, GOSSIP)
    book.see(peer, shown(relay, peer))  # what still admits is as good as ever
    assert book.may(peer, GOSSIP)
    assert not book.may(peer, GENERATE)
    world.at = ENDS + 10**7
    assert not book.may(peer, GOSSIP)


async def test_a_node_notices_the_end_of_its_own_invite(tmp_path: Path) -> None:
    """It made no work stamp, and asked on and on, until the next edition."""
    run = open_run_of(stamp_bits=30)
    book = (await door_at(tmp_path, run)).book
    world: Any = book._world
    own, told = world.signer.peer_id, [0]

    async def count() -> None:
        while True:
            await book.wait_change()
            told[0] += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await trio.testing.wait_all_tasks_blocked()
        book.see(own, shown(invite(), own))
        await trio.testing.wait_all_tasks_blocked()
        for at, lacks, times in (
            (ENDS - 1000, False, 2),
            (ENDS, False, 2),
            (ENDS + 301, True, 3),
        ):
            world.at = at
            book._look_at_the_clock()
            await trio.testing.wait_all_tasks_blocked()
            assert book.lacks_work(own, b"") is lacks
            assert told[0] == times
        nursery.cancel_scope.cancel()
