"""Writes that a role cannot do without, repeated until the disk takes them.

A disk is full for a while. What a role must not lose (a submission drawn, a verdict, a step)
waits then, and the role with it: the worker draws nothing, the validator judges nothing, the
trainer learns nothing. They go on when there is room. Meanwhile the node relays, answers, and
serves what it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from p2p.errors import StorageError
from p2p.world import World
from roles.shared.backoff import Backoff

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Durable:
    """The writes of one role. One line is logged when the first of them has to wait, one when
    none does."""

    def __init__(self, world: World, role: str) -> None:
        self._world = world
        self._role = role
        self.waiting = 0
        """Writes that the disk has refused and that are tried again."""

    async def insist(self, write: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``write`` until the disk has taken it, and return its result.

        ``write`` must be one that may be repeated.
        """
        try:
            return await write()
        except StorageError as error:
            if not self.waiting:
                logger.warning("the %s stops until the disk takes data: %s", self._role, error)
        self.waiting += 1
        try:
            return await self._repeat(write)
        finally:
            self.waiting -= 1
            if not self.waiting:
                logger.warning("the %s no longer waits for the disk", self._role)

    async def _repeat(self, write: Callable[[], Awaitable[T]]) -> T:
        backoff = Backoff(self._world, f"disk/{self._role}")
        while True:
            await backoff.wait()
            try:
                return await write()
            except StorageError as error:
                logger.debug("the disk still refuses the %s: %s", self._role, error)
