"""Proofs that a run's owner signed two editions of one epoch, and their distribution.

Theory of operation
-------------------
Of one epoch there is one edition: nodes that hold different ones have other validators, limits
or members, and refuse each other's honest work without a word. No node can say which of the two
is right. So each works on under the one that it holds, its *own*, and keeps the other, its
*rival*. The two signatures are a proof that only the owner's key can make: what is
compared is what was signed, so another signature, or another encoding, of the same terms is no
rival.

A node asks for a rival where it asks for news (``/shoal/run-rival/1.0.0``: one frame ``[run id,
epoch, digest of what the owner signed]``, one frame back). A peer whose edition of that epoch
is another answers with that; one that has the same, and knows a rival, with the rival; else the
frame is empty. A peer that is asked with a digest that is not its own asks back
(`p2p.node.rundoc.RunBook.hint`). So of two nodes that meet both know, and in each round of
asking about twice as many as before.

Bounded: the first rival of an epoch is proof enough. It is kept beside the pin, and no other is
kept, asked for, or told of. An edition with a higher epoch, which both camps take, ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from p2p.equivocation import conflict
from p2p.errors import BadMessage, StorageError
from p2p.identity import ProtocolId
from p2p.node.admission import SignedRun
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World

RIVAL_PROTOCOL: Final = ProtocolId("/shoal/run-rival/1.0.0")
RIVAL_PATH: Final = "run.rival"
"""File in the node's folder with the other run document of the pinned epoch."""
MAX_RIVAL_REQUEST: Final = 96
"""Maximum bytes of ``[run id, epoch, digest]``: 32, 9, 32 and framing."""

logger = logging.getLogger(__name__)


def are_rivals(one: SignedRun, other: SignedRun) -> bool:
    """Return True if the same owner signed both documents for one epoch of one run, with
    different contents."""
    return one.id == other.id and (
        conflict({one.epoch: one.digest}, {other.epoch: other.digest}) is not None
    )


class Rivalry:
    """Contradicting run document of the pinned epoch, if there is one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_kept = True
        """True if the disk has the present state. Writing is repeated until it has."""
        self.rival: SignedRun | None = None
        """Other document of the pinned epoch, or None."""

    async def load(self, pin: SignedRun, read: Callable[[bytes, SignedRun], SignedRun]) -> None:
        """Load the proof from disk, and remove it if it does not contradict ``pin``."""
        if await self._world.disk.size(RIVAL_PATH) is None:
            return
        try:
            rival = read(await self._world.disk.read(RIVAL_PATH), pin)
        except BadMessage as error:
            path = self._world.disk.locate(RIVAL_PATH)
            logger.warning("run.rival_damaged %s is removed: %s", path, error)
        else:
            if are_rivals(pin, rival):
                self._take(rival)
                return
        self._is_kept = False
        await self.keep()

    async def note(self, rival: SignedRun) -> None:
        """Keep the first document that contradicts the pinned one, and warn the operator."""
        if self.rival is not None:
            return
        self._take(rival)
        self._is_kept = False
        await self.keep()

    def _take(self, rival: SignedRun) -> None:
        self.rival = rival
        logger.warning(
            "the owner of run %r has signed two run files of epoch %d that say different"
            " things: this node works on under the one it holds, others hold the other; ask the"
            " owner for one with a higher epoch, and start one node with it: --run FILE",
            rival.name,
            rival.epoch,
        )
        self._world.trace("run.rival", epoch=rival.epoch)

    async def settle(self, edition: SignedRun) -> None:
        """Forget the proof if ``edition``, which is now pinned, has a higher epoch."""
        if self.rival is None or edition.epoch <= self.rival.epoch:
            return
        logger.info("run.rival_settled epoch=%d", edition.epoch)
        self.rival, self._is_kept = None, False
        await self.keep()

    async def keep(self) -> None:
        """Write the present state to disk, unless it is there."""
        if self._is_kept:
            return
        try:
            if self.rival is None:
                await self._world.disk.remove(RIVAL_PATH)
            else:
                await self._world.disk.replace(RIVAL_PATH, self.rival.document)
            self._is_kept = True
        except StorageError as error:
            logger.warning("run.rival_not_kept reason=%s", error)

    def answer(self, own: SignedRun, digest: bytes) -> bytes:
        """Return the reply to a peer whose document of the epoch of ``own`` has ``digest``."""
        if digest != own.digest:
            return own.document
        return b"" if self.rival is None else self.rival.document


def encode_rival_request(own: SignedRun) -> bytes:
    """Return the request for `RIVAL_PROTOCOL`."""
    return pack([own.id, own.epoch, own.digest])


def decode_rival_request_untrusted(data: bytes) -> tuple[bytes, int, bytes]:
    """Decode a request into run id, epoch and digest.

    Raises:
        BadMessage: The bytes are not a request. Nothing else is raised, whatever the bytes.
    """
    run_id, epoch, digest = fields_untrusted(
        unpack_untrusted(data), bytes, int, bytes, what="rival request"
    )
    return run_id, epoch, digest
