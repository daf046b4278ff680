"""How a trainer makes a patch: from two versions on its disk to files that none names yet.

Runs are coded on all cores, a few at a time, and written as they are done: neither version is
ever in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2p.shardcast.index import Index
from p2p.shardcast.patch import (
    ENCODE_RUN_RATE,
    SpanRun,
    encode_run,
    encode_table,
    is_alike,
    runs_of,
)
from p2p.shardcast.store import Cores
from p2p.shardcast.stored import StoredPolicy
from p2p.world import Disk, World

WORTH: Final = 0.8
"""The largest patch worth offering, as a fraction of the anchor: patches cost their receivers
more work, and room on their disks."""


class Patcher:
    """Writes patches."""

    def __init__(self, world: World, cores: Cores) -> None:
        self._world = world
        self._cores = cores

    async def write(
        self,
        base: StoredPolicy,
        index: Index,
        root: str,
        draft: str,
        *,
        most: int,
    ) -> int | None:
        """Write the patch from ``base`` to the policy of ``index``, which is at ``root``, at
        ``draft``; gives its bytes. None if there can be none, or it would have over ``most``.
        """
        if not is_alike(base.index, index):
            return None
        disk, runs = self._world.disk, runs_of(index)
        wires: list[int] = []
        work = _RunWork(disk, self._cores, base, index, root)
        step = 2 * self._world.cores
        for first in range(0, len(runs), step):
            some = runs[first : first + step]
            await self._cores.for_each(some, work.do)
            deltas = work.take(some)
            wires += map(len, deltas or ())
            if deltas is None or sum(wires) > most:
                await disk.remove(draft)
                return None
            await disk.append(draft, b"".join(deltas))
        table = encode_table(base.index, index, runs, wires)
        if sum(wires) + len(table) > most:
            await disk.remove(draft)
            return None
        await disk.append(draft, table)
        return sum(wires) + len(table)


class _RunWork:
    """Codes runs of a patch; on all cores, so in any order."""

    def __init__(
        self,
        disk: Disk,
        cores: Cores,
        base: StoredPolicy,
        index: Index,
        root: str,
    ) -> None:
        self._disk = disk
        self._cores = cores
        self._base = base
        self._index = index
        self._root = root
        self._deltas: dict[int, bytes | None] = {}

    async def do(self, run: SpanRun) -> None:
        """Encode one run."""
        place = self._index.place(run.first)
        path = self._index.files[place.file].path
        paths = (
            self._base.file(place.file),
            f"{self._root}/{path}" if path else self._root,
        )
        try:
            old, new = [await self._disk.read(p, place.offset, run.size) for p in paths]
        except FileNotFoundError:
            old = new = b""
        spans = self._base.index.spans[run.first : run.end]
        cost = run.size / ENCODE_RUN_RATE
        self._deltas[run.first] = await self._cores.run(
            encode_run, run, spans, old, new, cost=cost
        )

    def take(self, runs: Sequence[SpanRun]) -> list[bytes] | None:
        """The deltas of these runs, in order; None if one could not be made."""
        made = [self._deltas.pop(run.first) for run in runs]
        deltas = [one for one in made if one is not None]
        return deltas if len(deltas) == len(runs) else None
