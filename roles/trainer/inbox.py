"""Accepted places on the trainer's disk, and which of their groups were learnt from.

A place is a file before its verdict is sent, and stays until no group of it can be used. Groups
of one place may be used in different steps, so a second file, the log, says which groups went
into which step, and in which order. It is written *before* the engine has the groups: a step
that was cut off is taken again from the same ones, also by a learner that outlives the node.

A checkpoint is not written after every step. So a place that was learnt from stays too, until
the *older* of the two generations of the checkpoint covers the steps that it went into: after a
crash, the trainer takes the logged steps after its checkpoint again, from the same groups in
the same order, and comes to the same weights. On disk are therefore the places of two
checkpoints' steps and those that wait: with a checkpoint every 10 steps of 32 groups of 8
answers of 12 tokens, 1 MB; of 64 groups of 16 answers of 4,096 tokens (29 MB a step), 0.6 GB.

What the log says of steps that the trainer could not come to again never happened; everything
else is neither lost nor learnt from twice.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from p2p.errors import BadMessage
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World, dawdle
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.taken import TakenPlace, decode_taken_untrusted

logger = logging.getLogger(__name__)

USED: Final = "used.json"

NEVER: Final = -1
"""Step number that marks dropped groups: no step learns from them."""

MOST_KEPT: Final = 1 << 17
"""Most files of finished places that are kept, whatever their size."""

GroupPlace = tuple[bytes, int]
"""Digest of a place's commitment, and the number of one of its groups."""


class Inbox:
    """Places below one folder of the node's disk. The newest ``most`` bytes of places that
    cannot be used any more stay in ``kept``, for `shoal run export`."""

    def __init__(self, world: World, folder: str, kept: str = "", most: int = 0) -> None:
        self._world = world
        self._folder = folder
        self._kept, self._most = kept, most
        self._files: dict[bytes, None] = {}
        """Digests of the commitments of the places on disk."""
        self._used: dict[GroupPlace, int] = {}
        """Maps each group to the step that used it, in the order in which groups were learnt
        from."""
        self._names: list[str] = []
        """Names of files that an earlier process left."""
        self._is_log_lost = False

    async def keep(self, place: TakenPlace) -> None:
        """Put a place on disk. The place survives a crash once this returns."""
        await self._world.disk.replace(self._path(place.key.hex()), place.to_bytes())
        self._files[place.key] = None

    async def mark_used(self, groups: Sequence[BufferedGroup], step: int) -> None:
        """Record that ``groups`` belong to ``step``, before the engine gets them."""
        self._used = {key: at for key, at in self._used.items() if key[0] in self._files}
        self._used |= {(group.source, group.number): step for group in groups}
        await self._keep_used()

    async def _keep_used(self) -> None:
        rows = [[key.hex(), number, at] for (key, number), at in self._used.items()]
        await keep(self._world.disk, self._path(USED), rows)

    async def recall(self) -> None:
        """Read the places and the log that an earlier process left."""
        disk = self._world.disk
        self._names = [name for name in await disk.list(self._folder) if name != USED]
        try:
            rows = await recall(disk, self._path(USED))
        except DamagedFile as error:
            reason = str(error)
        else:
            reason = f"{self._path(USED)} is gone" if rows is None and self._names else ""
            self._used = {(bytes.fromhex(name), number): at for name, number, at in rows or ()}
        self._is_log_lost = bool(reason)
        if reason:
            logger.warning(
                "%s: places on disk count as learnt from, lest one be learnt from twice",
                reason,
            )

    def learnt_after(self, step: int) -> dict[int, list[GroupPlace]]:
        """Return the log's entries for the steps after ``step``, in order, up to the
        first gap."""
        steps: dict[int, list[GroupPlace]] = {}
        for place, at in self._used.items():
            steps.setdefault(at, []).append(place)
        known = itertools.takewhile(lambda at: at in steps, itertools.count(step + 1))
        return {at: steps[at] for at in known}

    async def read(self, key: bytes) -> TakenPlace | None:
        """Return a place; None if it is not there, or damaged."""
        path = self._path(key.hex())
        if await self._world.disk.size(path) is None:
            return None
        try:
            return decode_taken_untrusted(await self._world.disk.read(path), self._world.verify)
        except BadMessage as error:
            await discard(self._world.disk, path, error)
            return None

    async def restore(self, step: int) -> AsyncIterator[tuple[TakenPlace, frozenset[int]]]:
        """Yield the places that an earlier process left, each with the groups that went into
        ``step`` or an earlier step."""
        self._used = {place: at for place, at in self._used.items() if at <= step}
        await self._keep_used()
        for name in self._names:
            try:
                key = bytes.fromhex(name)
            except ValueError as error:
                await discard(self._world.disk, self._path(name), error)
                continue
            place = await self.read(key)
            if place is None:
                continue
            self._files[key] = None
            if not self._is_log_lost:
                yield (
                    place,
                    frozenset(number for source, number in self._used if source == key),
                )

    def learnt_from_after(self, step: int) -> dict[bytes, None]:
        """Return the places that a step after ``step`` has learnt from."""
        return {key: None for (key, _), at in self._used.items() if at > step}

    async def forget_all_but(self, needed: dict[bytes, None]) -> None:
        """Remove the places whose groups can no longer be used. Raises `StorageError`."""
        for key in [key for key in self._files if key not in needed]:
            await dawdle(self._world, "inbox/slow removal")
            if self._most:
                await self._keep_finished(key)
            await self._world.disk.remove(self._path(key.hex()))
            self._files.pop(key, None)
        if self._most:
            await self._trim_finished()

    async def _keep_finished(self, key: bytes) -> None:
        steps = [[number, at] for (of, number), at in self._used.items() if of == key]
        last = max((at for _, at in steps), default=0)
        place = await self._world.disk.read(self._path(key.hex()))
        path = f"{self._kept}/{max(last, 0):08d}-{key.hex()}"
        await self._world.disk.replace(path, pack([steps, place]))

    async def _trim_finished(self) -> None:
        files = await self._world.disk.walk(self._kept, MOST_KEPT)
        size = sum(one.size for one in files)
        for one in sorted(files, key=lambda one: one.path):
            if size <= self._most and len(files) < MOST_KEPT:
                return
            await self._world.disk.remove(f"{self._kept}/{one.path}")
            size -= one.size

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def decode_kept_untrusted(data: bytes) -> tuple[dict[int, int], bytes]:
    """Decode a finished place as the inbox keeps it: the step that each group went into, and
    the place. Raises `BadMessage`."""
    rows, place = fields_untrusted(unpack_untrusted(data), list, bytes, what="finished place")
    return dict(fields_untrusted(row, int, int, what="used group") for row in rows), place
