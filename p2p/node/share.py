"""``[share]``: how much of a machine its owner lends, and when.

Whether roles may begin work, as far as the node's owner wants: a pause, and hours.

``shoal pause`` is for a person who wants the machine for something else. The roles finish what
they have begun and begin nothing; the node stays in its swarm and relays, as before. Their
names leave its heartbeat, so that nobody counts on them. Outside the
hours of ``[share]`` the same holds.

A pause is a file in the node's folder, so it outlasts the process: a machine that restarts at
night does not begin to work behind its owner's back. The status says so as long as it lasts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from p2p.shardcast import ShardcastConfig
from p2p.wire import KI
from p2p.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareConfig:
    """Limits on the node's use of its machine; none by default."""

    upload: float = 0.0
    """Maximum upload of policies in bytes per second, to all peers together; 0 for no limit."""

    download: float = 0.0
    """Maximum download of policies in bytes per second; 0 for no limit."""

    disk: int = 0
    """Maximum bytes of policies on disk, if that is less than ``keep_bytes`` in
    ``[shardcast]``; 0 for no limit of its own."""

    hours: str = ""
    """Hours in which roles work, in this machine's local time, such as ``20:00-07:00``; empty
    for always."""

    def __post_init__(self) -> None:
        for name, rate in (("upload", self.upload), ("download", self.download)):
            # At a lower rate a chunk of 4 MiB takes more than four minutes, and peers give it
            # up. No machine's line carries a TiB, and heartbeats have whole numbers.
            if rate and not 16 * KI <= rate <= 1024.0**4:
                raise ValueError(
                    f"{name} is at least {16 * KI} bytes per second and at most a TiB, or 0"
                    " for no limit"
                )
        if self.disk < 0:
            raise ValueError("disk is a number of bytes, or 0")
        if self.hours and _minutes(self.hours) is None:
            raise ValueError(f"hours are such as 20:00-07:00, not {self.hours!r}")

    def limited(self, config: ShardcastConfig) -> ShardcastConfig:
        """Return ``config`` with these limits applied."""
        keep = min(config.keep_bytes, self.disk) if self.disk else config.keep_bytes
        return replace(
            config, keep_bytes=keep, upload_rate=self.upload, download_rate=self.download
        )

    def is_open(self, wall: float) -> bool:
        """Return True if ``wall`` is within the hours."""
        begin_end = _minutes(self.hours)
        if begin_end is None:
            return True
        begin, end = begin_end
        local = datetime.fromtimestamp(wall, UTC).astimezone()
        day = 24 * 60
        return (60 * local.hour + local.minute - begin) % day < (end - begin) % day


def _minutes(hours: str) -> tuple[int, int] | None:
    """Return begin and end as minutes of the day; None if ``hours`` is empty, malformed or of
    no length."""
    time = r"([01]\d|2[0-3]):([0-5]\d)"
    found = re.fullmatch(f"{time}-{time}", hours)
    if found is None or found[1] + found[2] == found[3] + found[4]:
        return None
    first, second, third, fourth = map(int, found.groups())
    return 60 * first + second, 60 * third + fourth


PAUSED: Final = "paused"
"""File in the folder of a paused node."""


class Rest:
    """Tells whether the owner wants the node to rest."""

    def __init__(self, world: World, share: ShareConfig, told: Callable[[], None]) -> None:
        """Prepare the state. ``told`` is called whenever `why_not` changes."""
        self._world = world
        self._share = share
        self._told = told
        self._is_paused = False
        self._is_open = share.is_open(world.wall())

    @property
    def why_not(self) -> str:
        """Reason why roles may begin no work; empty if they may."""
        if self._is_paused:
            return "its owner has paused it; shoal resume lets it go on"
        return "" if self._is_open else f"it works from {self._share.hours} only"

    async def load(self) -> None:
        """Load a pause from disk."""
        self._is_paused = await self._world.disk.size(PAUSED) is not None

    async def pause(self) -> None:
        """Let roles begin no work from now on.

        Raises:
            StorageError: The pause could not be kept on disk.
        """
        await self._world.disk.replace(PAUSED, b"")
        self._is_paused = True
        self._told()

    async def resume(self) -> None:
        """End the pause.

        Raises:
            StorageError: The pause could not be removed from disk.
        """
        await self._world.disk.remove(PAUSED)
        self._is_paused = False
        self._told()

    async def watch(self) -> None:
        """Compare the wall clock, which may be set at any time, with the hours each minute,
        until cancelled."""
        while self._share.hours:
            is_open = self._share.is_open(self._world.wall())
            if is_open is not self._is_open:
                self._is_open = is_open
                self._told()
            await self._world.sleep_until(self._world.now() + 60.0)
