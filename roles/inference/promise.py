"""Under which policy this node works next, as it has told the trainer.

A window names the policy under which its worker works next, before that policy is there, and a
worker that leaves it out selects (`roles.trainer.core.promises`). So this node takes up the one
that it has named, once it is here, and none before it; and under each it fills about as many
places as under the one before, also when there is a newer one. Neither holds while no lots
fall, nor under a policy whose work would go stale. What was promised is on the disk before it
is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.world import World
from roles.protocol.core.standing import FEWER, usual_places
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable

logger = logging.getLogger(__name__)


class WorkPromise:
    """What this node has promised, in whatever life."""

    def __init__(
        self,
        world: World,
        path: str,
        durable: Durable,
        between: Callable[[PolicyVersion, PolicyVersion], float],
    ) -> None:
        """``between``: seconds from a policy to another, by the trainer's clock."""
        self._world = world
        self._path = path
        self._durable = durable
        self._between = between
        self._working = NO_POLICY
        """The policy that was taken up last."""
        self._before = 0
        """Places filled under the one before; `_lasted` is how long that was worked under."""
        self._lasted = 0.0
        self._said_under = NO_POLICY
        self._due = 0

    async def recall(self) -> None:
        """Take up what an earlier life has promised."""
        try:
            found = await recall(self._world.disk, self._path)
        except DamagedFile as error:
            return await discard(self._world.disk, self._path, error)
        if found is not None:
            self._working, self._before, self._lasted, self._said_under, self._due = found
        return None

    async def begin(self, version: PolicyVersion, filled: int) -> None:
        """Another policy is taken up; ``filled`` places were filled under the last one."""
        if version != self._working:
            self._lasted = self._between(self._working, version)
            self._working, self._before = version, filled
            await self._keep()

    async def make(self, version: PolicyVersion, newest: PolicyVersion) -> PolicyVersion:
        """The policy that a window under ``version`` names. All of them name the same."""
        if version > self._said_under:
            due = newest + 1
            if newest > version == self._due:  # too late to say anything else
                due = version + (version - self._said_under)
            self._said_under, self._due = version, due
            await self._keep()
        elif version < self._said_under:  # of an earlier life
            return PolicyVersion(max(version + 1, self._said_under))
        return PolicyVersion(self._due)

    def choose(
        self,
        newest: PolicyVersion,
        lag: int,
        holds: Callable[[PolicyVersion], bool],
        is_short: Callable[[PolicyVersion, int], bool],
    ) -> PolicyVersion:
        """The policy to work under now. ``is_short``: whether fewer places than so many are
        begun under a policy, and another is asked for."""
        working, due = self._working, PolicyVersion(self._due)
        if working >= newest or not holds(working):
            return newest
        has_time = newest - working < max(1, lag)
        if has_time and is_short(working, self._aim(working, due if due > working else newest)):
            return working
        if self._said_under != working or newest - due > lag:
            return newest
        if due > newest:
            return working if has_time else newest
        return due if holds(due) else newest

    def _aim(self, working: PolicyVersion, next_one: PolicyVersion) -> int:
        """Places to fill before the next policy is taken up: fewer than usual by half of what
        the trainer allows, or whoever was fast once would be held to it for ever."""
        lasts = self._between(working, next_one)
        usual = usual_places(self._before, self._lasted, lasts)
        return usual - usual // (2 * FEWER)

    async def _keep(self) -> None:
        value = [self._working, self._before, self._lasted, self._said_under, self._due]
        await self._durable.insist(partial(keep, self._world.disk, self._path, value))
