"""Bugs in ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from unittest.mock import patch

from p2p.errors import BadMessage
from p2p.ledger.core.chain import Entry, read_record
from p2p.ledger.core.inspection import Inspector
from p2p.ledger.ledger import Ledger


async def append_without_fsync(
    ledger: Ledger, statements: Sequence[tuple[str, bytes]]
) -> list[Entry]:
    async def no_fsync(path: str) -> None:
        pass

    with patch.object(ledger._world.disk, "fsync", no_fsync):
        return await _append_all(ledger, statements)


def read_one_too_few(inspector: Inspector, name: str, data: bytes) -> None:
    ends = [0]
    with suppress(BadMessage):
        while ends[-1] < len(data):
            ends.append(read_record(data, ends[-1])[1])
    if ends[-1] < len(data) and len(ends) > 2:
        data = data[: ends[-2] + 5]
    _read(inspector, name, data)


_append_all = Ledger.append_all
_read = Inspector.read

BUGS = {
    "entries are acknowledged before fsync": (1, Ledger, "append_all", append_without_fsync),
    "recovery cuts a whole entry": (7, Inspector, "read", read_one_too_few),
}
