"""Files in memory, of which a crash takes unsynced writes.

Theory of operation
-------------------
A file is a buffer and the undo log of everything since its last fsync; a crash plays the log
backwards. Names are kept twice: as they are now, and as a crash would leave them. `fsync` of a
file makes its content, its name and its neighbours' removals durable, as fsync of file and
folder do together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Final

import trio

from p2p.errors import StorageError
from p2p.world import DiskEntry

MAX_FILE: Final = 1 << 40
"""Bytes; a write beyond it is a bug, not a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskModel:
    """The speed and the size of a disk. The default is an ordinary SSD."""

    fsync: float = 0.001
    """Seconds that each fsync takes."""

    bytes_per_second: float = 1e9
    """Speed of reads and writes of at least `DiskModel.free_below` bytes."""

    free_below: int = 65_536
    """Smaller reads and writes come from the page cache and take no time."""

    capacity: int = MAX_FILE
    """Bytes; beyond it writes raise `StorageError`."""


@lru_cache(maxsize=64)
def _zeros(length: int) -> bytes:
    """Return zeros that all overwriters of reserved space share, so that undo logs do not copy
    a policy's size for each node."""
    return bytes(length)


class _File:
    """An inode: its bytes, and the undo log of a crash."""

    __slots__ = ("_undo", "data", "writes")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.writes = 0
        # What to put back: (offset, old bytes, old length), newest last; or the whole old
        # buffer.
        self._undo: list[tuple[int, bytes, int] | bytearray] = []

    def overwrite(self, offset: int, data: bytes | memoryview) -> None:
        self.writes += 1
        if offset > len(self.data):
            self._undo.append((len(self.data), b"", len(self.data)))
            self.data.extend(bytes(offset - len(self.data)))
        end = offset + len(data)
        old = bytes(self.data[offset:end])
        if old.count(0) == len(old):
            old = _zeros(len(old))
        self._undo.append((offset, old, len(self.data)))
        self.data[offset:end] = data

    def rewrite(self, data: bytes | memoryview) -> None:
        self.writes += 1
        self._undo.append(self.data)
        self.data = bytearray(data)

    def sync(self) -> None:
        self._undo.clear()

    def crash(self, torn: Random | None) -> None:
        """Lose unsynced writes; with ``torn``, keep a random part, oldest first, the last one
        torn."""
        keep = torn.randint(0, len(self._undo)) if torn is not None else 0
        for number in range(len(self._undo) - 1, keep - 1, -1):
            step = self._undo[number]
            if isinstance(step, bytearray):
                self.data = step
            else:
                offset, old, length = step
                self.data[offset : offset + len(old)] = old
                half = (
                    torn.randint(0, len(self.data) - length)
                    if torn is not None and number == keep
                    else 0
                )
                del self.data[length + half :]
        self._undo.clear()


class SimDisk:
    """The `Disk` of one node. It outlives the node's lives; `crash` takes what was not
    synced."""

    def __init__(self, node: str) -> None:
        self.model = DiskModel()
        self.used = 0
        """Bytes in all files together."""
        self.node = node
        self._files: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}

    def limit(self, capacity: int) -> None:
        """Let the disk be full at ``capacity`` bytes."""
        self.model = replace(self.model, capacity=capacity)

    def crash(self, torn: Random | None = None) -> None:
        """Lose everything unsynced; ``torn`` lets a random part of it survive."""
        survivors = dict(self._durable)
        files = [*self._files.values(), *survivors.values()]
        for file in files:
            file.crash(torn)
        self._files = survivors
        self._recount()

    def wipe(self) -> None:
        """Lose everything: a new, empty disk."""
        self._files, self._durable = {}, {}
        self.used = 0

    def corrupt(self, path: str, offset: int) -> None:
        """Flip one bit of a stored file, durably: what a decaying disk does."""
        data = self._files[path].data
        data[offset % len(data)] ^= 1

    def paths(self) -> list[str]:
        """Return every present file, synced or not, sorted."""
        return sorted(self._files)

    def _recount(self) -> None:
        self.used = sum(len(file.data) for file in self._files.values())

    def read_now(self, path: str, offset: int, length: int | None) -> bytes:
        """Return bytes of a file, at once."""
        file = self._files.get(path)
        if file is None:
            raise FileNotFoundError(f"{self.node}:{path}")
        end = None if length is None else offset + length
        return bytes(memoryview(file.data)[offset:end])

    def write_now(self, path: str, data: bytes | memoryview, offset: int | None) -> None:
        """Write or overwrite a file, without the disk's time."""
        file = self._files.get(path)
        old = len(file.data) if file is not None else 0
        new = len(data) if offset is None else max(old, offset + len(data))
        if self.used + new - old > self.model.capacity:
            raise StorageError(f"{self.node}: disk full writing {path}")
        if file is None:
            file = self._files[path] = _File(bytearray())
        if offset is None:
            file.rewrite(data)
        else:
            file.overwrite(offset, data)
        self.used += new - old

    def append_now(self, path: str, data: bytes) -> None:
        """Write at the end of a file, without the disk's time."""
        self.write_now(path, data, self.size_now(path) or 0)

    def reserve_now(self, path: str, size: int) -> None:
        """Extend a file with zeros to ``size`` bytes, without the disk's time."""
        here = self.size_now(path) or 0
        self.write_now(path, bytes(max(0, size - here)), here)

    def sync_now(self, path: str) -> None:
        """Make a file and its name durable, without the disk's time."""
        file = self._files.get(path)
        if file is not None:
            file.sync()
            self._durable[path] = file
            self._sync_removals(path.rpartition("/")[0])
            return
        inside = {
            name: file for name, file in self._files.items() if name.rpartition("/")[0] == path
        }
        if not inside and self.list_now(path) == []:
            raise FileNotFoundError(f"{self.node}:{path}")
        self._durable.update(inside)
        self._sync_removals(path)

    def _sync_removals(self, folder: str) -> None:
        gone = [name for name in self._durable if name not in self._files]
        for name in gone:
            if name.rpartition("/")[0] == folder:
                del self._durable[name]

    def replace_now(self, path: str, data: bytes | memoryview) -> None:
        """Write a file durably and atomically, without the disk's time."""
        old = self.size_now(path) or 0
        if self.used + len(data) - old > self.model.capacity:
            raise StorageError(f"{self.node}: disk full writing {path}")
        self._files[path] = self._durable[path] = _File(bytearray(data))
        self.used += len(data) - old
        self._sync_removals(path.rpartition("/")[0])

    def rename_now(self, old: str, new: str) -> None:
        """Rename a file or a folder durably, and take no simulated time. A file may replace
        another file; a folder must get a new name."""
        if old not in self._files:
            inside = [name for name in self._files if name.startswith(old + "/")]
            if not inside:
                raise FileNotFoundError(f"{self.node}:{old}")
            if any(name == new or name.startswith(new + "/") for name in self._files):
                raise StorageError(f"{self.node}: {new} is not empty")
            for name in inside:
                self.rename_now(name, new + name[len(old) :])
            return
        self.used -= self.size_now(new) or 0
        self._files[new] = self._durable[new] = self._files.pop(old)
        self._durable.pop(old, None)
        self._sync_removals(new.rpartition("/")[0])

    def remove_now(self, path: str) -> None:
        """Remove a file or folder, without the disk's time."""
        for name in [
            name for name in self._files if name == path or name.startswith(path + "/")
        ]:
            self.used -= len(self._files.pop(name).data)

    def list_now(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, without hidden ones, which begin with a dot."""
        prefix = folder.rstrip("/") + "/" if folder not in {"", "."} else ""
        inside = (name[len(prefix) :] for name in self._files if name.startswith(prefix))
        names = {name.partition("/")[0]: None for name in inside}
        return sorted(name for name in names if not name.startswith("."))

    def walk_now(self, path: str, most: int) -> Sequence[DiskEntry]:
        """Return the files at or below ``path``, without hidden ones."""
        file = self._files.get(path)
        if file is not None:
            return [DiskEntry("", len(file.data), file.writes)][:most]
        found = [
            DiskEntry(name[len(path) + 1 :], len(file.data), file.writes)
            for name, file in sorted(self._files.items())
            if name.startswith(path + "/") and "/." not in name[len(path) :]
        ]
        return found[:most]

    def size_now(self, path: str) -> int | None:
        """Return the number of bytes of a file, or None."""
        file = self._files.get(path)
        return len(file.data) if file is not None else None


class DiskHandle:
    """A life's access to a node's disk (a `Disk`): every call takes the disk's time."""

    def __init__(
        self,
        disk: SimDisk,
        sleep: Callable[[float], Awaitable[None]],
        alive: Callable[[], bool],
    ) -> None:
        self._disk = disk
        self._sleep = sleep
        self._alive = alive

    def _check(self, path: str) -> None:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is not inside the node's folder")

    async def _take(self, size: int, syncs: int = 0) -> None:
        model = self._disk.model
        seconds = syncs * model.fsync
        if size >= model.free_below:
            seconds += size / model.bytes_per_second
        if seconds > 0:
            await self._sleep(seconds)
        else:
            await trio.lowlevel.checkpoint()
        if not self._alive():
            # a killed process writes nothing more; it is being cancelled
            await trio.lowlevel.checkpoint()
            raise StorageError(f"{self._disk.node} is gone")  # and this leaves a shield

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file, fewer than ``length`` only at its end."""
        self._check(path)
        size = self._disk.size_now(path) or 0
        await self._take(size if length is None else min(length, size))
        return self._disk.read_now(path, offset, length)

    async def write(
        self, path: str, data: bytes | memoryview, offset: int | None = None
    ) -> None:
        """Replace the whole file, or, with ``offset``, overwrite from there."""
        self._check(path)
        await self._take(len(data))
        self._disk.write_now(path, data, offset)

    async def append(self, path: str, data: bytes) -> None:
        """Write at the end of the file."""
        self._check(path)
        await self._take(len(data))
        self._disk.append_now(path, data)

    async def free(self) -> int:
        """Return the number of free bytes."""
        await self._take(0)
        return max(0, self._disk.model.capacity - self._disk.used)

    async def reserve(self, path: str, size: int) -> None:
        """Make a file of that length, with room for all of it."""
        self._check(path)
        await self._take(0)
        self._disk.reserve_now(path, size)

    async def fsync(self, path: str) -> None:
        """Return once the file (and its name) would survive a crash."""
        self._check(path)
        await self._take(0, syncs=1)
        self._disk.sync_now(path)

    async def replace(self, path: str, data: bytes | memoryview) -> None:
        """Put ``data`` at ``path`` atomically and durably."""
        self._check(path)
        await self._take(len(data), syncs=2)
        self._disk.replace_now(path, data)

    async def rename(self, old: str, new: str) -> None:
        """Move a file over another, atomically and durably: others see it under its new name
        before this returns, as on a real disk."""
        self._check(old)
        self._check(new)
        await self._take(0)
        self._disk.rename_now(old, new)
        await self._take(0, syncs=1)

    async def remove(self, path: str) -> None:
        """Remove a file or a whole folder; nothing happens if it is not there."""
        self._check(path)
        await self._take(0)
        self._disk.remove_now(path)

    async def list(self, folder: str) -> list[str]:
        """Return the sorted names in ``folder``; none if it is not there."""
        self._check(folder)
        await self._take(0)
        return self._disk.list_now(folder)

    async def walk(self, path: str, most: int) -> Sequence[DiskEntry]:
        """Return the files at or below ``path``."""
        self._check(path)
        await self._take(0)
        return self._disk.walk_now(path, most)

    async def size(self, path: str) -> int | None:
        """Return the number of bytes of a file, or None if it is not there."""
        self._check(path)
        await self._take(0)
        return self._disk.size_now(path)

    def holding(self, path: str) -> AbstractContextManager[None]:
        """Return a lock that does nothing: a simulated node has one process."""
        self._check(path)
        return nullcontext()

    def locate(self, path: str) -> str:
        """Return a path for messages only: no other process can open a simulated file."""
        return f"/simulated/{self._disk.node}/{path}"
