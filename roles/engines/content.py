"""Content on its way between a node and its engine: by file, never through the pipe.

Theory of operation
-------------------
Tokens, log-probs and proofs grow with the recipe: a step of 256 groups of 16 answers of 10,000
tokens has 330 MB of them. So they are written to a file of the node's own folder, and what
crosses the pipe is a `ContentFile`: where the file is, how long each of its records is, and the
digest of all. A record is one task, group or answer (`roles.engines.codec`); the file is
nothing but records, one after the other. Who reads it has the digest before it reads: a file
that was cut off, changed or put there by another program is refused with a sentence, and what
is refused is written again (`roles.shared.durable`).

The node writes and reads a block at a time, the worker maps the file and decodes one record
when it is asked for it (`roles.engines.mapped`): neither ever holds a whole file beside the
values. Nothing is synced: a file lives as long as one call, and what a node that was killed
leaves behind is removed when the engine is opened again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from blake3 import blake3

from p2p.errors import StorageError
from p2p.wire import KI, MIB
from p2p.world import Disk
from roles.engines.base import EngineError
from roles.shared.checked_json import DamagedFile

T = TypeVar("T")

logger = logging.getLogger(__name__)

BLOCK: Final = 4 * MIB
"""Bytes that are written or read in one call to the disk: one millisecond of a disk, and enough
that a thousand records of a few bytes take one call."""

_RECORD: Final = KI
"""Bytes of a record beside its columns: the group's number, a scorer's evidence (eleven numbers
of nine bytes and a reason), and the heads of msgpack."""
_COMPLETION: Final = 64
"""Bytes of a completion beside its columns: its seed of 32, its reward of 9, four heads of at
most five."""
NUMBER_BYTES: Final = 4
"""Of a token, and of a log-prob."""
_ROWS_PER_CHUNK: Final = 32
"""Tokens of one chunk of an activation proof (`proofs.toploc`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentLimit:
    """How large the files of a run may be: arithmetic over its sampling."""

    completions: int
    """Per group."""
    tokens: int
    """Per completion, at most."""
    context: int
    """Tokens of the longest prompt."""
    proof_values: int
    """Of each chunk of a proof; 0 where proofs stay behind."""

    def of(self, records: int) -> int:
        """Bytes of the largest file of so many records. Example: 256 groups of 16 answers of
        10,000 tokens come to 490 MB with proofs, and to 330 without, as a step."""
        chunks = -(-self.tokens // _ROWS_PER_CHUNK) if self.proof_values else 0
        proof = chunks * (2 + 2 * self.proof_values)
        completion = _COMPLETION + 2 * NUMBER_BYTES * self.tokens + proof
        return records * (_RECORD + NUMBER_BYTES * self.context + self.completions * completion)


@dataclass(frozen=True, slots=True)
class ContentFile:
    """What crosses the pipe in place of a file."""

    path: str
    """As the operating system names it."""
    sizes: tuple[int, ...]
    """Bytes of each record, in order."""
    digest: bytes
    """blake3 of the file."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(self.sizes)

    def to_wire(self) -> list[object]:
        """As plain values."""
        return [self.path, list(self.sizes), self.digest]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Self:
        """What `to_wire` made."""
        path, sizes, digest = value
        return cls(path, tuple(sizes), digest)

    def check_size(self, most: int) -> None:
        """Raise `EngineError` if the run has no file this long."""
        if self.size > most:
            raise EngineError(
                f"{self.path} has {self.size} bytes of content, and the run allows"
                f" {most}: its groups are not those of the run"
            )

    def check(self, size: int, digest: bytes) -> None:
        """Raise `DamagedFile` unless that is what was found."""
        if (size, digest) != (self.size, self.digest):
            raise DamagedFile(
                f"{self.path} is not what was written there: it has {size} bytes, and"
                f" {self.size} were written; is another program at work in this folder, or the"
                " disk damaged?"
            )


class RecordBlocks:
    """Records on their way into a file: blocks of at least `BLOCK` bytes, and what they come
    to."""

    def __init__(self, path: str, most: int) -> None:
        self._path, self._most = path, most
        self._sizes: list[int] = []
        self._size = 0
        self._hash = blake3()

    def blocks(self, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Each block with its place in the file. Raises `EngineError` if they exceed the
        limit."""
        block, start = bytearray(), 0
        for record in records:
            self._sizes.append(len(record))
            self._size += len(record)
            if self._size > self._most:
                self.file.check_size(self._most)
            block += record
            if len(block) >= BLOCK:
                yield start, self._hashed(block)
                block, start = bytearray(), self._size
        if block or not start:  # an empty file is a file
            yield start, self._hashed(block)

    def _hashed(self, block: bytearray) -> bytes:
        data = bytes(block)
        self._hash.update(data)
        return data

    @property
    def file(self) -> ContentFile:
        """Once every block is written."""
        return ContentFile(self._path, tuple(self._sizes), self._hash.digest())


class ContentFolder:
    """The files that go between a node and one of its engines."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._numbers = itertools.count()

    async def clear(self) -> None:
        """Remove what is there: of calls that were cut off, in this life or an earlier one.
        Raises `StorageError`."""
        await self._disk.remove(self._folder)

    def new(self) -> str:
        """A path at which there is no file."""
        return f"{self._folder}/{next(self._numbers)}"

    def locate(self, path: str) -> str:
        """As the worker would open it."""
        return self._disk.locate(path)

    async def write(self, path: str, records: Iterable[bytes], most: int) -> ContentFile:
        """Put them there. Raises `StorageError`, and `EngineError` beyond ``most`` bytes."""
        writing = RecordBlocks(self.locate(path), most)
        for start, block in writing.blocks(records):
            await self._disk.write(path, block, start)
        return writing.file

    async def read(
        self, path: str, file: ContentFile, decode: Callable[[bytes], T], most: int
    ) -> list[T]:
        """The values of its records. Raises `DamagedFile` if they are not what ``file`` says,
        and `EngineError` beyond ``most`` bytes."""
        file.check_size(most)
        size = await self._disk.size(path)
        if size != file.size:
            file.check(size or 0, b"")
        try:
            return await self._read(path, file, decode)
        except FileNotFoundError as error:
            raise DamagedFile(f"{file.path} was there, and cannot be read: {error}") from error

    async def _read(
        self, path: str, file: ContentFile, decode: Callable[[bytes], T]
    ) -> list[T]:
        await self._check_digest(path, file)
        values, block, start = [], b"", 0
        for number, length in enumerate(file.sizes):
            if start + length > len(block):
                at = sum(file.sizes[:number])
                block, start = await self._disk.read(path, at, max(BLOCK, length)), 0
            values.append(decode(block[start : start + length]))
            start += length
        return values

    async def _check_digest(self, path: str, file: ContentFile) -> None:
        digest = blake3()
        for start in range(0, file.size, BLOCK):
            digest.update(await self._disk.read(path, start, BLOCK))
        file.check(file.size, digest.digest())

    async def forget(self, paths: Iterable[str]) -> None:
        """Remove files that were used; what the disk keeps goes with the folder."""
        for path in paths:
            try:
                await self._disk.remove(path)
            except StorageError as error:
                logger.info("content_not_removed %s: %s", path, error)
