"""Modes of a folder: files that can be executed or are read-only, and empty folders.

The table of that is named by its digest in the *note* of the signed manifest, which any version
of Shoal reads, and travels by a request of its own. Who does not know it gets plain files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from p2p.errors import BadMessage, StorageError
from p2p.host import PEER_TROUBLE, Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.shardcast.index import DIGEST_BYTES, MAX_FILES, Index, check_paths_untrusted, digest_of
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from p2p.world import World

PROTOCOL_ID: Final = ProtocolId("/shoal/cast/modes/1.0.0")
"""Asks for a table by its digest; the answer is the table, or one byte if it is not here."""
MAX_TABLE: Final = 512 * KI
"""Bytes of a table: twice what the paths of a folder may have."""


@dataclass(frozen=True, slots=True)
class Modes:
    """A table."""

    executables: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    """Those that are empty."""

    def encode(self) -> bytes:
        return pack([list(self.executables), list(self.read_only), list(self.folders)])


def decode_modes_untrusted(data: bytes) -> Modes:
    """Read a table. Raises `BadMessage`, and nothing else."""
    if len(data) > MAX_TABLE:
        raise BadMessage(f"a table of modes of {len(data)} bytes is over {MAX_TABLE}")
    rows = fields_untrusted(
        unpack_untrusted(data, max_items=4 * MAX_FILES, max_list=MAX_FILES),
        list, list, list, what="table of modes",
    )  # fmt: skip
    if not all(isinstance(path, str) for row in rows for path in row):
        raise BadMessage("a table of modes names what is no path")
    return Modes(*map(tuple, rows))


def look(place: Path) -> Modes:
    """Return the modes of the file or folder at `place`. Hidden names are left out."""
    if place.is_file():
        files, folders = [("", place)], list[str]()
    else:
        files, folders = [], []
        for at, inside, names in os.walk(place):
            inside[:] = [name for name in inside if name[0] != "."]
            below = [Path(at, name) for name in names if name[0] != "."]
            files += [(o.relative_to(place).as_posix(), o) for o in below if o.is_file()]
            if not inside and not below and Path(at) != place:
                folders.append(Path(at).relative_to(place).as_posix())
    modes = {path: one.stat().st_mode for path, one in files}
    return Modes(
        tuple(sorted(path for path, mode in modes.items() if mode & stat.S_IXUSR)),
        tuple(sorted(path for path, mode in modes.items() if not mode & stat.S_IWUSR)),
        tuple(sorted(folders)),
    )


def restore(modes: Modes, index: Index, out: Path, name: str, chosen: Collection[int]) -> None:
    """Give the `chosen` files of a version in `out` their modes, and make its empty folders if
    all files are chosen. Raises `BadMessage`, and `StorageError`.

    No other bit than those of `Modes` is ever set.
    """
    executables, read_only = set(modes.executables), set(modes.read_only)
    try:
        for file in (index.files[number] for number in chosen):
            place = out / (file.path or name)
            mode = stat.S_IMODE(place.stat().st_mode) & 0o666 | 0o600
            if file.path in executables:
                mode |= (mode & 0o444) >> 2
            place.chmod(mode & ~0o222 if file.path in read_only else mode)
        if not modes.folders or len(chosen) < len(index.files):
            return
        paths = [file.path for file in index.files]
        check_paths_untrusted(sorted([*paths, *modes.folders]))
        for folder in modes.folders:
            place = out / folder
            if not place.resolve().is_relative_to(out.resolve()):
                raise StorageError(f"{place} is a link that leads out of {out}: remove it")
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be changed: {error.strerror}") from error


class Tables:
    """The tables that this node has, for itself and for others."""

    def __init__(self, world: World, host: Host, charge: Callable[[int], None]) -> None:
        """``charge`` counts the bytes of each answer as upload."""
        self._disk = world.disk
        self._host, self._charge = host, charge
        self._tables: dict[bytes, bytes] = {}
        self.serve = serve_requests(self._answer, max_request=DIGEST_BYTES)

    async def _answer(self, peer: PeerId, digest: bytes) -> bytes:
        table = self._tables.get(digest, b"\0")
        self._charge(len(table))
        return table

    def keep(self, modes: Modes) -> bytes:
        """Keep a table for other nodes. Returns the note that names it; empty for a table
        without entries or one that is too long."""
        table = modes.encode()
        if modes == Modes() or len(table) > MAX_TABLE:
            return b""
        self._tables[digest_of(table)] = table
        return digest_of(table)

    async def fetch(self, pusher: PeerId, digest: bytes) -> Modes | None:
        """Get a table from this machine's disk, the pusher or another member; None if nobody
        has it. Raises `BadMessage`."""
        try:
            table = await self._disk.read("modes", 0, MAX_TABLE)
        except FileNotFoundError:
            table = b""
        for peer in (pusher, *(one for one in self._host.connected if one != pusher)):
            if digest_of(table) == digest:
                break
            with trio.move_on_after(10.0), suppress(*PEER_TROUBLE):
                table = await request(
                    self._host, peer, PROTOCOL_ID, digest, max_reply=MAX_TABLE
                )
        if digest_of(table) != digest:
            return None
        modes = decode_modes_untrusted(table)
        self._tables = {digest: table}
        await self._disk.replace("modes", table)
        return modes
