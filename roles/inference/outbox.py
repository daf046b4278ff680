"""Submissions without a verdict, on disk from before they are sent until they have one.

A node that is killed sends them again after its restart, and goes on where it was in the draw
order. A submission whose file has changed is not sent: no validator could check its signature.
A lost cursor costs work done twice, at most that of one policy: what is drawn at a place is the
same again, and so is the answer to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.shardcast.manifest import PolicyVersion
from p2p.world import World, dawdle
from roles.protocol.core.messages import Submission, decode_submission_untrusted
from roles.shared.checked_json import DamagedFile, discard, keep, recall

logger = logging.getLogger(__name__)

_CURSOR: Final = "cursor"


class SubmissionOutbox:
    """Pending submissions and the cursor of the draw order, below one folder of the node's
    disk."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._pending: dict[str, Submission] = {}
        self._next: tuple[PolicyVersion, int] = (PolicyVersion(-1), 0)
        self._removed = Notifier()

    @classmethod
    async def open(cls, world: World, folder: str) -> SubmissionOutbox:
        """Read back what a previous life left."""
        outbox = cls(world, folder)
        for name in await world.disk.list(folder):
            await outbox._restore(name)
        return outbox

    async def _restore(self, name: str) -> None:
        disk, path = self._world.disk, f"{self._folder}/{name}"
        try:
            if name == _CURSOR:
                version, index = await recall(disk, path)
                self._advance(PolicyVersion(version), index)
                return
            submission = decode_submission_untrusted(await disk.read(path), self._world.verify)
        except (BadMessage, DamagedFile) as error:
            await discard(disk, path, error)
            return
        if submission.commitment.node != self._world.signer.peer_id:
            logger.warning(
                "outbox_foreign %s: it was made under another key, no validator takes it now",
                name,
            )
            return
        self._pending[name] = submission
        self._advance(submission.commitment.version, submission.commitment.index + 1)

    def _advance(self, version: PolicyVersion, index: int) -> None:
        self._next = max(self._next, (version, index))

    def __iter__(self) -> Iterator[Submission]:
        return iter(tuple(self._pending.values()))

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def newest(self) -> PolicyVersion:
        """The newest policy that was worked under, in whatever life; -1 before the first."""
        return self._next[0]

    def next_index(self, version: PolicyVersion) -> int:
        """The next place in the draw order under ``version``."""
        return self._next[1] if self._next[0] == version else 0

    def lead(self, version: PolicyVersion, index: int) -> int:
        """How many places this one under ``version`` is ahead of the oldest that is still
        pending."""
        places = [sent.commitment.index for sent in self if sent.commitment.version == version]
        return index - min(places) if places else 0

    async def wait_removed(self) -> None:
        """Return when the next submission is forgotten."""
        await self._removed.wait()

    async def add(self, submission: Submission) -> None:
        """Keep it, durably, and move the cursor behind it. Raises `StorageError`; may be
        repeated."""
        name = _name(submission)
        await self._world.disk.replace(f"{self._folder}/{name}", submission.to_bytes())
        self._pending[name] = submission
        self._advance(submission.commitment.version, submission.commitment.index + 1)
        await dawdle(self._world, "outbox/slow cursor")
        await keep(self._world.disk, f"{self._folder}/{_CURSOR}", list(self._next))

    async def remove(self, submission: Submission) -> None:
        """Forget it: a signed receipt is here. Raises `StorageError`; may be repeated."""
        name = _name(submission)
        if self._pending.pop(name, None) is not None:
            self._removed.notify_all()
            await dawdle(self._world, "outbox/slow removal")
        await self._world.disk.remove(f"{self._folder}/{name}")


def _name(submission: Submission) -> str:
    commitment = submission.commitment
    return f"{commitment.version:010d}-{commitment.index:010d}"
