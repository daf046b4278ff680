"""Content that is too large for the pipe: records in files of a scratch folder.

Tokens, log-probs and proofs grow with the recipe: a step of 256 groups of 16 answers of 10,000
tokens has 330 MB of them. What crosses the pipe is a `RecordFile`: where the file is, and how
long each of its records is. The worker maps the file and decodes a record when it is asked for
it, and the node reads one after the other, so neither holds a whole file beside the values.

A file lives as long as one call. Nothing is synced, and what a node that was killed leaves
behind is removed when its folder is opened again.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

from p2p.errors import StorageError
from p2p.world import World

T = TypeVar("T")


class RecordFile(NamedTuple):
    """Stands for records on the pipe. It arrives as a list: ``RecordFile(*it)``."""

    path: str
    """As the operating system names it."""
    sizes: Sequence[int]
    """Bytes of each record, in order."""


def write_records(path: str, records: Iterable[bytes]) -> RecordFile:
    """Put records into a new file. Raises `StorageError`, also if something is there: a link
    would lead the node to any file of its user."""
    sizes = []
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            for record in records:
                file.write(record)
                sizes.append(len(record))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
    return RecordFile(path, sizes)


class MappedRecords(Sequence[T], Generic[T]):
    """The values of a file's records, each decoded whenever it is asked for and not kept: of a
    step of 330 MB a learner holds the minibatch that it works on."""

    def __init__(self, file: RecordFile, decode: Callable[[bytes], T]) -> None:
        """Map the file. Raises `StorageError` if its length has changed."""
        self._file, self._decode = file, decode
        self._ends = [0, *itertools.accumulate(file.sizes)]
        self._data: bytes | mmap.mmap = b""
        try:
            if self._ends[-1]:
                with open(file.path, "rb") as opened:
                    self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # gone, or empty
            raise StorageError(f"{file.path} cannot be read: {error}") from error
        if len(self._data) != self._ends[-1]:
            raise StorageError(
                f"{file.path} has {len(self._data)} bytes, and {self._ends[-1]} were written"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the file, which the other process maps."""
        return MappedRecords, (self._file, self._decode)

    def __len__(self) -> int:
        return len(self._file.sizes)

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> list[T]: ...

    def __getitem__(self, at: int | slice) -> T | list[T]:
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._decode(self._data[self._ends[numbers] : self._ends[numbers + 1]])


class Scratch:
    """A folder of the node's disk with the files between the node and one worker."""

    def __init__(self, world: World, folder: str) -> None:
        self._world, self._folder = world, folder
        self._numbers = itertools.count()

    async def clear(self) -> None:
        """Remove files of calls that were cut off, in this life or an earlier one. Raises
        `StorageError`."""
        await self._world.disk.remove(self._folder)

    @asynccontextmanager
    async def files(
        self, *contents: Iterable[bytes]
    ) -> AsyncIterator[tuple[str, list[RecordFile]]]:
        """Write each of ``contents`` to a file for the length of the block, which is one call.

        Yields the path of a further file, which is not there yet, for what the worker answers.
        It is removed with the others. Raises `StorageError`.
        """
        paths = [f"{self._folder}/{next(self._numbers)}" for _ in (None, *contents)]
        answer, *located = map(self._world.disk.locate, paths)
        try:
            yield (
                answer,
                [
                    await self._world.run_blocking(write_records, path, records, cost=0.0)
                    for path, records in zip(located, contents, strict=True)
                ],
            )
        finally:
            for path in (answer, *located):
                _remove(path)

    async def read(self, file: Sequence[Any], decode: Callable[[bytes], T]) -> list[T]:
        """Return the values of a file that the worker has written. Raises `StorageError`."""
        found = RecordFile(*file)
        if os.path.dirname(found.path) != self._world.disk.locate(self._folder):
            raise StorageError(f"{found.path} is no file of this worker")
        return await self._world.run_blocking(_decoded, found, decode, cost=0.0)


def _decoded(file: RecordFile, decode: Callable[[bytes], T]) -> list[T]:
    return [decode(record) for record in _records(file)]


def _records(file: RecordFile) -> Iterator[bytes]:
    """Read a file that a worker has written. The worker may have put a pipe or a link there, or
    cut the file off meanwhile, which would end a process that maps it. Raises `StorageError`.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            found, written = os.fstat(descriptor), sum(file.sizes)
            if not stat.S_ISREG(found.st_mode) or found.st_size != written:
                raise ValueError(f"it has {found.st_size} bytes, and {written} were written")
            for size in file.sizes:
                record = opened.read(size)
                if len(record) != size:
                    raise ValueError("it was cut off")
                yield record
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{file.path} cannot be read: {error}") from error


def _remove(path: str) -> None:
    with suppress(OSError):  # what the disk keeps goes with the folder
        Path(path).unlink()
