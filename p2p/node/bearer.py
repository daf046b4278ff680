"""The invite that this node bears: from its command line to its pass, and why others refuse.

The text of an invite is read once: what is kept in the node's folder is the pass made of it,
which is no secret and admits no other identity. A node whose invite is void ends with a
sentence before it joins; one that others do not admit (all uses are taken) learns why from
those it asks (``/shoal/admission/1.0.0``: one frame with what its heartbeats show, one frame
back with a sentence, or an empty one).
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from p2p.dht import Dht
from p2p.errors import BadMessage, ConfigError, StorageError
from p2p.host import Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.meter import StrangerMeter
from p2p.node.admission import (
    MAX_PASS,
    MAX_SHOWN,
    Capability,
    Credential,
    Invite,
    SignedRun,
    check_grant,
    decode_invite_untrusted,
    why_not_by,
)
from p2p.node.rundoc import RunBook
from p2p.node.trouble import PEER_TROUBLE
from p2p.world import World

ADMISSION_PROTOCOL: Final = ProtocolId("/shoal/admission/1.0.0")
PASS_PATH: Final = "pass"
"""File in the node's folder: the pass made of its invite."""
MAX_REASON: Final = 512
"""Bytes of the sentence that says why a peer is not admitted; two names of 52 are in it."""

logger = logging.getLogger(__name__)


async def take_invite(world: World, book: RunBook, run: SignedRun, text: str) -> None:
    """Make the pass of this node of the invite ``text``, or, without one, take the pass of an
    earlier life. Raises `ConfigError` if the invite does not admit to this run."""
    if text:
        await _keep(world, invite_pass(world, run, text))
    if await world.disk.size(PASS_PATH) is None:
        return
    book.own_pass = await world.disk.read(PASS_PATH, 0, MAX_PASS)
    try:
        book.see(world.signer.peer_id, Credential(invite=book.own_pass).to_bytes())
    except BadMessage as error:  # the run may be open, or its next edition name this node
        logger.warning("the invite that this node joined with does not admit it now: %s", error)


def invite_pass(world: World, run: SignedRun, text: str) -> bytes:
    """This node's pass, encoded. Raises `ConfigError`, with the remedy, of a void invite."""
    try:
        invite = decode_invite_untrusted(text)
        _check(invite, world, run)
    except BadMessage as error:
        raise ConfigError(f"the invite cannot be used: {error}") from error
    return invite.pass_for(world.signer.peer_id).to_bytes()


def _check(invite: Invite, world: World, run: SignedRun) -> None:
    if invite.run != run.id:
        raise BadMessage(
            f"it is to run {invite.run.hex()[:12]}, and this node is in {run.name!r}"
            f" ({run.id.hex()[:12]}): take --bootstrap of a member of the run that you were"
            " invited to, and another --data"
        )
    why_not = why_not_by(invite.grant, run, world.wall())
    if why_not:
        raise BadMessage(why_not)
    check_grant(invite.grant, run.id, world.verify)


async def _keep(world: World, data: bytes) -> None:
    try:
        await world.disk.replace(PASS_PATH, data)
    except StorageError as error:
        raise ConfigError(f"the pass made of the invite cannot be kept: {error}") from error


def shown_by(book: RunBook, dht: Dht) -> bytes:
    """What our heartbeats have to show: nothing while the run document names us. Beside an
    invite in an open run the stamp as well: others may have seen all its uses taken."""
    own, run = dht.contact.peer, book.run
    if run is None or (run.may(own, Capability.GOSSIP) and not run.needs_stamp(own)):
        return b""
    stamp = dht.contact.nonce if run.needs_stamp(own) else b""
    return Credential(stamp, book.own_pass, book.own_work).to_bytes()


def serve_admission(book: RunBook, host: Host, meter: StrangerMeter) -> None:
    """Tell those who ask why they are not admitted, within what ``meter`` leaves."""

    async def answer(peer: PeerId, payload: bytes) -> bytes:
        try:
            book.see(peer, payload)
        except BadMessage as error:
            return _sentence(str(error))
        return _sentence(book.why_not(peer, Capability.GOSSIP))

    host.set_handler(
        ADMISSION_PROTOCOL,
        serve_requests(answer, max_request=MAX_SHOWN, may_have=meter.allows_at_door),
    )


def _sentence(text: str) -> bytes:
    return text.encode()[:MAX_REASON]


async def ask_admission(book: RunBook, dht: Dht, host: Host, peer: PeerId, wait: float) -> str:
    """Why ``peer`` does not admit this node; empty if it does, or does not say."""
    try:
        with trio.fail_after(wait):
            said = await request(
                host, peer, ADMISSION_PROTOCOL, shown_by(book, dht), max_reply=MAX_REASON
            )
    except PEER_TROUBLE as error:
        logger.debug("admission.no_answer peer=%s reason=%r", peer, error)
        return ""
    text = said.decode(errors="replace")
    return "".join(sign if sign.isprintable() else "?" for sign in text)
