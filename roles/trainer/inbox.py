"""Deliveries on the trainer's disk, and which of their groups were learnt from.

Theory of operation
-------------------
A delivery is a file before it is answered, and stays until no group of it can be used. Groups
of one delivery may be used in different steps, so a second file says which group went into
which step. It is written *before* the checkpoint of that step: after a crash, what it says of
later steps than the checkpoint's never happened, and everything else is neither lost nor learnt
from twice.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from p2p.errors import BadMessage
from p2p.world import World, dawdle
from roles.protocol.core.messages import AcceptedWork, decode_delivery_untrusted
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.trainer.core.buffer import BufferedGroup

logger = logging.getLogger(__name__)

_USED: Final = "used.json"


class Inbox:
    """The deliveries below one folder of the node's disk."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._files: dict[bytes, None] = {}
        """Content digests of the submissions on disk."""
        self._used: dict[tuple[bytes, int], int] = {}
        """By (submission, group): the step it went into."""

    async def keep(self, work: AcceptedWork) -> None:
        """Put a delivery on disk; it survives a crash when this returns."""
        content = work.verdict.commitment.content
        await self._world.disk.replace(self._path(content.hex()), work.to_bytes())
        self._files[content] = None

    async def mark_used(self, groups: Sequence[BufferedGroup], step: int) -> None:
        """Say that ``groups`` go into ``step``, before its checkpoint is written."""
        self._used = {key: at for key, at in self._used.items() if key[0] in self._files}
        self._used |= {(group.source, group.number): step for group in groups}
        await self._keep_used()

    async def _keep_used(self) -> None:
        rows = [[content.hex(), number, at] for (content, number), at in self._used.items()]
        await keep(self._world.disk, self._path(_USED), rows)

    async def restore(self, step: int) -> AsyncIterator[tuple[AcceptedWork, frozenset[int]]]:
        """What an earlier life left, each with the groups that went into ``step`` or an earlier
        one."""
        disk = self._world.disk
        names = [name for name in await disk.list(self._folder) if name != _USED]
        is_known = await self._recall_used(step, bool(names))
        for name in names:
            try:
                delivery = decode_delivery_untrusted(
                    await disk.read(self._path(name)), self._world.verify
                )
            except BadMessage as error:
                await discard(disk, self._path(name), error)
                continue
            content = delivery.verdict.commitment.content
            self._files[content] = None
            if is_known:
                yield (
                    delivery,
                    frozenset(number for source, number in self._used if source == content),
                )

    async def _recall_used(self, step: int, has_deliveries: bool) -> bool:
        """Read which groups were learnt from by ``step``; False if that is lost: any may have
        been."""
        try:
            rows = await recall(self._world.disk, self._path(_USED))
        except DamagedFile as error:
            reason = str(error)
        else:
            reason = f"{self._path(_USED)} is gone" if rows is None and has_deliveries else ""
            self._used = {
                (bytes.fromhex(name), number): at
                for name, number, at in rows or ()
                if at <= step
            }
        if reason:
            logger.warning(
                "%s: deliveries on disk count as learnt from, lest one be learnt from twice",
                reason,
            )
        await self._keep_used()
        return not reason

    async def forget_all_but(self, needed: dict[bytes, None]) -> None:
        """Remove the deliveries of which no group can be used any more. Raises
        `StorageError`."""
        for content in [content for content in self._files if content not in needed]:
            await dawdle(self._world, "inbox/slow removal")
            await self._world.disk.remove(self._path(content.hex()))
            self._files.pop(content, None)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"
