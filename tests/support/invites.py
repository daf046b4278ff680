"""Invites to a closed run, and those who show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p2p.identity import KeyPair, PeerId
from p2p.node.admission import Capability, Credential, Invite, sign_invite
from p2p.node.rundoc import RunBook
from roles.contract.core.file import AdmissionMode, AdmissionRules, Run, open_run, sign_run
from tests.support.runs import OWNER, TERMS
from tests.support.wall import ENDS, Wall

INVITER, GUEST, OTHER = (KeyPair(bytes([number]) * 32) for number in (7, 8, 9))
LISTED = AdmissionRules(mode=AdmissionMode.ALLOW, inviters=(INVITER.peer_id,))
CLOSED = sign_run(replace(TERMS, admission=LISTED), OWNER)
GOSSIP, GENERATE = Capability.GOSSIP, Capability.GENERATE


def invite(
    run: Run = CLOSED,
    *,
    by: KeyPair = OWNER,
    role: str = "inference",
    uses: int = 1,
    expiry: int = ENDS,
    secret: bytes = b"s" * 32,
) -> Invite:
    return sign_invite(run.id, role, uses, expiry, secret, by)


def shown(one: Invite, peer: PeerId) -> bytes:
    return Credential(invite=one.pass_for(peer).to_bytes()).to_bytes()


async def book_at(folder: Path, run: Run = CLOSED) -> tuple[RunBook, Wall]:
    world = Wall(folder)
    book = RunBook(world, open_run)
    await book.offer(run.document)
    return book, world


def edition(epoch: int, **changes: object) -> Run:
    rules = replace(LISTED, **changes)  # type: ignore[arg-type]
    return sign_run(replace(TERMS, epoch=epoch, admission=rules), OWNER)
