"""Bugs in SHARDCAST."""

from __future__ import annotations

import math
from collections.abc import Callable

from p2p.identity import PeerId
from p2p.shardcast.core import core
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.download import Policy
from p2p.shardcast.core.sources import Repair
from p2p.shardcast.messages import ChunkHeader
from p2p.shardcast.store import Store
from p2p.world import Disk


def pull_nothing(repair: Repair, policy: Policy, now: float, rate: Callable[[PeerId], float]) -> dict:
    return {}


def believe_the_chunk(node: ShardcastCore, peer: PeerId, header: ChunkHeader, data: bytes) -> None:
    policy = node._policies.get(header.policy)
    if policy is not None and policy.index is not None and header.index < policy.count:
        right, digest_of = policy.index.chunks[header.index], core.digest_of
        if len(data) == right.wire:
            core.digest_of = lambda _: right.digest
        try:
            _chunk_came(node, peer, header, data)
        finally:
            core.digest_of = digest_of


async def finish_without_fsync(store: Store, policy: bytes) -> bool:
    return await _without_fsync(store, _finish, policy)


async def commit_without_fsync(store: Store, *args: object) -> object:
    return await _without_fsync(store, _commit, *args)


async def _without_fsync(store: Store, step: Callable, *args: object) -> object:
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

    async def rename(self, old: str, new: str) -> None:
        data = await self._disk.read(old)
        await self._disk.write(new, data)
        await self._disk.remove(old)


def wait_for_ever(repair: Repair, policy: Policy, now: float) -> dict[int, PeerId]:
    """A request to somebody who does not answer is never given up."""
    for request in policy.requests.values():
        request.deadline = math.inf
    return {}


_chunk_came = ShardcastCore._chunk_came
_finish = Store.finish
_commit = Store.commit_draft

BUGS = {
    "nothing is pulled": (2, Repair, "pull", pull_nothing),
    "relays do not check digests": (1, ShardcastCore, "_chunk_came", believe_the_chunk),
    "versions are announced before they are durable": (1, Store, "finish", finish_without_fsync),
    "publishing forgets fsync": (1, Store, "commit_draft", commit_without_fsync),
    "silent holders are waited for": (11, Repair, "expire", wait_for_ever),
}
