"""What an HTTP edge offers: whole versions, each a list of files that never change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from p2p.concurrency import Notifier
from p2p.shardcast.http.core.body import Body, Slice
from p2p.shardcast.http.core.tar import tar_of
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import NO_POLICY, Manifest, PolicyVersion
from p2p.shardcast.service import Shardcast
from p2p.wire import MIB
from p2p.world import Disk, World

PIECE: Final = MIB
"""Bytes of a body that are read and handed to the connection at a time. hypercorn's trio worker
sent bodies in pieces of 16 KiB at 113 MB/s a core, 64 at 340, 256 at 632, 1,024 at 836, and
4,096 at 907: larger ones buy little more, and every download holds one."""
_HASH_RATE: Final = 3e9
"""Bytes per second of BLAKE3, one core: the modelled cost of `digest_of_body`."""


@dataclass(frozen=True, slots=True)
class Release:
    """One version that is whole here."""

    version: PolicyVersion
    files: tuple[tuple[str, int], ...]
    """(path, bytes) of each file, in the order of the manifest."""
    digest: bytes
    """Names all of it: equal digests are equal files."""
    manifest: bytes
    """The manifest, as its trainer signed it."""
    paths: tuple[str, ...]
    """The path of each file on the disk that `read` is given."""

    @property
    def is_one_file(self) -> bool:
        """Whether it is a single file, which programs that know one file per version get as it
        is."""
        return len(self.files) == 1

    def raw(self) -> Body:
        """All files, end to end."""
        return Body([Slice(number, 0, size) for number, (_, size) in enumerate(self.files)])

    def number_of(self, name: str) -> int:
        """The number of the file with this path. Raises `KeyError`."""
        for number, (path, _) in enumerate(self.files):
            if path == name:
                return number
        raise KeyError(name)

    def file(self, number: int) -> Body:
        """One file."""
        return Body([Slice(number, 0, self.files[number][1])])

    def one_file(self) -> Body:
        """The version as one file: the only one, or an archive of all."""
        return self.raw() if self.is_one_file else tar_of(self.files)

    async def read(self, disk: Disk, piece: Slice | bytes) -> bytes:
        """The bytes of a piece. Raises `StorageError`, and `FileNotFoundError` if the files
        were removed meanwhile."""
        if isinstance(piece, bytes):
            return piece
        return await disk.read(self.paths[piece.file], piece.offset, piece.length)


class Library(Protocol):
    """The versions that a node offers."""

    @property
    def versions(self) -> Sequence[PolicyVersion]:
        """The versions that are whole here, newest first."""
        ...

    def borrow(self, version: PolicyVersion) -> AbstractContextManager[Release]:
        """A version, whose files stay for the length of the block. Raises `KeyError`."""
        ...

    async def wait_news(self, known: PolicyVersion) -> None:
        """Return once there is a version newer than ``known``."""
        ...


async def digest_of_body(world: World, release: Release, body: Body) -> bytes:
    """The BLAKE3 digest of ``body``, read piece by piece. Raises what `Release.read` does."""
    hasher = blake3()
    for piece in body.pieces(0, body.size, 4 * PIECE):
        data = await release.read(world.disk, piece)
        await world.run_blocking(hasher.update, data, cost=len(data) / _HASH_RATE)
    return hasher.digest()


class Shelf:
    """A library of releases that its owner adds and takes away: of a folder, or of what was
    followed from elsewhere."""

    def __init__(self) -> None:
        self._releases: dict[PolicyVersion, Release] = {}
        self._changed = Notifier()

    @property
    def versions(self) -> Sequence[PolicyVersion]:
        """See `Library.versions`."""
        return sorted(self._releases, reverse=True)

    def add(self, release: Release) -> None:
        """Offer a version."""
        self._releases[release.version] = release
        self._changed.notify_all()

    def remove(self, version: PolicyVersion) -> None:
        """Offer it no more. Downloads that go on fail when its files are gone."""
        self._releases.pop(version, None)

    @contextmanager
    def borrow(self, version: PolicyVersion) -> Iterator[Release]:
        """See `Library.borrow`."""
        yield self._releases[version]

    async def wait_news(self, known: PolicyVersion) -> None:
        """See `Library.wait_news`."""
        while max(self._releases, default=NO_POLICY) <= known:
            await self._changed.wait()


def release_of(manifest: Manifest, index: Index, path: str) -> Release:
    """A version whose file, or folder of files, is at ``path``. A lone file gets a name from
    the version: its trainer gave it none."""
    only = f"policy-{manifest.version}.safetensors"
    return Release(
        manifest.version,
        tuple((file.path or only, file.size) for file in index.files),
        manifest.digest,
        manifest.encode(),
        tuple(f"{path}/{file.path}" if file.path else path for file in index.files),
    )


class PolicyLibrary:
    """The policies of a run that this node holds whole."""

    def __init__(self, shardcast: Shardcast) -> None:
        self._shardcast = shardcast

    @property
    def versions(self) -> Sequence[PolicyVersion]:
        """See `Library.versions`."""
        return self._shardcast.held

    @contextmanager
    def borrow(self, version: PolicyVersion) -> Iterator[Release]:
        """See `Library.borrow`. The policy is pinned meanwhile."""
        manifest, index = self._shardcast.manifest(version), self._shardcast.index(version)
        with self._shardcast.pin(version) as path:
            yield release_of(manifest, index, path)

    async def wait_news(self, known: PolicyVersion) -> None:
        """See `Library.wait_news`."""
        await self._shardcast.wait_policy(PolicyVersion(known + 1))
