"""The worker's side of `roles.engines.content`: it maps files, and writes others."""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from blake3 import blake3

from p2p.errors import StorageError
from roles.engines.content import ContentFile, RecordBlocks
from roles.shared.checked_json import DamagedFile

T = TypeVar("T")


class MappedContent(Sequence[T], Generic[T]):
    """The values of a file's records, each decoded whenever it is asked for and not kept: of a
    step of 330 MB a learner holds the minibatch that it works on."""

    def __init__(
        self,
        data: bytes | mmap.mmap,
        file: ContentFile,
        decode: Callable[[bytes], T],
    ) -> None:
        self._data = data
        self._file = file
        self._ends = [0, *itertools.accumulate(file.sizes)]
        self._decode = decode

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process of the same engine, which maps the file that this one checked."""
        return _mapped_again, (self._file, self._decode)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> list[T]: ...

    def __getitem__(self, at: int | slice) -> T | list[T]:
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._decode(self._data[self._ends[numbers] : self._ends[numbers + 1]])


@contextmanager
def open_content(
    file: ContentFile, decode: Callable[[bytes], T], most: int
) -> Iterator[MappedContent[T]]:
    """The values of a file, mapped for the length of the block.

    Raises `DamagedFile` if it is not what was written, and `EngineError` beyond ``most`` bytes.
    """
    file.check_size(most)
    if not file.size:
        yield MappedContent(b"", file, decode)
        return
    with _mapped(file) as data:
        file.check(len(data), blake3(data).digest())
        yield MappedContent(data, file, decode)


def _mapped(file: ContentFile) -> mmap.mmap:
    try:
        with open(file.path, "rb", opener=_open_at_once) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise DamagedFile(f"{file.path} cannot be read: it is no file")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:  # gone, or empty
        raise DamagedFile(f"{file.path} cannot be read: {error}") from error


def _mapped_again(file: ContentFile, decode: Callable[[bytes], T]) -> MappedContent[T]:
    return MappedContent(_mapped(file) if file.size else b"", file, decode)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe in the place of a file would be waited for until another process writes."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_content(path: str, records: Iterable[bytes], most: int) -> ContentFile:
    """Put them into a new file. Raises `StorageError`, and `EngineError` beyond ``most``
    bytes."""
    writing = RecordBlocks(path, most)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for _, block in writing.blocks(records):
                file.write(block)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
    return writing.file
