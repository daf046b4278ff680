"""Reading of ledgers and run files from nodes' folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2p.errors import BadMessage, ConfigError
from p2p.identity import verify
from p2p.ledger.core.chain import SLOT_BYTES, Entry, read_record
from p2p.ledger.core.inspection import SYNCED, Inspection, inspect
from p2p.ledger.ledger import FOLDER as COPIES
from p2p.node.rundoc import PATH as RUN_PATH
from p2p.wire import MIB
from roles.contract.core.file import MAX_RUN, Run, decode_run_untrusted

LEDGER: Final = "ledger"
"""Folder of a node's own ledger, within the node's folder."""
MAX_FILE: Final = 256 * MIB
"""Most bytes of a file that is read: as many as the longest receipt has."""
MAX_SEGMENT: Final = 64 * MIB
"""Most bytes of a segment or a copy that is read: a segment has 4 MiB and an append, a copy
twice what a node keeps of one author."""
MAX_LEDGER: Final = 1024 * MIB
"""Most bytes of a ledger, or of all copies, that are read: two million verdicts. A sparse file
has any length and takes no room, so its length costs a stranger nothing."""
_SEGMENT: Final = re.compile(r"[0-9]{8}\.seg")


@dataclass(frozen=True, slots=True)
class Read:
    """The folder of a ledger, and the findings of its inspection."""

    path: Path
    found: Inspection

    def check(self) -> None:
        """Raise `ConfigError` if any part of the ledger is not as its author wrote it."""
        if self.found.flaws:
            more = len(self.found.flaws) - 1 + self.found.more
            others = f", and {more} more" if more else ""
            raise ConfigError(
                f"{self.path} is damaged ({self.found.flaws[0]}{others}): shoal ledger audit"
                f" {self.path} lists all of it"
            )


def read_regular(path: Path, most: int = MAX_FILE) -> bytes:
    """Return the bytes of a regular file. Raises `ConfigError` for other files, such as a pipe
    or a device, which might never end, and for files longer than ``most``; and
    `FileNotFoundError`."""
    flags = os.O_RDONLY | os.O_NONBLOCK  # a pipe would wait for a writer
    try:
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is no regular file")
            if found.st_size > most:
                raise ConfigError(f"{path} is longer than the {most:,} bytes that are read")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(most)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


class _Segments(Mapping[str, bytes]):
    """Segment files, each read when it is needed."""

    def __init__(self, place: Path, names: Sequence[str]) -> None:
        self._place, self._names = place, names

    def __getitem__(self, name: str) -> bytes:
        return read_regular(self._place / name, MAX_SEGMENT)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _check_total(paths: Iterable[Path], place: Path) -> None:
    """Raise `ConfigError` if files have more bytes than are read."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue  # whoever reads it says so
    if total > MAX_LEDGER:
        raise ConfigError(
            f"{place} has {total:,} bytes, and at most {MAX_LEDGER:,} of a ledger are read"
        )


def read_ledger(folder: Path, take: Callable[[Entry], object] | None = None) -> Read:
    """Read the ledger in a node's folder, or in that folder itself.

    Raises `ConfigError` if there is no ledger. With ``take``, each entry is passed to it and
    not kept.
    """
    for place in (folder / LEDGER, folder):
        try:
            names = sorted(path.name for path in place.iterdir())
        except OSError:
            continue
        segments = [name for name in names if _SEGMENT.fullmatch(name)]
        if segments or SYNCED in names:
            _check_total([place / name for name in segments], place)
            has_marks = SYNCED in names
            marks = read_regular(place / SYNCED, 2 * SLOT_BYTES) if has_marks else None
            return Read(place, inspect(_Segments(place, segments), marks, verify, take))
    raise ConfigError(
        f"there is no ledger in {folder}: name the folder of a node, which it gets as --data"
    )


def read_copies(folder: Path) -> list[Entry]:
    """Return the entries that the node in ``folder`` keeps of other nodes' ledgers, if its run
    has nodes exchange them. Only parts that the authors have signed are returned."""
    found = []
    paths = [one for one in sorted((folder / COPIES).glob("12D3*")) if not one.suffix]
    _check_total(paths, folder / COPIES)
    for path in paths:
        data, offset = read_regular(path, MAX_SEGMENT), 0
        try:
            while offset < len(data):
                entry, offset = read_record(data, offset)
                found += [entry] if entry.is_signed(verify) else []
        except BadMessage:
            continue  # the rest is asked for again when the node starts
    return found


def read_run(path: Path | None, folder: Path) -> Run:
    """Return the run file at ``path``, or the one that the node in ``folder`` has pinned.
    Raises `ConfigError`."""
    place = folder / RUN_PATH if path is None else path
    try:
        return decode_run_untrusted(read_regular(place, MAX_RUN))
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {place}: name one with --run FILE") from None
    except BadMessage as error:
        raise ConfigError(f"the run file {place} cannot be used: {error}") from None
