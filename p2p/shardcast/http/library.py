"""Content of an HTTP edge: whole versions, each a list of files that never change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from p2p.concurrency import Notifier
from p2p.shardcast.http.core.answers import Body, Slice, tar_of
from p2p.shardcast.index import MAX_SPAN, Index, PolicyFile, Span, digest_of, right_mask
from p2p.shardcast.manifest import NO_POLICY, Manifest, PolicyVersion
from p2p.shardcast.service import Shardcast
from p2p.shardcast.store import HASH_RATE, Cores, batches
from p2p.wire import MIB
from p2p.world import DiskEntry, World

PIECE: Final = MIB
"""Bytes of a body handed to the connection at a time. hypercorn's trio worker sent pieces of 16
KiB at 113 MB/s a core, 64 at 340, 256 at 632, 1,024 at 836, and 4,096 at 907."""


class FileChanged(Exception):
    """A file changed since its version was published; the message is its name."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version that is complete on this node."""

    version: PolicyVersion
    files: tuple[tuple[str, int], ...]
    """Path and bytes of each file, in the order of the manifest."""
    digest: bytes
    """Digest of the release: equal digests are equal files."""
    index: Index
    """Index with the spans that are verified when the release is read."""
    manifest: bytes
    """The signed manifest."""
    paths: tuple[str, ...]
    """The path of each file on this node's disk."""

    @property
    def is_one_file(self) -> bool:
        """True if the release is a single file. Programs that expect one file per version get
        it unchanged."""
        return len(self.files) == 1

    def raw(self) -> Body:
        """Return all files, end to end, as one body."""
        return Body([Slice(number, 0, size) for number, (_, size) in enumerate(self.files)])

    def file(self, number: int) -> Body:
        """Return the body of one file."""
        return Body([Slice(number, 0, self.files[number][1])])

    def one_file(self) -> Body:
        """Return the version as one file: its only file, or an archive of all files."""
        return self.raw() if self.is_one_file else tar_of(self.files)


class Reader:
    """Reads the files of one release, and returns only published bytes.

    Files lie where a person put them, and are served from there. A body says that it never
    changes, so it must not hold what the disk happens to hold now. Each batch of spans is
    compared with its digests when it is read. Before a body is begun, `check` looks at the size
    and the time stamp of its files, so that a changed file is an error and no broken download.
    """

    def __init__(self, world: World, release: Release) -> None:
        self.release: Final = release
        self._world, self._cores = world, Cores(world)
        index = release.index
        self._batches = list(batches(index))
        self._starts = [index.offsets[first] for first, _ in self._batches]
        self._known: dict[int, tuple[DiskEntry | None, bool]] = {}
        """Maps each file to its disk entry at the last check, and whether it was unchanged
        then."""
        self._looked_at: dict[int, float] = {}
        """Maps each file to the time of its last check, unless that found it changed."""
        self.archive: tuple[Body, bytes] | None = None
        """The release as one file and its digest, for shardcast's clients; None until it was
        read."""

    @property
    def is_changed(self) -> bool:
        """True if a file was found changed at the last check."""
        return not all(is_right for _, is_right in self._known.values())

    async def check(self, pieces: Iterable[Slice | bytes]) -> None:
        """Check that the files of ``pieces`` still have their size and time stamp, or had them
        a moment ago: for 4,096 files this takes a third of a second of CPU, and a question for
        their archive has 60 bytes.

        Raises:
            FileChanged: A file differs.
            StorageError: The disk cannot be read.
        """
        for number in sorted({piece.file for piece in pieces if isinstance(piece, Slice)}):
            now = self._world.now()
            if now < self._looked_at.get(number, -math.inf) + 5.0:
                continue
            self._looked_at[number] = now  # others that ask meanwhile need not look, too
            entry = await self._look(number)
            seen, is_right = self._known.get(number, (None, True))
            if entry is None or entry.size != self.release.files[number][1]:
                raise self._changed(number, entry)
            if seen is not None and seen != entry:
                body = self.release.file(number)
                for piece in self.cut(body, 0, body.size):
                    await self.read(piece)
                self._known[number] = entry, True
            elif not is_right:
                raise self._changed(number, entry)

    def _changed(self, number: int, entry: DiskEntry | None) -> FileChanged:
        self._looked_at.pop(number, None)
        self._known[number] = entry, False
        return FileChanged(self.release.files[number][0])

    async def _look(self, number: int) -> DiskEntry | None:
        found = await self._world.disk.walk(self.release.paths[number], 1)
        return found[0] if found and found[0].path == "" else None

    def cut(self, body: Body, start: int, end: int) -> Iterator[Slice | bytes]:
        """Cut ``body`` from ``start`` to ``end`` into pieces, each for one `read`."""
        for piece in body.pieces(start, end, max(1, end - start)):
            if not isinstance(piece, Slice):
                yield piece
                continue
            at, end_of_piece = piece.offset, piece.offset + piece.length
            while at < end_of_piece:
                offset, size = self._batch(piece.file, at)[1:]
                until = min(end_of_piece, offset + size)
                yield Slice(piece.file, at, until - at)
                at = until

    def _batch(self, file: int, offset: int) -> tuple[int, int, int]:
        """Return the batch that holds a byte of a file: its number, its offset in the file and
        its size."""
        index = self.release.index
        start = index.starts[file]
        number = bisect_right(self._starts, start + offset) - 1
        first, end = self._batches[number]
        return number, index.offsets[first] - start, index.offsets[end] - index.offsets[first]

    async def read(self, piece: Slice | bytes) -> bytes:
        """Return the verified bytes of a piece that `cut` gave.

        Raises:
            FileChanged: A span differs from what was published.
            StorageError: The disk cannot be read.
        """
        if isinstance(piece, bytes):
            return piece
        number, offset, size = self._batch(piece.file, piece.offset)
        first, end = self._batches[number]
        try:
            raw = await self._world.disk.read(self.release.paths[piece.file], offset, size)
        except FileNotFoundError:
            raw = b""
        spans = self.release.index.spans[first:end]
        right = await self._cores.run(right_mask, spans, raw, size=len(raw), rate=HASH_RATE)
        if right != (1 << len(spans)) - 1:
            raise self._changed(piece.file, await self._look(piece.file))
        start = piece.offset - offset
        return raw[start : start + piece.length]

    async def make_archive(self) -> None:
        """Read the release as one file, for its BLAKE3 digest, unless that was done. Raise what
        `read` raises."""
        if self.archive is not None:
            return
        before = [await self._look(number) for number in range(len(self.release.files))]
        body, hasher = self.release.one_file(), blake3()
        for piece in self.cut(body, 0, body.size):
            data = await self.read(piece)
            await self._cores.run(hasher.update, data, size=len(data), rate=HASH_RATE)
        self._known = {number: (entry, True) for number, entry in enumerate(before)}
        self.archive = body, hasher.digest()


async def index_of_file(world: World, path: str) -> tuple[Index, bytes]:
    """Hash a file; return an index without spans, and its BLAKE3 digest.

    Raises:
        StorageError: The disk cannot be read.
        FileNotFoundError: There is no such file.
    """
    hasher, spans, offset = blake3(), [], 0
    while data := await world.disk.read(path, offset, MAX_SPAN):
        await world.run_blocking(hasher.update, data, cost=len(data) / HASH_RATE)
        spans.append(Span(digest_of(data), len(data)))
        offset += len(data)
    return Index.of([PolicyFile("", offset)], spans), hasher.digest()


class Shelf:
    """A library of releases that its owner adds, from a folder or a followed server."""

    def __init__(self) -> None:
        self._releases: dict[PolicyVersion, Release] = {}
        self._changed = Notifier()

    @property
    def versions(self) -> Sequence[PolicyVersion]:
        """Versions that are complete here, newest first."""
        return sorted(self._releases, reverse=True)

    def add(self, release: Release) -> None:
        """Add a version to those that are offered."""
        self._releases[release.version] = release
        self._changed.notify_all()

    @contextmanager
    def borrow(self, version: PolicyVersion) -> Iterator[Release]:
        yield self._releases[version]

    async def wait_news(self, known: PolicyVersion) -> None:
        """Return once a version newer than ``known`` is here."""
        while max(self._releases, default=NO_POLICY) <= known:
            await self._changed.wait()


def release_of(manifest: Manifest, index: Index, path: str) -> Release:
    """Return a version whose file or folder is at ``path``. A single file is named by its
    version, since its publisher gave it no name."""
    only = f"policy-{manifest.version}.safetensors"
    return Release(
        manifest.version,
        tuple((file.path or only, file.size) for file in index.files),
        manifest.digest,
        index,
        manifest.encode(),
        tuple(f"{path}/{file.path}" if file.path else path for file in index.files),
    )


class PolicyLibrary:
    """A library of the policies of a run that this node holds complete."""

    def __init__(self, shardcast: Shardcast) -> None:
        self._shardcast = shardcast

    @property
    def versions(self) -> Sequence[PolicyVersion]:
        return self._shardcast.held

    @contextmanager
    def borrow(self, version: PolicyVersion) -> Iterator[Release]:
        """Lend a version, which is pinned for the length of the block. Raise `KeyError` if it
        is not here."""
        manifest, index = self._shardcast.manifest(version), self._shardcast.index(version)
        with self._shardcast.pin(version) as path:
            yield release_of(manifest, index, path)

    async def wait_news(self, known: PolicyVersion) -> None:
        await self._shardcast.wait_policy(PolicyVersion(known + 1))


Library = PolicyLibrary | Shelf
"""The versions that a node offers."""
