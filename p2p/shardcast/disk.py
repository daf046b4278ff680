"""State of the disk. If it refuses, the node serves what it holds and tries again later."""

from __future__ import annotations

import logging
from typing import Final

from p2p.concurrency import AutoResetEvent
from p2p.errors import StorageError
from p2p.wire import MIB
from p2p.world import World

FIRST_RETRY: Final = 5.0
"""Seconds until a disk that refused is tried again for the first time."""
LONGEST_RETRY: Final = 30.0
"""Longest pause between two trials, in seconds. A person who has made room waits at most this
long. It means 120 trials, 120 MiB, an hour."""

logger = logging.getLogger(__name__)


class DiskHealth:
    """State of a disk, with one log line whenever it changes.

    A disk is full for minutes (a log is rotated, its owner makes room) or for good (it is too
    small, or has gone read-only). Either way a node that can read goes on: it serves what it
    holds, and only what needs the disk waits. Pauses double, since a disk that refuses is often
    one that is slow to say so.
    """

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._trial = f"{folder}/trial"
        self._failed = AutoResetEvent()
        self._pause = FIRST_RETRY
        self.refuses = False
        """True if the last write failed."""

    def note_failure(self, error: StorageError) -> bool:
        """Record a failed write. Return True if the disk worked until now."""
        news, self.refuses = not self.refuses, True
        if news:
            logger.warning(
                "disk.refuses reason=%s: policies are served, not fetched, until it takes data",
                error,
            )
            self._failed.set()
        return news

    def note_success(self) -> None:
        """Record that something large was written whole. The next failure counts as a new
        one."""
        self._pause = FIRST_RETRY

    async def wait_mended(self) -> None:
        """Return when a write has failed and a later trial has succeeded."""
        while not self.refuses:
            await self._failed.wait()
        while self.refuses:
            await self._pause_longer()
            self.refuses = not await self.takes_data()
        logger.warning("disk.takes_data: policies are fetched again")

    async def _pause_longer(self) -> None:
        await self._world.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    async def wait_room(self, needed: int) -> None:
        """Pause, then return once `needed` bytes are free."""
        await self._pause_longer()
        while not await self.takes_data(needed):
            await self._pause_longer()

    async def takes_data(self, needed: int = 0) -> bool:
        """Return True if a trial can be written, and ``needed`` bytes are free."""
        try:
            if needed and await self._world.disk.free() < needed:
                return False
            # Bytes written to find out whether there is room: a full file system still takes a
            # few.
            await self._world.disk.replace(self._trial, bytes(MIB))
            await self._world.disk.remove(self._trial)
        except StorageError as error:
            logger.debug("disk.still_refuses reason=%s", error)
            return False
        return True
