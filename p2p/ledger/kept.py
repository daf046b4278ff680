"""Copies of other nodes' logs on this node's disk, so that a restart forgets no ban or proof.

One file of records for each author (as in a segment, `p2p.ledger.core.chain`), and one for each
proof. They are copies: a file that is damaged is cut off there, and asked for again. A node
that the run names keeps one of its own log as well: it shows what others may have heard of it,
should the log itself come back from a backup (`newest_told`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Final

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, StorageError
from p2p.identity import PeerId
from p2p.ledger.core.chain import (
    Entry,
    decode_fork_untrusted,
    encode_record,
    read_record,
)
from p2p.ledger.core.exchange import LEAST, Exchange, News
from p2p.world import World

logger = logging.getLogger(__name__)

FOLDER: Final = "ledgers"
_FORK: Final = ".fork"
SLACK: Final = 2
"""Multiple of its content's size above which a file is rewritten."""


READ_RATE: Final = 20e6
"""Bytes of copies read per second, for the simulator's clock."""


class KeptLedgers:
    """Copies, in the folder `FOLDER` of a node, of followed authors' logs and of proofs of
    equivocation."""

    def __init__(self, world: World, exchange: Exchange) -> None:
        self._world = world
        self._exchange = exchange
        self._sizes: dict[PeerId, int] = {}

    async def read(self) -> AsyncIterator[News]:
        """Yield the kept entries and proofs of followed authors, and remove the files of
        others."""
        disk, authors = self._world.disk, self._exchange.authors
        expected = {str(author): author for author in authors}
        for name in await disk.list(FOLDER):
            author = expected.get(name.removesuffix(_FORK))
            if author is None:
                await disk.remove(f"{FOLDER}/{name}")
                continue
            data = await disk.read(f"{FOLDER}/{name}")
            if not name.endswith(_FORK):
                self._sizes[author] = len(data)
            for one in _read(name, data):
                yield one

    async def keep(self, news: list[News]) -> None:
        """Write ``news`` to disk. If the disk refuses, the node asks its peers for them
        again."""
        try:
            for one in news:
                if isinstance(one, Equivocation):
                    path = f"{FOLDER}/{one.author}"
                    await self._world.disk.replace(path + _FORK, one.encode())
                    await self._world.disk.remove(path)
                    self._sizes.pop(one.author, None)
            for author in self._exchange.authors:
                fresh = [one for one in news if isinstance(one, Entry) and one.author == author]
                if fresh and author not in self._exchange.forks:
                    await self._append(author, fresh)
        except StorageError as error:
            logger.warning("ledger.not_kept reason=%s", error)

    async def _append(self, author: PeerId, fresh: list[Entry]) -> None:
        disk, path = self._world.disk, f"{FOLDER}/{author}"
        data = b"".join(map(encode_record, fresh))
        size = self._sizes.get(author, 0) + len(data)
        whole = self._exchange.size(author)
        if size > SLACK * max(whole, LEAST):
            data = b"".join(map(encode_record, self._exchange.statements(author)))
            await disk.replace(path, data)
            size = len(data)
        else:
            await disk.append(path, data)
            await disk.fsync(path)
        self._sizes[author] = size


async def newest_told(world: World) -> Entry | None:
    """Return the newest entry of this node's own log that its peers may have, or None."""
    me = world.signer.peer_id
    path = f"{FOLDER}/{me}"
    if await world.disk.size(path) is None:
        return None
    data = await world.disk.read(path)
    told = await world.run_blocking(_read, path, data, cost=len(data) / READ_RATE)
    newest = max((one for one in told if isinstance(one, Entry)), key=_number, default=None)
    return newest if newest is not None and newest.is_signed(world.verify) else None


def _number(entry: Entry) -> int:
    return entry.seqno


def _read(name: str, data: bytes) -> list[News]:
    """Return the entries or the proof in a file, up to the first damage."""
    found: list[News] = []
    try:
        if name.endswith(_FORK):
            return [decode_fork_untrusted(data)]
        offset = 0
        while offset < len(data):
            entry, offset = read_record(data, offset)
            found.append(entry)
    except BadMessage as error:
        logger.warning("ledger.copy_damaged %s: %s", name, error)
    return found
