"""Accepted submissions on their way to the trainer, on disk until it has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.node.node import Node
from p2p.offence import Offence
from roles.protocol.core.messages import (
    LIED,
    MAX_RECEIPT,
    VERDICT_PROTOCOL,
    AcceptedWork,
    Receipt,
    SignedVerdict,
    decode_delivery_untrusted,
    decode_receipt_untrusted,
)
from roles.protocol.request import Backoff, ask
from roles.run import run_of
from roles.shared.checked_json import discard
from roles.shared.durable import Durable
from roles.shared.reasons import printable

logger = logging.getLogger(__name__)

WAITING: Final = 4
"""Deliveries without an answer before judging stops: more would only grow stale on the way."""


class Deliveries:
    """Deliveries under way. Bounded: `has_room` holds the validator while the trainer is
    full."""

    def __init__(
        self, node: Node, folder: str, nursery: trio.Nursery, on_room: Callable[[], None]
    ) -> None:
        """``on_room`` is called when another delivery may begin."""
        self._node = node
        self._folder = folder
        self._nursery = nursery
        self._under_way = 0
        self._durable = Durable(node.world, "delivery")
        self._on_room = on_room
        self._is_refused = False
        """Whether the trainer has said that this validator lies."""

    async def resume(self) -> None:
        """Take up again what a previous life left."""
        disk = self._node.world.disk
        for name in await disk.list(self._folder):
            data = await disk.read(f"{self._folder}/{name}")
            try:
                delivery = decode_delivery_untrusted(data, self._node.world.verify)
            except BadMessage as error:
                await discard(disk, f"{self._folder}/{name}", error)
                continue
            self.expect()
            self.deliver(delivery)

    def has_room(self, beyond: int = 0) -> bool:
        """Whether another delivery may begin, or might if ``beyond`` more were allowed."""
        return self._under_way < WAITING + beyond

    @property
    def under_way(self) -> int:
        """How many have no answer yet."""
        return self._under_way

    async def keep(self, work: AcceptedWork) -> None:
        """Put a delivery on disk, before its verdict is known to any peer. Raises
        `StorageError`."""
        await self._node.world.disk.replace(self._path(work.verdict), work.to_bytes())

    def expect(self) -> None:
        """Count a delivery that will come: `has_room` heeds it from now on."""
        self._under_way += 1

    def deliver(self, work: AcceptedWork) -> None:
        """Hand an expected one to the trainer, however long that takes."""
        self._nursery.start_soon(self._deliver, work)

    async def _deliver(self, work: AcceptedWork) -> None:
        verdict, payload = work.verdict, work.to_bytes()
        backoff = Backoff(self._node.world, f"hand/{verdict.commitment.content.hex()}")
        while not await self._ask(payload):
            await backoff.wait()
        await self._durable.insist(partial(self._node.world.disk.remove, self._path(verdict)))
        self._under_way -= 1
        self._on_room()

    async def _ask(self, payload: bytes) -> bool:
        """Whether the trainer has answered for good: it has taken it, or has no use for it."""
        trainer = run_of(self._node).terms.trainers[0]
        data = await ask(self._node, trainer, VERDICT_PROTOCOL, payload, max_reply=MAX_RECEIPT)
        if data is None:
            return False
        try:
            receipt, reason = decode_receipt_untrusted(data)
        except BadMessage as error:
            self._node.host.penalise(trainer, Offence.NONSENSE.points, str(error))
            return False
        if receipt is Receipt.UNWANTED and reason.startswith(LIED):
            self._tell_refused(reason)
        elif receipt is Receipt.UNWANTED:
            self._node.book.hint(trainer)  # it may know an edition that no longer names us
        if receipt is not Receipt.TAKEN:
            logger.info("%s, says the trainer: %s", receipt.value, printable(reason))
        return receipt is not Receipt.LATER

    def _tell_refused(self, reason: str) -> None:
        """The operator hears once that the trainer takes nothing more of this validator."""
        if not self._is_refused:
            logger.warning(
                "the trainer takes nothing more of this validator, says it: %s; if this machine"
                " computes as it should, ask the run's owner to name one with a new key",
                printable(reason),
            )
        self._is_refused = True

    def _path(self, verdict: SignedVerdict) -> str:
        return f"{self._folder}/{verdict.commitment.content.hex()}"
