"""Peers that are in a run by invite.

A *guest* is an identity whose pass this node has judged: signed by an inviter of the newest
edition, for this run and this identity, not over, not taken back, and among the first so many
that came with that invite. Guests are kept on disk, so that guests counted before a restart are
counted after it. What the edition says now, and what the clock says, is asked each time anew:
an invite that was taken back admits nobody from the next edition on.

Bounded: `MAX_GUESTS` in all and a quarter of them for each inviter, so that one who invites the
whole world leaves the others their places. Only an inviter's signature makes an entry.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, StorageError
from p2p.identity import PeerId, decode_peer_id_untrusted
from p2p.node.admission import (
    EXPIRY_TOLERANCE,
    MAX_PASS,
    ROLES,
    Capability,
    Grant,
    Pass,
    SignedRun,
    Uninvited,
    decode_pass_untrusted,
)
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World

logger = logging.getLogger(__name__)

GUESTS: Final = "guests"
"""Folder of the accepted passes, with a file for each guest."""
MAX_GUESTS: Final = 4_096
"""Maximum number of guests, more than the lists of a run file name; 2 MiB."""


def why_not_by(grant: Grant, run: SignedRun, wall: float) -> str:
    """Return why the newest run document, or the clock, voids a grant; empty if it is good."""
    ask = "ask the run's owner for another one"
    if grant.inviter != run.owner and grant.inviter not in run.guest_rules.inviters:
        return (
            f"the invite is forged, or its inviter {grant.inviter} may not invite any more:"
            f" {ask}"
        )
    if wall > grant.expiry + EXPIRY_TOLERANCE:
        return f"the invite expired on {grant.until}: {ask}"
    if grant.id in run.guest_rules.revoked:
        return f"the invite {grant.id} was revoked by the run's owner: {ask}"
    return ""


def _gives_more(new: Grant, old: Grant) -> bool:
    """Return True if ``new`` gives all that ``old`` gives, and more of it or for longer."""
    mine, before = ROLES[new.role], ROLES[old.role]
    return mine >= before and (mine > before or new.expiry > old.expiry)


class GuestBook:
    """Guests that this node knows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._guests: dict[PeerId, Pass] = {}
        self._tidied: tuple[int, float] = (0, 0.0)
        """Epoch and minute of the last search for former guests."""
        self._unkept: dict[PeerId, None] = {}
        """Guests whose changes are not yet on disk."""
        self._came = Notifier()

    def __len__(self) -> int:
        return len(self._guests)

    def admit(self, run: SignedRun, peer: PeerId, data: bytes) -> None:
        """Check a pass and make its bearer a guest.

        Raises:
            Uninvited: The pass does not admit; the message has the remedy.
            BadMessage: The bytes are not a pass.
        """
        shown = decode_pass_untrusted(data)
        grant, known = shown.grant, self._guests.get(peer)
        wall = self._world.wall()
        why_not = why_not_by(grant, run, wall)
        if why_not:
            raise Uninvited(why_not)
        # Passes are no secret: whoever shows an old one of a guest takes nothing from it.
        if known is not None and (
            known.grant == grant
            or not (_gives_more(grant, known.grant) or why_not_by(known.grant, run, wall))
        ):
            return
        shown.check(run.id, peer, self._world.verify)
        if sum(one.grant.key == grant.key for one in self._guests.values()) >= grant.uses:
            raise Uninvited(
                f"all {grant.uses} uses of the invite {grant.id} are taken by others: ask"
                f" {grant.inviter} for one of your own"
            )
        if not self._has_room(grant.inviter):
            self._tidy(run)
        if not self._has_room(grant.inviter):
            raise Uninvited(
                f"{grant.inviter} has invited more than a node remembers: ask the run's owner"
                " to name you in the run file (allowed, in [admission])"
            )
        self._guests[peer] = shown
        self._unkept[peer] = None
        self._came.notify_all()

    def _has_room(self, inviter: PeerId) -> bool:
        of_inviter = sum(one.grant.inviter == inviter for one in self._guests.values())
        return len(self._guests) < MAX_GUESTS and of_inviter < MAX_GUESTS // 4

    def _tidy(self, run: SignedRun) -> None:
        """Forget guests that are no longer admitted, at most once for each epoch and minute.
        Anyone with an invite's text can cause this, and it looks at all guests."""
        wall = self._world.wall()
        moment = run.epoch, wall // 60.0
        if moment == self._tidied:
            return
        self._tidied = moment
        gone = [who for who, one in self._guests.items() if why_not_by(one.grant, run, wall)]
        for who in gone:
            del self._guests[who]
            self._unkept[who] = None

    def may(self, run: SignedRun, peer: PeerId, capability: Capability) -> bool:
        """Return True if an invite gives ``peer`` this capability now."""
        return peer in self._guests and not self.why_not(run, peer, capability)

    def is_guest(self, run: SignedRun, peer: PeerId) -> bool:
        """Return True if an invite admits ``peer`` to the run in any role."""
        return self.may(run, peer, Capability.GOSSIP)

    def why_not(self, run: SignedRun, peer: PeerId, capability: Capability) -> str:
        """Return why no invite gives ``peer`` this capability, with the remedy; empty if one
        does."""
        shown = self._guests.get(peer)
        if shown is None:
            return (
                f"{peer} is not on the run's list, and no invite of it is known here: ask the"
                " run's owner for one, and start the node with --invite"
            )
        why_not = why_not_by(shown.grant, run, self._world.wall())
        if not why_not and capability not in ROLES[shown.grant.role]:
            return (
                f"its invite is for the role {shown.grant.role}, not to {capability.value}: ask"
                " the run's owner for one that is"
            )
        return why_not

    # On disk.

    async def recall(self, run: SignedRun) -> None:
        """Load the guests from disk and remove files with void passes."""
        disk = self._world.disk
        for name in (await disk.list(GUESTS))[:MAX_GUESTS]:
            path = f"{GUESTS}/{name}"
            try:
                peer, shown = _kept_untrusted(await disk.read(path, 0, MAX_PASS + 64))
                shown.check(run.id, peer, self._world.verify)
            except BadMessage as error:
                logger.warning("guest_void %s: %s", path, error)
                with suppress(StorageError):  # it is void the next time, too
                    await disk.remove(path)
                continue
            self._guests[peer] = shown

    async def keep_forever(self) -> None:
        """Write changes of guests to disk until cancelled. A write that the disk refuses is
        repeated with the next change."""
        while True:
            refused: list[PeerId] = []
            while self._unkept:
                peer = next(iter(self._unkept))
                del self._unkept[peer]
                if not await self._keep(peer):
                    refused.append(peer)
            self._unkept.update(dict.fromkeys(refused))
            await self._came.wait()

    async def _keep(self, peer: PeerId) -> bool:
        path, shown = f"{GUESTS}/{peer.public_key.hex()}", self._guests.get(peer)
        try:
            if shown is None:
                await self._world.disk.remove(path)
            else:
                await self._world.disk.replace(path, pack([peer.digest, shown.to_bytes()]))
        except StorageError as error:
            logger.warning("guest_not_kept %s: %s", path, error)
            return False
        return True


def _kept_untrusted(data: bytes) -> tuple[PeerId, Pass]:
    peer, shown = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="guest")
    return decode_peer_id_untrusted(peer), decode_pass_untrusted(shown)
