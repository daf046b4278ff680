"""Results of a node's work over all its processes: consistent counts on disk.

Theory of operation
-------------------
What was made is not counted. A submission is in the outbox until it has a verdict, and in the
book from then on: made is what the book has and what the outbox holds beside that. So accepted
never exceeds made, whenever the process is killed. The book is written when a verdict comes,
*before* the outbox forgets the submission, and names the places that it counted last: a
submission that comes back after a kill or a power cut, and gets its verdict again, is not
counted again.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.world import World
from proofs.checks import Verdict
from roles.inference.outbox import Outbox
from roles.shared.checked_json import DamagedFile, keep, recall

logger = logging.getLogger(__name__)

SETTLED: Final = 256
"""Number of places that are remembered as counted: five times as many as can be unsettled,
since a power cut may bring back files that were removed a while ago."""
_KINDS: Final = (*(verdict.value for verdict in Verdict), "unchecked")
"""Possible results of a place. The last one says that the trainer did not want it."""

Place = tuple[int, int]
"""Version and index of a submission."""


class LifeBook:
    """Counts of submissions with a verdict, over all processes of one role."""

    def __init__(self, world: World, path: str, outbox: Outbox) -> None:
        self._world = world
        self._outbox = outbox
        self._path = path
        self._writing = trio.Lock()
        """Lock around writes, so that the newest state is written last."""
        self._settled: BoundedDict[Place, None] = BoundedDict(SETTLED)
        """Places that were counted most recently."""
        self.verdicts = dict.fromkeys(_KINDS, 0)
        self.tokens = 0
        """Number of tokens drawn over all processes, as of the last verdict."""

    @classmethod
    async def open(cls, world: World, path: str, outbox: Outbox) -> LifeBook:
        """Read the counts of earlier processes. A damaged book starts from zero."""
        book = cls(world, path, outbox)
        try:
            found = await recall(world.disk, path)
        except DamagedFile as error:
            logger.warning("%s; the counts begin anew, no work is lost", error)
            return book
        if found is not None:
            book.verdicts |= {kind: found["verdicts"].get(kind, 0) for kind in _KINDS}
            book.tokens = found["tokens"]
            for version, index in found["settled"]:
                book._settled[version, index] = None
        return book

    @property
    def made(self) -> int:
        """Number of submissions made over all processes."""
        pending = sum(one.key not in self._settled for one in self._outbox)
        return sum(self.verdicts.values()) + pending

    async def settle(self, place: Place, kind: str) -> None:
        """Count the result of a place. The count is on disk when this returns. May be repeated.

        Raises:
            StorageError: The disk refuses it.
        """
        if place not in self._settled:
            self.verdicts[kind] += 1
            self._settled[place] = None
        await self._keep()

    async def _keep(self) -> None:
        async with self._writing:
            state = {
                "verdicts": self.verdicts,
                "tokens": self.tokens,
                "settled": [list(place) for place in self._settled],
            }
            await keep(self._world.disk, self._path, state)
