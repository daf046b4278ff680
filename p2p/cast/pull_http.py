"""``shoal pull http://...``: take the versions that servers of shardcast 0.3.2, or ours, list.

What comes this way is signed by no publisher: it is a file that half of the servers list, held
to their digest. shardcast names one digest for the whole file and none for
its shards, so a wrong shard shows only at the end. Then the version is fetched once more from
each server alone.

aiohttp does the talking, on an asyncio loop that trio-asyncio runs inside trio. Its import
takes a third of a second: import this module where it is used.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import trio
import trio_asyncio

from p2p.cast.commandline import OUT, STATE, execute, pass_on, serving, telling_changes
from p2p.cast.view import Teller
from p2p.errors import BadMessage, ConfigError, ShoalError, StorageError, Unnameable
from p2p.machine import open_world
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import SOON
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.shardcast.http.core.answers import (
    LISTING,
    MAX_LISTING,
    Listed,
    decode_listing_untrusted,
    shard_path,
)
from p2p.shardcast.http.library import PIECE, Release, Shelf, index_of_file
from p2p.shardcast.index import MAX_SIZE
from p2p.shardcast.store import Cores
from p2p.wire import KI
from p2p.world import World

logger = logging.getLogger(__name__)


class OriginsFailed(ShoalError):
    """No server gave the version. The message has each server's answer."""


class Origins:
    """Servers that list the same versions, and a folder of this machine to fetch them into.

    The operator chose them; they are not believed. A server that failed is asked last until it
    answers again.
    """

    def __init__(
        self, world: World, bases: Sequence[str], session: Any, folder: str, silence: float
    ) -> None:
        self.says = "waits for an answer"
        """Progress, for people."""
        self._world = world
        self._bases = bases
        self._session = session
        self._folder = folder
        self._silence = silence
        self._failures: Counter[str] = Counter()
        self._came = 0

    async def listed(self) -> list[Listed]:
        """Return the listed versions, newest first. An entry counts if half of the servers that
        answer list it; of two for one version, the more frequent. Raises `OriginsFailed` if no
        server answers."""
        said: Counter[Listed] = Counter()
        troubles: list[str] = []
        for base in self._bases:
            data = bytearray()

            async def keep(_: int, piece: bytes, to: bytearray = data) -> None:
                to += piece

            try:
                await self._get(base, LISTING, MAX_LISTING, keep)
                entries = decode_listing_untrusted(bytes(data))
            except (OriginsFailed, BadMessage) as error:
                troubles.append(str(error))
                continue
            said.update(set(entries))
        answered = len(self._bases) - len(troubles)
        if not answered:
            raise OriginsFailed(f"no server gives its {LISTING}: {'; '.join(troubles)}")
        best: dict[PolicyVersion, Listed] = {}
        for entry, count in said.most_common():
            if 2 * count >= answered:
                best.setdefault(entry.version, entry)
        return [best[version] for version in sorted(best, reverse=True)]

    async def wait_newer(self, known: PolicyVersion = NO_POLICY) -> Release:
        """Fetch the newest version once it is newer than ``known``; versions in between are
        skipped. Errors are reported and retried. Raises `Unnameable`."""
        while True:
            try:
                newest = next(iter(await self.listed()), None)
                self.says = "waits for a newer version"
                if known == NO_POLICY:
                    self.says = "waits for a version: the servers list none yet"
                if newest is not None and newest.version > known:
                    return await self.fetch(newest)
            except Unnameable:
                raise
            except (OriginsFailed, StorageError) as error:
                self.says = f"waits: {error}"
                logger.info("follow_waits reason=%s", error)
                if isinstance(error, StorageError):  # what was fetched is fetched again
                    await self._world.sleep(30.0)
            await self._world.sleep(2.0)

    async def fetch(self, entry: Listed) -> Release:
        """Fetch one version: from all servers, then from each alone. Raises `OriginsFailed`,
        `StorageError`."""
        disk, part = self._world.disk, f"{self._folder}/v{entry.version}.part"
        name = f"v{entry.version}.bin"
        path, troubles = f"{self._folder}/{name}", []
        alone = [[base] for base in self._bases] if len(self._bases) > 1 else []
        for bases in [list(self._bases), *alone]:
            # What a killed pull left may be longer than the version; a link may lead elsewhere.
            await disk.remove(part)
            try:
                size = await self._fetch_shards(entry, bases, part)
                index, digest = await index_of_file(self._world, part)
                if digest == entry.digest:
                    await disk.fsync(part)
                    await disk.rename(part, path)
                    files = ((name, size),)
                    return Release(entry.version, files, entry.digest, index, b"", (path,))
                troubles.append(f"{', '.join(bases)}: another digest")
                logger.warning("follow_wrong_digest version=%d", entry.version)
            except (OriginsFailed, BadMessage) as error:
                troubles.append(str(error))
                logger.info("follow_failed version=%d reason=%s", entry.version, error)
            finally:
                with trio.CancelScope(shield=True):
                    await disk.remove(part)
        raise OriginsFailed(
            f"no server gives version {entry.version} as listed: {'; '.join(troubles)}"
        )

    async def _fetch_shards(self, entry: Listed, bases: Sequence[str], part: str) -> int:
        """Write all shards where they belong; return the bytes of the whole."""
        self._came = 0
        # All shards have the size of the first, but for the last.
        first = await self._fetch_shard(entry, 0, bases, part, 0, MAX_SIZE)
        if first * entry.shards > MAX_SIZE:
            raise BadMessage(f"version {entry.version} has over {MAX_SIZE} bytes")
        sizes = {0: first}

        async def fetch(shard: int) -> None:
            sizes[shard] = await self._fetch_shard(
                entry, shard, bases, part, shard * first, first
            )

        # Four at a time fill a line of 20 round trips a shard.
        await Cores(self._world).for_each(range(1, entry.shards), fetch, 4)
        if any(sizes[shard] != first for shard in range(entry.shards - 1)):
            raise BadMessage(f"the shards of version {entry.version} have different sizes")
        return sum(sizes.values())

    async def _fetch_shard(
        self, entry: Listed, shard: int, bases: Sequence[str], part: str, where: int, most: int
    ) -> int:
        """Ask the servers in turn. Each shard starts with another server, and servers that
        failed lately come last."""

        async def keep(offset: int, data: bytes) -> None:
            await self._world.disk.write(part, data, where + offset)
            self._came += len(data)
            self.says = f"version {entry.version}: {self._came / 1e6:,.1f} MB"

        turn = shard % len(bases)
        troubles: list[str] = []
        for base in sorted([*bases[turn:], *bases[:turn]], key=lambda one: self._failures[one]):
            try:
                return await self._get(base, shard_path(entry.version, shard), most, keep)
            except OriginsFailed as error:
                troubles.append(str(error))
        raise OriginsFailed("; ".join(troubles))

    async def _get(
        self, base: str, path: str, most: int, keep: Callable[[int, bytes], Awaitable[None]]
    ) -> int:
        """Download ``path`` from ``base``, passing the data to ``keep(offset, data)``. Return
        the number of bytes. Raises `OriginsFailed`."""
        begun, count = self._world.now(), 0
        try:
            get = trio_asyncio.aio_as_trio(self._session.get)
            response = await get(f"{base.rstrip('/')}/{path}", max_redirects=3)
            try:
                if response.status != 200:
                    raise BadMessage(f"status {response.status}")
                if (response.content_length or 0) > most:
                    raise BadMessage(f"{response.content_length} bytes are more than {most}")
                read = trio_asyncio.aio_as_trio(response.content.read)
                while data := await read(PIECE):
                    passed = self._world.now() - begun
                    if count + len(data) > most:
                        raise BadMessage(f"more than {most} bytes")
                    # One that sends a byte now and then is never silent.
                    if passed > self._silence and count + len(data) < 16 * KI * passed:
                        raise BadMessage(f"{count} bytes in {passed:.0f} s: it drips")
                    await keep(count, data)
                    count += len(data)
            finally:
                response.close()  # the connection is kept if the body was read to its end
        except (aiohttp.ClientError, TimeoutError, BadMessage, ValueError) as error:
            self._failures[base] += 1
            raise OriginsFailed(f"{base}: {type(error).__name__}: {error}"[:200]) from None
        self._failures[base] = 0
        return count


@asynccontextmanager
async def open_origins(
    world: World, bases: Sequence[str], folder: str, *, silence: float = 30.0
) -> AsyncIterator[Origins]:
    """Open servers to fetch from into ``folder``, for the length of the block. After
    ``silence`` seconds without a byte another server is asked. Raises `ConfigError` if one of
    ``bases`` is no address."""
    for base in bases:
        parts = None
        with suppress(ValueError):
            parts = urlsplit(base)
        if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"{base!r} is no http:// or https:// address")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence)
    async with trio_asyncio.open_loop():
        session = aiohttp.ClientSession(
            timeout=timeout,
            auto_decompress=False,  # digests are of what is stored; and no bombs
            headers={"Accept-Encoding": "identity"},
        )
        try:
            yield Origins(world, bases, session, folder, silence)
        finally:
            with trio.CancelScope(shield=True):
                await trio_asyncio.aio_as_trio(session.close)()


async def pull_http(options: argparse.Namespace, out: Path) -> int:
    """Put each newest version into ``out``; with ``--http``, offer them as well."""
    state, teller = out / STATE, Teller("pull", as_json=options.json)
    shelf, known = Shelf(), NO_POLICY
    with locked_folder(state, "shoal pull", OUT):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ending = await enter(until_told_to_end(is_done=False))
            world = await enter(open_world(state, mounts={"out": out}))
            origins = await enter(open_origins(world, options.ticket.split(","), "out"))
            changes = telling_changes("run pull again", teller)
            await enter(serving(world, shelf, options.http, teller, changes))
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_tell, world, origins, teller)
                    release = await origins.wait_newer(known)
                    nursery.cancel_scope.cancel()
                shelf.add(release)
                known, ending.is_done = release.version, True
                [(name, size)] = release.files
                teller.event(
                    "whole", f"whole    {out / name}, version {known}, {size / 1e6:,.1f} MB"
                    " (no trainer signed it)",
                    version=known, path=str(out / name), bytes=size,
                )  # fmt: skip
                if options.command:
                    await execute(options.command, known, out / name, teller)
                if not options.follow:
                    break
            if options.http is not None:
                await pass_on(world, options.seed, teller)
    if ending.signal:
        said = f"version {known} is here" if known != NO_POLICY else "nothing is here yet"
        teller.event("ended", f"ended    {said}; the same command line begins with the newest")
    return ending.code


async def _tell(world: World, origins: Origins, teller: Teller) -> None:
    """Report progress and the reason for waiting, whenever one of them changes."""
    said, due = "", world.now()
    while True:
        due += SOON
        await world.sleep_until(due)
        if origins.says != said:
            said = origins.says
            teller.event("progress", said, waits_for=said)
