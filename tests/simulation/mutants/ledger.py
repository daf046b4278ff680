"""Bugs in ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from p2p.ledger.core.chain import Entry, Segment, read_segment
from p2p.ledger.ledger import Ledger


async def append_without_fsync(
    ledger: Ledger, statements: Sequence[tuple[str, bytes]]
) -> list[Entry]:
    async def no_fsync(path: str) -> None:
        pass

    with patch.object(ledger._world.disk, "fsync", no_fsync):
        return await _append_all(ledger, statements)


async def check_one_too_few(ledger: Ledger, data: bytes) -> Segment:
    segment = await _check(ledger, data)
    if not segment.flaw or len(segment.places) < 2:
        return segment
    shorter = data[: segment.places[-1].offset + 5]
    return read_segment(shorter, ledger.head, ledger._world.signer.peer_id)


_append_all = Ledger.append_all
_check = Ledger._check

BUGS = {
    "entries are acknowledged before fsync": (1, Ledger, "append_all", append_without_fsync),
    "recovery cuts a whole entry": (7, Ledger, "_check", check_one_too_few),
}
