"""Bugs in SHARDCAST."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from p2p.shardcast.bulk import Receiver
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.repair import Repair
from p2p.shardcast.index import Span
from p2p.shardcast.store import PolicyStore
from p2p.world import Disk
from tests.simulation.storms.policies import CHUNK_BYTES


def pull_nothing(repair: Repair, download: Download, now: float) -> dict:
    return {}


async def believe_the_chunk(receiver: Receiver, span: Span, data: bytes) -> object:
    return await _unpack(receiver, span, data) or bytes(CHUNK_BYTES)


async def finish_without_fsync(store: PolicyStore, policy: bytes) -> bool:
    return await _without_fsync(store, _finish, policy)


async def commit_without_fsync(store: PolicyStore, *args: object, **options: object) -> object:
    return await _without_fsync(store, partial(_commit, **options), *args)


async def _without_fsync(store: PolicyStore, step: Callable, *args: object) -> object:
    disk = store._disk
    store._disk = _Forgetful(disk)
    try:
        return await step(store, *args)
    finally:
        store._disk = disk


class _Forgetful:
    """A disk whose owner forgets to fsync."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    async def fsync(self, path: str) -> None:
        pass

    async def replace(self, path: str, data: bytes) -> None:
        await self._disk.write(path, data)

    async def rename(self, old: str, new: str) -> None:
        data = await self._disk.read(old)
        await self._disk.write(new, data)
        await self._disk.remove(old)


def wait_for_ever(repair: Repair, download: Download, now: float) -> tuple[()]:
    """A request to a peer that does not answer is never given up."""
    for request in download.requests.values():
        request.deadline = math.inf
    return ()


_unpack = Receiver._unpack
_finish = PolicyStore.finish
_commit = PolicyStore.commit_own

BUGS = {
    "nothing is pulled": (2, Repair, "_plan", pull_nothing),
    "relays do not check digests": (8, Receiver, "_unpack", believe_the_chunk),
    "versions are announced before they are durable": (
        1,
        PolicyStore,
        "finish",
        finish_without_fsync,
    ),
    "publishing forgets fsync": (1, PolicyStore, "commit_own", commit_without_fsync),
    "silent holders are waited for": (3, Repair, "expire", wait_for_ever),
}
