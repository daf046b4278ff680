"""Following servers that speak shardcast 0.3.2: each version they list becomes one file here.

What comes this way is signed by no trainer. It is a file that some server listed, held to the
digest that most servers list for it, and never a policy of a run; `Shardcast` does not see it.

shardcast names one digest for the whole file and none for its shards, so a wrong shard shows
only at the end. Then the version is fetched once more from each server alone, and a server
whose own copy is wrong is avoided from then on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

import trio

from p2p.errors import BadMessage, ShoalError, StorageError, Unnameable
from p2p.shardcast.disk import LONGEST_RETRY
from p2p.shardcast.http.core.listing import (
    LISTING,
    MAX_LISTING,
    Listed,
    decode_listing_untrusted,
    shard_path,
)
from p2p.shardcast.http.library import Release, index_of_file
from p2p.shardcast.http.mirrors import Mirror, Mirrors, MirrorsFailed
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.wire import MIB
from p2p.world import World

logger = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Shards fetched at a time. shardcast's client takes ten; four fill a line whose round trip is
a twentieth of a shard's time, and a server that takes one connection at a time, as shardcast's
own origin does, keeps the others waiting anyway."""
MAX_FILE: Final = 256 * 1024 * MIB
"""Bytes of a followed version: what a policy may have."""
NOTHING: Final = "waits for a version: the servers list none yet"
POLL: Final = 2.0
"""Seconds between two looks at the listing. shardcast's middle nodes look every 30, which alone
costs them 15 s a version in the mean."""


class Follower:
    """Fetches the versions of some servers into one folder of this node's disk."""

    def __init__(self, world: World, mirrors: Mirrors, folder: str) -> None:
        self._world = world
        self._mirrors = mirrors
        self._folder = folder
        self.says = "waits for an answer"
        """How it gets on, for people."""
        self._came = 0

    async def listed(self) -> list[Listed]:
        """What the servers list, newest first. Where they contradict each other about a
        version, most of them are believed, then the one that was named first. Raises
        `MirrorsFailed` if none answers."""
        said: dict[PolicyVersion, Counter[Listed]] = {}
        answers = 0
        for mirror in self._mirrors.all:
            try:
                data = await self._mirrors.fetch(LISTING, MAX_LISTING, among=[mirror])
                entries = decode_listing_untrusted(data)
            except MirrorsFailed:
                continue
            except BadMessage as error:
                mirror.note_lie(str(error))
                continue
            answers += 1
            for entry in entries:
                said.setdefault(entry.version, Counter())[entry] += 1
        if not answers:
            troubles = "; ".join(f"{m.base}: {m.trouble}" for m in self._mirrors.all)
            raise MirrorsFailed(f"no server gives its {LISTING}: {troubles}")
        return [said[version].most_common(1)[0][0] for version in sorted(said, reverse=True)]

    async def fetch(self, entry: Listed) -> Release:
        """Get one version. Raises `MirrorsFailed`, `StorageError`."""
        one_by_one = [[mirror] for mirror in self._mirrors.all] if self._many else []
        for among in [list(self._mirrors.all), *one_by_one]:
            try:
                release = await self._fetch_from(entry, among)
            except (MirrorsFailed, BadMessage) as error:
                logger.info("follow_failed version=%d reason=%s", entry.version, error)
                continue
            if release is not None:
                return release
            logger.warning("follow_wrong_digest version=%d", entry.version)
            for mirror in among if len(among) == 1 else ():
                mirror.note_lie(f"its version {entry.version} has another digest")
        raise MirrorsFailed(f"no server gives a version {entry.version} of the listed digest")

    @property
    def _many(self) -> bool:
        return len(self._mirrors.all) > 1

    async def _fetch_from(self, entry: Listed, among: Sequence[Mirror]) -> Release | None:
        """The version, put together from ``among``; None if its digest is wrong."""
        disk, part = self._world.disk, f"{self._folder}/v{entry.version}.part"
        name = f"v{entry.version}.bin"
        # What a killed pull left may be longer than the version; a link may lead elsewhere.
        await disk.remove(part)
        try:
            size = await self._fetch_shards(entry, among, part)
            index, digest = await index_of_file(self._world, part)
            if digest != entry.digest:
                return None
            await disk.fsync(part)
            path = f"{self._folder}/{name}"
            await disk.rename(part, path)
        finally:
            with trio.CancelScope(shield=True):
                await disk.remove(part)
        return Release(entry.version, ((name, size),), entry.digest, index, b"", (path,))

    async def _fetch_shards(self, entry: Listed, among: Sequence[Mirror], part: str) -> int:
        """Write all shards where they belong; returns the bytes of the whole."""
        self._came = 0
        # All shards have the size of the first, but for the last.
        first = await self._fetch_shard(entry, 0, among, part, 0, MAX_FILE)
        if first * entry.shards > MAX_FILE:
            raise BadMessage(f"version {entry.version} has over {MAX_FILE} bytes")
        sizes = {0: first}
        waiting = iter(range(1, entry.shards))
        failures: list[ShoalError] = []

        async def take_turns() -> None:
            try:
                for shard in waiting:
                    sizes[shard] = await self._fetch_shard(
                        entry, shard, among, part, shard * first, first
                    )
            except ShoalError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(AT_ONCE, entry.shards - 1)):
                nursery.start_soon(take_turns)
        if failures:
            raise failures[0]
        if any(sizes[shard] != first for shard in range(entry.shards - 1)):
            raise BadMessage(f"the shards of version {entry.version} have different sizes")
        return sum(sizes.values())

    async def _fetch_shard(
        self,
        entry: Listed,
        shard: int,
        among: Sequence[Mirror],
        part: str,
        where: int,
        most: int,
    ) -> int:
        async def keep(offset: int, data: bytes) -> None:
            await self._world.disk.write(part, data, where + offset)
            self._came += len(data)
            self.says = f"version {entry.version}: {self._came / 1e6:,.1f} MB"

        path = shard_path(entry.version, shard)
        return await self._mirrors.fetch_to(path, most, keep, among=among)

    async def wait_newer(self, known: PolicyVersion = NO_POLICY) -> Release:
        """Fetch the newest version once it is newer than ``known``; those in between are passed
        over. What goes wrong meanwhile is said, and tried again. Raises `Unnameable`."""
        while True:
            try:
                newest = next(iter(await self.listed()), None)
                self.says = "waits for a newer version" if known != NO_POLICY else NOTHING
                if newest is not None and newest.version > known:
                    return await self.fetch(newest)
            except Unnameable:
                raise
            except (MirrorsFailed, StorageError) as error:
                self.says = f"waits: {error}"
                logger.info("follow_waits reason=%s", error)
                if isinstance(error, StorageError):  # what was fetched is fetched again
                    await self._world.sleep(LONGEST_RETRY)
            await self._world.sleep(POLL)
