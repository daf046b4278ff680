"""Whether roles may begin work, as far as the node's owner wants: a pause, and hours.

Theory of operation
-------------------
``shoal pause`` is for a person who wants the machine for something else. The roles finish what
they have begun and begin nothing; the node stays in its swarm and relays, as before. Their
names leave its heartbeat, so that nobody counts on them. Outside the
hours of ``[share]`` the same holds.

A pause is a file in the node's folder, so it outlasts the process: a machine that restarts at
night does not begin to work behind its owner's back. The status says so as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2p.node.share import MINUTE, ShareConfig
from p2p.world import World

PAUSED: Final = "paused"
"""In the node's folder while it is paused."""
WHY_PAUSED: Final = "its owner has paused it; shoal resume lets it go on"


class Rest:
    """What the owner wants."""

    def __init__(self, world: World, share: ShareConfig, told: Callable[[], None]) -> None:
        """``told`` is called whenever `why_not` is another."""
        self._world = world
        self._share = share
        self._told = told
        self._is_paused = False
        self._is_open = share.is_open(world.wall())

    @property
    def why_not(self) -> str:
        """Why roles begin nothing, in words; empty if they may."""
        if self._is_paused:
            return WHY_PAUSED
        return "" if self._is_open else f"it works from {self._share.hours} only"

    async def load(self) -> None:
        """Take up a pause of an earlier life."""
        self._is_paused = await self._world.disk.size(PAUSED) is not None

    async def pause(self) -> None:
        """Begin nothing from now on. Raises `StorageError` if it could not be kept."""
        await self._world.disk.replace(PAUSED, b"")
        self._is_paused = True
        self._told()

    async def resume(self) -> None:
        """Go on. Raises `StorageError`."""
        await self._world.disk.remove(PAUSED)
        self._is_paused = False
        self._told()

    async def watch(self) -> None:
        """Look at the clock on the wall each minute, which may be set at any time. Works until
        cancelled."""
        while self._share.hours:
            is_open = self._share.is_open(self._world.wall())
            if is_open is not self._is_open:
                self._is_open = is_open
                self._told()
            await self._world.sleep_until(self._world.now() + MINUTE)
