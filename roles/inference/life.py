"""What became of a node's work in all its lives: counts on disk that never contradict.

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
from roles.inference.outbox import SubmissionOutbox
from roles.protocol.core.messages import Submission
from roles.shared.checked_json import DamagedFile, keep, recall

logger = logging.getLogger(__name__)

SETTLED: Final = 64
"""Places that are remembered as counted: sixteen times as many as can be on their way, since a
power cut may bring back files that were removed a while ago. They take a kilobyte."""

Place = tuple[int, int]
"""Version and index of a submission."""


class LifeBook:
    """Submissions with a verdict, in all lives of one role."""

    def __init__(self, world: World, path: str, outbox: SubmissionOutbox) -> None:
        self._world = world
        self._outbox = outbox
        self._path = path
        self._writing = trio.Lock()
        """The newest state is written last."""
        self._settled: BoundedDict[Place, None] = BoundedDict(SETTLED)
        """Those counted last."""
        self.verdicts = dict.fromkeys((kind.value for kind in Verdict), 0)
        self.tokens = 0
        """Drawn in all lives, as far as a verdict came after them."""

    @classmethod
    async def open(cls, world: World, path: str, outbox: SubmissionOutbox) -> LifeBook:
        """Read what earlier lives counted; damaged, it begins anew."""
        book = cls(world, path, outbox)
        try:
            found = await recall(world.disk, path)
        except DamagedFile as error:
            logger.warning("%s; the counts begin anew, no work is lost", error)
            return book
        if found is not None:
            book.verdicts |= found["verdicts"]
            book.tokens = found["tokens"]
            for version, index in found["settled"]:
                book._settled[version, index] = None
        return book

    @property
    def made(self) -> int:
        """Submissions made in all lives."""
        pending = sum(_place(one) not in self._settled for one in self._outbox)
        return sum(self.verdicts.values()) + pending

    async def settle(self, submission: Submission, kind: Verdict) -> None:
        """Count what became of it, on disk when this returns. Raises `StorageError`; may be
        repeated."""
        if _place(submission) not in self._settled:
            self.verdicts[kind.value] += 1
            self._settled[_place(submission)] = None
        await self._keep()

    async def _keep(self) -> None:
        async with self._writing:
            state = {
                "verdicts": self.verdicts,
                "tokens": self.tokens,
                "settled": [list(place) for place in self._settled],
            }
            await keep(self._world.disk, self._path, state)


def _place(submission: Submission) -> Place:
    return int(submission.commitment.version), submission.commitment.index
