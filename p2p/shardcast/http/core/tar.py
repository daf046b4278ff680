"""Many files as one tar archive, equal byte for byte on every machine that holds them.

Programs that know one file per version (shardcast 0.3.2, a browser) get a folder this way. The
headers are made from names and sizes alone: no owner, no time, mode 0644. So two nodes give the
same archive, its digest is the same everywhere, and a download may begin at one and go on at
another. Nothing is packed beforehand: a `Body` finds each byte in the files as they lie.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from typing import Final

from p2p.shardcast.http.core.body import Body, Slice

_BLOCK: Final = 512
"""Block size in bytes to which headers and contents are aligned (POSIX 1003.1, pax)."""


def tar_of(files: Sequence[tuple[str, int]]) -> Body:
    """Return the archive of ``files`` (path, bytes), in their order.

    A path over 100 characters, or a file over 8 GiB, gets a pax header of its own, as GNU tar,
    BSD tar and Python read it.
    """
    parts: list[Slice | bytes] = []
    for number, (path, size) in enumerate(files):
        member = tarfile.TarInfo(path)
        header = {**member.get_info(), "size": size}
        parts.append(member.create_pax_header(header, "utf-8"))
        parts.append(Slice(number, 0, size))
        parts.append(bytes(-size % _BLOCK))
    parts.append(bytes(2 * _BLOCK))  # two empty blocks end an archive
    return Body(parts)
