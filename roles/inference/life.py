"""What became of a node's work in all its lives: counts on disk that never contradict.

Theory of operation
-------------------
What was made is not counted. A submission is in the outbox until it has a verdict, and in the
book from then on: made is what the book has and what the outbox holds beside that. So accepted
never exceeds made, whenever the process is killed. The book is written when a verdict comes,
*before* the outbox forgets the submission, and names those that the outbox may still hold: a
verdict that is asked for again after a kill is not counted again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import trio

from p2p.world import World
from proofs.checks import Verdict
from roles.inference.outbox import SubmissionOutbox
from roles.protocol.core.messages import SignedVerdict, Submission
from roles.shared.checked_json import DamagedFile, keep, recall

logger = logging.getLogger(__name__)

_KINDS: Final = tuple(verdict.value for verdict in Verdict)

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
        self._ending: dict[Place, None] = {}
        """Those counted that the outbox may still hold."""
        self.verdicts = dict.fromkeys(_KINDS, 0)
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
            book.verdicts |= {kind: found["verdicts"][kind] for kind in _KINDS}
            book.tokens = found["tokens"]
            named = {(version, index) for version, index in found["ending"]}
            held = map(_place, outbox)
            book._ending = {place: None for place in held if place in named}
        return book

    @property
    def made(self) -> int:
        """Submissions made in all lives."""
        pending = sum(_place(one) not in self._ending for one in self._outbox)
        return sum(self.verdicts.values()) + pending

    async def settle(self, submission: Submission, verdict: SignedVerdict) -> None:
        """Count it, on disk when this returns. Raises `StorageError`; may be repeated."""
        if _place(submission) not in self._ending:
            self.verdicts[verdict.verdict.value] += 1
            self._ending[_place(submission)] = None
        await self._keep()

    def forget(self, submission: Submission) -> None:
        """The outbox holds it no more."""
        self._ending.pop(_place(submission), None)

    async def _keep(self) -> None:
        async with self._writing:
            state = {
                "verdicts": self.verdicts,
                "tokens": self.tokens,
                "ending": _rows(self._ending),
            }
            await keep(self._world.disk, self._path, state)


def _rows(places: Iterable[Place]) -> list[list[int]]:
    return [list(place) for place in places]


def _place(submission: Submission) -> Place:
    return int(submission.commitment.version), submission.commitment.index
