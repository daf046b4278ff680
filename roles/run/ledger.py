"""This node's own ledger on disk: append, survive kill -9, iterate.

Segment files ``00000000.seg``, ``00000001.seg`` ... in one folder. An entry exists once `Ledger.append` has
returned: it is on the disk by then. Opening checks the whole chain; what a crash left half-written at the end
is cut off (nobody was told of it), rot in the middle is a `StorageError`: a node that lost its past must not
sign a second one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakKeyDictionary

import trio

from p2p.errors import BadMessage, StorageError
from p2p.wire import MIB, frame
from p2p.world import World
from roles.run.chain import (
    EMPTY,
    Entry,
    Head,
    Place,
    Segment,
    decode_entry_untrusted,
    make_entry,
    read_segment,
)

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 4 * MIB
"""A segment is closed when it is longer. Recovery rewrites at most one of them: 4 MiB, some 50 ms of disk."""
CHECK_RATE: Final = 20e6
"""Bytes per second that `read_segment` checks, for the simulator's clock (measured on one core: 20 to 30)."""


class Ledger:
    """The log of this node. One per folder; open it with `open_ledger`."""

    def __init__(self, world: World, folder: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._world = world
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._head = EMPTY
        self._places: list[tuple[int, Place]] = []
        self._segment = 0
        self._written = 0
        self._torn = False
        self._turn = trio.Lock()

    @property
    def head(self) -> Head:
        """Number and digest of the newest entry; what gossip carries."""
        return self._head

    def __len__(self) -> int:
        return len(self._places)

    def count(self, kind: str) -> int:
        """How many entries of ``kind`` there are."""
        return sum(place.kind == kind for _, place in self._places)

    async def append(self, kind: str, body: bytes) -> Entry:
        """Sign and store one entry; it is durable when this returns. Raises `StorageError`."""
        return (await self.append_all([(kind, body)]))[0]

    async def append_all(self, statements: Sequence[tuple[str, bytes]]) -> list[Entry]:
        """Several entries ``(kind, body)`` for the price of one fsync, all or none."""
        async with self._turn:
            if self._torn:
                await self._cut(self._written)
            if self._written >= self._segment_bytes:
                self._segment, self._written = self._segment + 1, 0
            entries, data, places, head = self._compose(statements)
            self._torn = True  # until the disk says otherwise
            with trio.CancelScope(shield=True):
                await self._world.disk.append(self._path(self._segment), data)
                await self._world.disk.fsync(self._path(self._segment))
            self._torn = False
            self._written += len(data)
            self._places.extend((self._segment, place) for place in places)
            self._head = head
            return entries

    def _compose(
        self, statements: Sequence[tuple[str, bytes]]
    ) -> tuple[list[Entry], bytes, list[Place], Head]:
        entries, places, head, data = [], [], self._head, bytearray()
        for kind, body in statements:
            entry = make_entry(head, self._world.signer, kind, body, self._world.wall())
            head = Head(entry.seqno, entry.digest)
            encoded = entry.encode()
            data += frame(encoded)
            places.append(Place(self._written + len(data) - len(encoded), len(encoded), kind))
            entries.append(entry)
        return entries, bytes(data), places, head

    async def read(self, seqno: int) -> Entry:
        """One entry from the disk. Raises `IndexError` if there is none, `StorageError` if it has rotted."""
        if not 0 <= seqno < len(self._places):
            raise IndexError(f"the ledger has entries 0 to {len(self._places) - 1}, not {seqno}")
        segment, place = self._places[seqno]
        data = await self._world.disk.read(self._path(segment), place.offset, place.length)
        try:
            return decode_entry_untrusted(data)
        except BadMessage as error:
            raise StorageError(f"{self._path(segment)} has rotted at byte {place.offset}: {error}") from None

    async def entries(self, kind: str | None = None, *, start: int = 0) -> AsyncIterator[Entry]:
        """All entries from number ``start`` on, oldest first, optionally of one kind only."""
        for seqno in range(start, len(self._places)):
            if kind is None or self._places[seqno][1].kind == kind:
                yield await self.read(seqno)

    def _path(self, segment: int) -> str:
        return f"{self._folder}/{segment:08d}.seg"

    async def recover(self) -> None:
        """Read what is on disk: done by `open_ledger` before anybody else may use this."""
        names = [name for name in await self._world.disk.list(self._folder) if name.endswith(".seg")]
        if names != [f"{index:08d}.seg" for index in range(len(names))]:
            raise StorageError(f"{self._folder} lacks a segment of the ledger: found {', '.join(names)}")
        last = None
        for index in range(len(names)):
            data = await self._world.disk.read(self._path(index))
            segment = await self._check(data)
            self._places.extend((index, place) for place in segment.places)
            self._head, self._segment, self._written = segment.head, index, segment.whole
            last = segment.last or last
            if segment.whole < len(data):
                if index + 1 < len(names) or not segment.torn:
                    raise StorageError(
                        f"{self._path(index)} has rotted at byte {segment.whole}; restore it from a copy, or "
                        "give the node a new key and an empty ledger"
                    )
                await self._cut_or_note(segment.whole)
        if last is not None and not last.is_signed(self._world.verify):
            raise StorageError(f"entry {last.seqno} of the ledger in {self._folder} bears a wrong signature")

    async def _cut_or_note(self, whole: int) -> None:
        """`_cut`; on a disk that refuses, the next `append` does it, before it writes."""
        try:
            await self._cut(whole)
        except StorageError as error:
            logger.warning("ledger.not_cut segment=%d reason=%s", self._segment, error)
            self._torn = True

    async def _check(self, data: bytes) -> Segment:
        author = self._world.signer.peer_id
        return await self._world.run_blocking(
            read_segment, data, self._head, author, cost=len(data) / CHECK_RATE
        )

    async def _cut(self, whole: int) -> None:
        """Drop what lies behind ``whole`` bytes of the newest segment: nobody was ever told of it."""
        path = self._path(self._segment)
        data = await self._world.disk.read(path, 0, whole) if await self._world.disk.size(path) else b""
        await self._world.disk.replace(path, data)
        self._torn = False
        self._world.trace("ledger.cut", segment=self._segment, whole=whole)

    def __repr__(self) -> str:
        return f"Ledger({self._folder}, {len(self._places)} entries)"


class _Shared:
    """An open ledger, and how many use it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.users = 0
        self.recovering = trio.Lock()
        self.recovered = False


_OPEN: Final[WeakKeyDictionary[World, dict[str, _Shared]]] = WeakKeyDictionary()
"""By node and folder. Two roles of one node sign one log: with one log each they would equivocate."""


@asynccontextmanager
async def open_ledger(
    world: World, folder: str = "ledger", *, segment_bytes: int = SEGMENT_BYTES
) -> AsyncIterator[Ledger]:
    """The ledger of this node in ``folder``, checked and repaired. Raises `StorageError`.

    Whoever opens it while it is open gets the same one.
    """
    of_node = _OPEN.setdefault(world, {})
    shared = of_node.setdefault(folder, _Shared(Ledger(world, folder, segment_bytes=segment_bytes)))
    shared.users += 1
    try:
        async with shared.recovering:
            if not shared.recovered:
                await shared.ledger.recover()
                shared.recovered = True
        yield shared.ledger
    finally:
        shared.users -= 1
        if not shared.users and of_node.get(folder) is shared:
            del of_node[folder]
