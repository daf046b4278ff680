"""From a node's store to the folder that a person named.

Files are linked, not copied: one copy on the disk, served from there and used from there. Each
is linked under a temporary name first and renamed over what was there, so a program that reads
``model.safetensors`` meanwhile sees the old one or the new one, whole. Where a disk knows no
hard links (exFAT, some network folders) the files are copied.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

from p2p.errors import NoRoom, StorageError, Unnameable
from p2p.naming import derived, unencodable
from p2p.shardcast.chunkset import Selection
from p2p.shardcast.index import Index

_TEMPORARY: Final = ".shoal-part"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk on which there may be room later."""
_CANNOT_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})
"""Errors of a disk that knows no hard links, or that has reached its limit of links to a
file."""


def deliver(
    weights: Path, index: Index, out: Path, name: str, selection: Selection | None = None
) -> list[Path]:
    """Link the files of a version at ``weights`` into ``out``, all or those selected; files
    that exist already stay. Returns their paths.

    A policy that is one file is called ``name``. A file that cannot be written does not keep
    the others away. Raises `NoRoom`, and `StorageError` for what time does not mend.
    """
    made: list[Path] = []
    failed: list[tuple[Path, Exception]] = []
    chosen = range(len(index.files)) if selection is None else selection.files(index)
    for file in (index.files[number] for number in chosen):
        source = weights / file.path if file.path else weights
        target = out / (file.path or name)
        try:
            _put(source, target, out)
        except (OSError, UnicodeEncodeError, StorageError) as error:
            failed.append((target, error))
        else:
            made.append(target)
    if not failed:
        return made
    where, first = failed[0]
    more = f" ({len(failed)} of {len(chosen)} files; the others are there)"
    if isinstance(first, UnicodeEncodeError):
        raise Unnameable(unencodable(first) + more)
    if not isinstance(first, OSError):
        raise first
    kind = NoRoom if first.errno in _FULL else StorageError
    raise kind(f"{where} cannot be written: {first.strerror}{more}")


def _put(source: Path, target: Path, out: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(out.resolve()):
        raise StorageError(
            f"{target.parent} is a link that leads out of {out}: remove it, or give another"
            " --out"
        )
    temporary = target.with_name(derived(target.name, after=_TEMPORARY))
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, temporary)
    temporary.replace(target)
