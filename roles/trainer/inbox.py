"""Deliveries on the trainer's disk, and which of their groups were learnt from.

Theory of operation
-------------------
A delivery is a file before it is answered, and stays until no group of it can be used. Groups
of one delivery may be used in different steps, so a second file, the log, says which groups
went into which step, and in which order. It is written when the engine has taken the step and
*before* its policy is published.

A checkpoint is not written after every step. So a delivery that was learnt from stays too,
until the *older* of the two generations of the checkpoint covers the steps that it went into:
after a crash, the trainer takes the logged steps after its checkpoint again, from the same
groups in the same order, and comes to the same weights. On disk are therefore the deliveries
of two checkpoints' steps and those that wait: with a checkpoint every 10 steps of 32 groups of
8 answers of 12 tokens, 1 MB; of 64 groups of 16 answers of 4,096 tokens (29 MB a step), 0.6 GB.

What the log says of steps that the trainer could not come to again never happened; everything
else is neither lost nor learnt from twice.
"""

from __future__ import annotations

import itertools
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

GroupPlace = tuple[bytes, int]
"""Content digest of a submission, number of one of its groups."""


class Inbox:
    """The deliveries below one folder of the node's disk."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._files: dict[bytes, None] = {}
        """Content digests of the submissions on disk."""
        self._used: dict[GroupPlace, int] = {}
        """The step that each went into, in the order in which they were learnt from."""
        self._names: list[str] = []
        """Files of an earlier life."""
        self._is_log_lost = False

    async def keep(self, work: AcceptedWork) -> None:
        """Put a delivery on disk; it survives a crash when this returns."""
        content = work.verdict.commitment.content
        await self._world.disk.replace(self._path(content.hex()), work.to_bytes())
        self._files[content] = None

    async def mark_used(self, groups: Sequence[BufferedGroup], step: int) -> None:
        """Say that ``groups`` went into ``step``, before its policy is published."""
        self._used = {key: at for key, at in self._used.items() if key[0] in self._files}
        self._used |= {(group.source, group.number): step for group in groups}
        await self._keep_used()

    async def _keep_used(self) -> None:
        rows = [[content.hex(), number, at] for (content, number), at in self._used.items()]
        await keep(self._world.disk, self._path(_USED), rows)

    async def recall(self) -> None:
        """Find what an earlier life left: deliveries, and the log."""
        disk = self._world.disk
        self._names = [name for name in await disk.list(self._folder) if name != _USED]
        try:
            rows = await recall(disk, self._path(_USED))
        except DamagedFile as error:
            reason = str(error)
        else:
            reason = f"{self._path(_USED)} is gone" if rows is None and self._names else ""
            self._used = {(bytes.fromhex(name), number): at for name, number, at in rows or ()}
        self._is_log_lost = bool(reason)
        if reason:
            logger.warning(
                "%s: deliveries on disk count as learnt from, lest one be learnt from twice",
                reason,
            )

    def learnt_after(self, step: int) -> dict[int, list[GroupPlace]]:
        """What the log says of the steps after ``step``, in order, up to the first that is
        missing."""
        steps: dict[int, list[GroupPlace]] = {}
        for place, at in self._used.items():
            steps.setdefault(at, []).append(place)
        known = itertools.takewhile(lambda at: at in steps, itertools.count(step + 1))
        return {at: steps[at] for at in known}

    async def read(self, content: bytes) -> AcceptedWork | None:
        """A delivery; None if it is not there, or damaged."""
        path = self._path(content.hex())
        if await self._world.disk.size(path) is None:
            return None
        try:
            return decode_delivery_untrusted(
                await self._world.disk.read(path), self._world.verify
            )
        except BadMessage as error:
            await discard(self._world.disk, path, error)
            return None

    async def restore(self, step: int) -> AsyncIterator[tuple[AcceptedWork, frozenset[int]]]:
        """What an earlier life left, each with the groups that went into ``step`` or an earlier
        one: to which the trainer has come again."""
        self._used = {place: at for place, at in self._used.items() if at <= step}
        await self._keep_used()
        for name in self._names:
            try:
                content = bytes.fromhex(name)
            except ValueError as error:
                await discard(self._world.disk, self._path(name), error)
                continue
            delivery = await self.read(content)
            if delivery is None:
                continue
            self._files[content] = None
            if not self._is_log_lost:
                yield (
                    delivery,
                    frozenset(number for source, number in self._used if source == content),
                )

    def learnt_from_after(self, step: int) -> dict[bytes, None]:
        """Deliveries that a step after ``step`` has learnt from."""
        return {content: None for (content, _), at in self._used.items() if at > step}

    async def forget_all_but(self, needed: dict[bytes, None]) -> None:
        """Remove the deliveries of which no group can be used any more. Raises
        `StorageError`."""
        for content in [content for content in self._files if content not in needed]:
            await dawdle(self._world, "inbox/slow removal")
            await self._world.disk.remove(self._path(content.hex()))
            self._files.pop(content, None)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"
