"""Small JSON documents on a node's disk that notice when a bit of them has changed.

A flipped digit in plain JSON is still JSON, and would be believed. So a document is a line with
the SHA-256 of what follows, and then that. Each owner decides what damage means: progress
begins anew, what may have been learnt from counts as used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from p2p.errors import StorageError
from p2p.world import Disk

logger = logging.getLogger(__name__)


class DamagedFile(StorageError):
    """A file of this node is not as it was written: the disk, or a person, has changed it."""


async def keep(disk: Disk, path: str, value: object) -> None:
    """Put ``value``, of plain types, at ``path``, atomically and durably."""
    body = json.dumps(value).encode()
    await disk.replace(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


async def recall(disk: Disk, path: str) -> Any:
    """Return the value that `keep` wrote, or None if there is no file.

    Raises:
        DamagedFile: The file was changed since.
    """
    if await disk.size(path) is None:
        return None
    digest, _, body = (await disk.read(path)).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedFile(
            f"{path} is damaged: it does not have the digest that it was written with"
        )
    return json.loads(body)


async def discard(disk: Disk, path: str, reason: object) -> None:
    """Remove a useless file, and log it. If the disk refuses, the next life tries again."""
    logger.warning("%s is damaged and is removed: %s", disk.locate(path), reason)
    try:
        await disk.remove(path)
    except StorageError as error:
        logger.warning("not_removed %s: %s", path, error)
