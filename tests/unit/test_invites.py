"""Invites: each way in which one does not admit is said in a sentence, and a good one admits
one identity a use, offline, across restarts, until it ends or is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.machine import RealWorld, load_or_create_key
from p2p.node import guests
from p2p.node.admission import (
    EXPIRY_TOLERANCE,
    Capability,
    Invite,
    Uninvited,
    decode_invite_untrusted,
)
from p2p.node.cli import _parse
from p2p.node.rundoc import RunConfig
from p2p.node.wiring import PASS_PATH, ask_admission
from p2p.transport.memory import MemoryNetwork
from roles.contract.core.file import open_run, sign_run
from roles.own.__main__ import main
from tests.support.invites import (
    CLOSED,
    GENERATE,
    GOSSIP,
    GUEST,
    INVITER,
    LISTED,
    OTHER,
    book_at,
    edition,
    invite,
    shown,
)
from tests.support.nodes import CONFIG, member, wait_members
from tests.support.runs import OWNER, STRANGER, TERMS, TRAINER, VALIDATOR
from tests.support.wall import ENDS


def forged(one: Invite) -> Invite:
    return Invite(one.run, replace(one.grant, uses=100), one.secret)


def from_stranger(_: Invite) -> Invite:
    return invite(by=STRANGER)


def signed_by_stranger(one: Invite) -> Invite:
    return Invite(
        one.run, replace(invite(by=STRANGER).grant, inviter=OWNER.peer_id), one.secret
    )


def of_another_run(_: Invite) -> Invite:
    return invite(sign_run(replace(TERMS, name="other"), OWNER))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (forged, "forged, altered, or of another run"),
        (signed_by_stranger, "forged, altered, or of another run"),
        (of_another_run, "forged, altered, or of another run"),
        (from_stranger, "may not invite"),
    ],
)
async def test_what_no_inviter_of_the_run_signed_admits_nobody(
    tmp_path: Path, spoil: Callable[[Invite], Invite], why: str
) -> None:
    book, _ = await book_at(tmp_path)
    with pytest.raises(Uninvited, match=why):
        book.see(GUEST.peer_id, shown(spoil(invite()), GUEST.peer_id))
    assert not book.may(GUEST.peer_id, GOSSIP)
    assert "start the node with --invite" in book.why_not(GUEST.peer_id, GOSSIP)


@pytest.mark.parametrize("by", [OWNER, INVITER])
async def test_an_invite_admits_as_many_identities_as_it_has_uses(
    tmp_path: Path, by: KeyPair
) -> None:
    book, _ = await book_at(tmp_path)
    one = invite(by=by, uses=2)
    peers = [KeyPair(bytes([n]) * 32).peer_id for n in (20, 21, 22)]
    for peer in peers[:2]:
        book.see(peer, shown(one, peer))
        book.see(peer, shown(one, peer))  # shown again: the same use
        assert book.may(peer, GENERATE)
    with pytest.raises(Uninvited, match=r"all 2 uses of the invite \w+ are taken"):
        book.see(peers[2], shown(one, peers[2]))
    assert not book.may(peers[2], GOSSIP)


async def test_a_pass_is_of_no_use_to_another_identity(tmp_path: Path) -> None:
    """All members see it in heartbeats; whoever copied it would be in on another's invite."""
    book, _ = await book_at(tmp_path)
    one = shown(invite(uses=9), GUEST.peer_id)
    book.see(GUEST.peer_id, one)
    with pytest.raises(Uninvited, match="made for another identity"):
        book.see(OTHER.peer_id, one)
    assert not book.may(OTHER.peer_id, GOSSIP)


async def test_an_invite_ends_with_its_time_its_inviter_or_its_revocation(
    tmp_path: Path,
) -> None:
    book, world = await book_at(tmp_path)
    one = invite(by=INVITER)
    peer = GUEST.peer_id
    book.see(peer, shown(one, peer))
    assert book.why_not(peer, GENERATE) == ""
    world.at = ENDS + EXPIRY_TOLERANCE + 1
    assert "the invite expired on" in book.why_not(peer, GENERATE)
    world.at = ENDS - 1000
    await book.offer(edition(2, revoked=(one.grant.id,)).document)
    assert f"{one.grant.id} was revoked" in book.why_not(peer, GOSSIP)
    await book.offer(edition(3, inviters=()).document)
    assert "may not invite" in book.why_not(peer, GOSSIP)
    with pytest.raises(Uninvited, match="may not invite"):
        book.see(peer, shown(one, peer))
    await book.offer(edition(4, allowed=(peer,), inviters=()).document)
    assert book.may(peer, GENERATE)  # the list needs no invite


async def test_an_invite_for_one_role_is_none_for_another(tmp_path: Path) -> None:
    book, _ = await book_at(tmp_path)
    book.see(GUEST.peer_id, shown(invite(role="relay"), GUEST.peer_id))
    assert book.may(GUEST.peer_id, GOSSIP)
    assert not book.may(GUEST.peer_id, GENERATE)
    assert "is for the role relay, not to generate" in book.why_not(GUEST.peer_id, GENERATE)
    for capability in (Capability.VALIDATE, Capability.PUBLISH):
        book.see(OTHER.peer_id, shown(invite(secret=b"t" * 32), OTHER.peer_id))
        assert not book.may(OTHER.peer_id, capability)
    with pytest.raises(ValueError, match="the run file names trainers and validators"):
        invite(role="validator")


async def test_who_was_counted_before_a_restart_is_counted_after_it(tmp_path: Path) -> None:
    book, world = await book_at(tmp_path)
    one = invite()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.guests.keep_forever)
        book.see(GUEST.peer_id, shown(one, GUEST.peer_id))
        while not await world.disk.list(guests.GUESTS):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    again, world = await book_at(tmp_path)
    await world.disk.replace(f"{guests.GUESTS}/rot", b"rotten")
    await again.guests.recall(CLOSED)
    assert again.may(GUEST.peer_id, GENERATE)
    with pytest.raises(Uninvited, match="are taken"):
        again.see(OTHER.peer_id, shown(one, OTHER.peer_id))
    assert await world.disk.list(guests.GUESTS) == [GUEST.peer_id.public_key.hex()]


async def test_one_who_invites_the_world_leaves_others_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "MAX_GUESTS", 16)
    book, world = await book_at(tmp_path)
    peers = [KeyPair(bytes([n]) * 32).peer_id for n in range(30, 46)]
    generous, other = invite(by=INVITER, uses=100), invite(uses=100, secret=b"t" * 32)
    refused = []
    for one in (generous, other):
        for peer in peers[:8] if one is generous else peers[8:]:
            try:
                book.see(peer, shown(one, peer))
            except Uninvited as error:
                refused.append(str(error))
    assert len(book.guests) == 8
    assert all("has invited more than a node remembers" in why for why in refused)
    world.at = ENDS + EXPIRY_TOLERANCE + 1  # those whose invite is over give up their places
    last = invite(expiry=ENDS + 10**6, secret=b"u" * 32)
    book.see(OTHER.peer_id, shown(last, OTHER.peer_id))
    assert len(book.guests) == 1


async def test_a_guest_joins_stays_over_a_restart_and_goes_when_it_is_revoked(
    tmp_path: Path,
) -> None:
    network, text = MemoryNetwork(), invite(uses=1).to_text()
    invited = replace(CONFIG, run=RunConfig(invite=text))
    with trio.fail_after(60):
        async with member(
            network, tmp_path / "trainer", TRAINER, document=CLOSED.document
        ) as first:
            addrs = first.host.addrs
            for config in (invited, CONFIG):  # the second life has no invite any more
                async with member(
                    network, tmp_path / "guest", GUEST, bootstrap=addrs, config=config
                ) as guest:
                    await wait_members(guest, 1)
                    await wait_members(first, 1)
                    assert first.may(GUEST.peer_id, GENERATE)
                    assert not first.may(GUEST.peer_id, Capability.VALIDATE)
            await guest_is_told_why(network, tmp_path, first.host.addrs)
            await first.book.offer(edition(2, revoked=(invite().grant.id,)).document)
            assert not first.may(GUEST.peer_id, GOSSIP)


async def guest_is_told_why(
    network: MemoryNetwork, tmp_path: Path, addrs: tuple[object, ...]
) -> None:
    """One that has the same text, or has copied the pass, comes too late and learns why."""
    late = replace(CONFIG, run=RunConfig(invite=invite(uses=1).to_text()))
    async with member(
        network,
        tmp_path / "late",
        OTHER,
        bootstrap=addrs,
        config=late,  # type: ignore[arg-type]
    ) as node:
        (trainer,) = node.host.connected
        said = await ask_admission(node.book, node.dht, node.host, trainer, 10)
        assert "all 1 uses" in said
        node.book.own_pass = await RealWorld(GUEST, tmp_path / "guest").disk.read(PASS_PATH)
        said = await ask_admission(node.book, node.dht, node.host, trainer, 10)
        assert "made for another identity" in said


def test_the_owner_and_those_it_lets_print_invites_and_no_one_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {}
    for name in ("owner", "friend", "nobody"):
        keys[name] = str(tmp_path / name)
        load_or_create_key(tmp_path / name)
    owner = load_or_create_key(tmp_path / "owner")
    friend = load_or_create_key(tmp_path / "friend").peer_id
    run, after = tmp_path / "run.shoal", tmp_path / "next.shoal"
    run.write_bytes(sign_run(replace(TERMS, admission=LISTED), owner).document)
    asked = ["--role", "inference", "--uses", "3", "--expires", "7d"]
    assert main(["invite", str(run), *asked, "--key", keys["owner"]]) == 0
    made = decode_invite_untrusted(capsys.readouterr().out)
    assert (made.grant.role, made.grant.uses) == ("inference", 3)
    assert main(["invite", str(run), "--key", keys["friend"]]) == 2
    assert "--inviter" in capsys.readouterr().err
    amend = ["amend", str(run), "--key", keys["owner"], "--out", str(after)]
    assert main([*amend, "--inviter", str(friend), "--revoke", made.grant.id]) == 0
    rules = open_run(after.read_bytes()).terms.admission
    assert (rules.inviters[-1], rules.revoked) == (friend, (made.grant.id,))
    assert main(["invite", str(after), "--key", keys["friend"]]) == 0
    assert main(["invite", str(after), "--role", "trainer", "--key", keys["owner"]]) == 2
    assert main(["amend", str(run), "--key", keys["nobody"], "--out", str(after)]) == 2
    two = replace(TERMS, name="two", validators=(VALIDATOR.peer_id, STRANGER.peer_id))
    run.write_bytes(sign_run(two, owner).document)
    assert main([*amend, "--drop-validator", str(STRANGER.peer_id)]) == 0
    newer = open_run(after.read_bytes())
    assert (newer.epoch, newer.terms.validators) == (2, (VALIDATOR.peer_id,))


def test_an_invite_comes_as_text_or_in_a_file(tmp_path: Path) -> None:
    text = invite(by=INVITER).to_text()
    path = tmp_path / "invite"
    path.write_text(text + "\n")
    assert _parse(["--invite", text]).invite == _parse(["--invite", str(path)]).invite == text
    assert decode_invite_untrusted(text) == invite(by=INVITER)
    with pytest.raises(BadMessage, match="copy the whole line"):
        decode_invite_untrusted(text[:-20] + "*")
    for wrong in (text[:-9], str(tmp_path / "none")):
        with pytest.raises(SystemExit):
            _parse(["--invite", wrong])
