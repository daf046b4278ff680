"""This node's own ledger on disk: append, survive kill -9, iterate.

Segment files ``00000000.seg``, ``00000001.seg`` ... in one folder, and the file ``synced``. An
entry exists once `Ledger.append` has returned: it is on the disk by then, and ``synced`` says
so. Opening checks the whole chain. What a crash left half-written at the end is cut off: its
entry was never acknowledged. Anything else that is not as it was written is a `StorageError`: a
node that lost part of its log must not sign those numbers again. An entry that was written and
not acknowledged may be there after a crash; then it counts.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, StorageError
from p2p.ledger.core.chain import (
    EMPTY,
    NOTHING,
    Entry,
    Head,
    Place,
    Segment,
    Synced,
    encode_record,
    encode_slots,
    make_entry,
    read_record,
    read_segment,
    read_slots,
)
from p2p.ledger.kept import newest_told
from p2p.wire import MIB
from p2p.world import World

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 4 * MIB
"""Bytes after which a segment is closed. Recovery rewrites at most one segment, in some 50
ms."""
SYNCED: Final = "synced"
"""Name of the file that says how much of the ledger is on disk (`p2p.ledger.core.chain`)."""
REMEDY: Final = (
    "restore the ledger as it was when the node ran last, or give the node a new key and an"
    " empty ledger: with part of its log missing it would sign numbers twice, which proves that"
    " it lies"
)


class Ledger:
    """Log of this node. There is one per folder; open it with `open_ledger`."""

    def __init__(
        self, world: World, folder: str = "ledger", segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._world = world
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._head = EMPTY
        self._places: list[tuple[int, Place]] = []
        self._segment = 0
        self._written = 0
        self._synced = NOTHING
        self._is_settled = False
        """True if the files agree with memory, so that an entry may be added."""
        self._turn = trio.Lock()
        self._grown = Notifier()

    @property
    def head(self) -> Head:
        """Number and digest of the newest entry, which heartbeats carry."""
        return self._head

    @property
    def world(self) -> World:
        """World whose disk holds the ledger."""
        return self._world

    @property
    def path(self) -> str:
        """Path of the folder, to show to people."""
        return self._world.disk.locate(self._folder)

    async def holds(self, entry: Entry) -> bool:
        """Return True if ``entry`` is in this ledger."""
        return await self._holds(Head(entry.seqno, entry.digest))

    def __len__(self) -> int:
        return len(self._places)

    def count(self, kind: str) -> int:
        """Return the number of entries of ``kind``."""
        return sum(place.kind == kind for _, place in self._places)

    async def append(self, kind: str, body: bytes) -> Entry:
        """Sign and store one entry, which is durable when this returns.

        Raises:
            StorageError: The disk refused the entry.
        """
        return (await self.append_all([(kind, body)]))[0]

    async def append_all(self, statements: Sequence[tuple[str, bytes]]) -> list[Entry]:
        """Sign and store several entries ``(kind, body)``, all or none, for the cost of two
        fsyncs."""
        async with self._turn:
            if not self._is_settled:
                await self._settle()
            if self._written >= self._segment_bytes:
                self._segment, self._written = self._segment + 1, 0
            entries, data, places, head = self._compose(statements)
            self._is_settled = False  # until the disk says otherwise
            path = self._path(self._segment)
            with trio.CancelScope(shield=True):
                await self._world.disk.append(path, data)
                await self._world.disk.fsync(path)
                await self._mark(self._written + len(data), head)
            self._is_settled = True
            self._written += len(data)
            self._places.extend((self._segment, place) for place in places)
            self._head = head
            self._grown.notify_all()
            return entries

    async def wait_grown(self, beyond: int) -> None:
        """Return when there is an entry with a higher number than ``beyond``."""
        while self._head.seqno <= beyond:
            await self._grown.wait()

    async def _mark(self, size: int, head: Head) -> None:
        """Record that ``size`` bytes of the newest segment are on disk. Recovery expects that
        many from now on."""
        synced = Synced(self._synced.turn + 1, self._segment, size, head)
        await self._world.disk.write(self._mark_path, synced.encode(), synced.offset)
        await self._world.disk.fsync(self._mark_path)
        self._synced = synced

    def _compose(
        self, statements: Sequence[tuple[str, bytes]]
    ) -> tuple[list[Entry], bytes, list[Place], Head]:
        entries, places, head, data = [], [], self._head, bytearray()
        for kind, body in statements:
            entry = make_entry(head, self._world.signer, kind, body, self._world.wall())
            head = Head(entry.seqno, entry.digest)
            record = encode_record(entry)
            places.append(Place(self._written + len(data), len(record), kind))
            data += record
            entries.append(entry)
        return entries, bytes(data), places, head

    async def read(self, seqno: int) -> Entry:
        """Read an entry from disk.

        Raises:
            IndexError: There is no such entry.
            StorageError: The entry is damaged.
        """
        if not 0 <= seqno < len(self._places):
            raise IndexError(
                f"the ledger has entries 0 to {len(self._places) - 1}, not {seqno}"
            )
        segment, place = self._places[seqno]
        try:
            data = await self._world.disk.read(self._path(segment), place.offset, place.length)
            return read_record(data)[0]
        except (FileNotFoundError, BadMessage) as error:
            raise self._rot(segment, place.offset, str(error)) from None

    async def entries(self, kind: str | None = None, *, start: int = 0) -> AsyncIterator[Entry]:
        """Yield entries from number ``start`` on, oldest first, optionally of one kind."""
        for seqno in range(start, len(self._places)):
            if kind is None or self._places[seqno][1].kind == kind:
                yield await self.read(seqno)

    def _path(self, segment: int) -> str:
        return f"{self._folder}/{segment:08d}.seg"

    @property
    def _mark_path(self) -> str:
        return f"{self._folder}/{SYNCED}"

    def _rot(self, segment: int, offset: int, flaw: str) -> StorageError:
        path = self._world.disk.locate(self._path(segment))
        return StorageError(f"{path} is damaged at byte {offset} ({flaw}); {REMEDY}")

    async def recover(self) -> None:
        """Read the ledger from disk and check it. `OwnLedger` and `open_ledger` call this
        before they return it."""
        disk = self._world.disk
        names = [name for name in await disk.list(self._folder) if name.endswith(".seg")]
        if names != [f"{index:08d}.seg" for index in range(len(names))]:
            folder = disk.locate(self._folder)
            raise StorageError(
                f"{folder} lacks a segment of the ledger (found {', '.join(names)}); {REMEDY}"
            )
        synced, is_sound = await self._read_synced(bool(names))
        last, flaw = None, ""
        for index in range(max(len(names), synced.segment + bool(synced.size))):
            if flaw:  # only the newest segment may end in half a record
                raise self._rot(index - 1, self._written, flaw)
            data = await disk.read(self._path(index)) if index < len(names) else b""
            is_owed = not is_sound or index < synced.segment
            owed = synced.size if index == synced.segment else 0
            segment = await self._take_in(index, data, max(owed, len(data) if is_owed else 0))
            last, flaw = segment.last or last, segment.flaw
        if not await self._holds(synced.head):
            raise self._rot(
                synced.segment, synced.size, "it holds other entries than were written"
            )
        if last is not None and not last.is_signed(self._world.verify):
            raise self._rot(
                self._segment, self._written, f"entry {last.seqno} bears a wrong signature"
            )
        self._synced = synced
        self._is_settled = is_sound and self._as_synced(synced.turn) == synced and not flaw
        if not self._is_settled:
            await self._settle_or_note()

    async def _read_synced(self, has_segments: bool) -> tuple[Synced, bool]:
        """Return how much of the ledger was on disk, and True if that is certain."""
        path = self._world.disk.locate(self._mark_path)
        size = await self._world.disk.size(self._mark_path)
        if size is None:
            if has_segments:
                await self._refuse_old_format()
                logger.warning(
                    "%s is gone; it is made again if every byte of the ledger is sound", path
                )
            return NOTHING, False
        synced, is_sound = read_slots(await self._world.disk.read(self._mark_path))
        if synced is None and not has_segments:
            raise StorageError(
                f"{path} is damaged, and there is no segment of the ledger; {REMEDY}"
            )
        if not is_sound:
            logger.warning(
                "%s is damaged; it is made again if every byte of the ledger is sound", path
            )
        return synced or NOTHING, is_sound

    async def _refuse_old_format(self) -> None:
        """Raise `StorageError` if the ledger has an old format. Records begin with a zero byte,
        since none is longer than 2**24; entries of the old format begin with another."""
        first = await self._world.disk.read(self._path(0), 0, 1)
        if first not in (b"", b"\0"):
            path = self._world.disk.locate(self._path(0))
            raise StorageError(
                f"{path} is damaged, or was written by an older version of Shoal, which this"
                f" one does not read; go on with that version, or {REMEDY}"
            )

    async def _take_in(self, index: int, data: bytes, owed: int) -> Segment:
        """Check the next segment and add its entries. At least ``owed`` bytes must be whole
        records."""
        segment = await self._check(data)
        if segment.whole < owed:
            flaw = segment.flaw or f"it ends there, and should have {owed} bytes"
            raise self._rot(index, segment.whole, flaw)
        self._places.extend((index, place) for place in segment.places)
        self._head, self._segment, self._written = segment.head, index, segment.whole
        return segment

    async def _holds(self, head: Head) -> bool:
        """Return True if ``head`` is that of one of our entries."""
        if head.seqno < 0:
            return head == EMPTY
        return head.seqno < len(self) and (await self.read(head.seqno)).digest == head.digest

    def _as_synced(self, turn: int) -> Synced:
        return Synced(turn, self._segment, self._written, self._head)

    async def _settle_or_note(self) -> None:
        """Settle, or log that the disk refused. The next `append` then settles before it
        writes."""
        try:
            await self._settle()
        except StorageError as error:
            logger.warning("ledger.not_settled segment=%d reason=%s", self._segment, error)

    async def _settle(self) -> None:
        """Make the files agree with memory, after a start or a failed write.

        First ``synced`` is written, which may then name an entry too many. Then the segment is
        cut: only bytes up to the end in ``synced`` can count as damaged.
        """
        disk, path = self._world.disk, self._path(self._segment)
        for segment in range(self._synced.segment, self._segment + 1):
            if await disk.size(self._path(segment)) is not None:
                await disk.fsync(self._path(segment))
        synced, slots = encode_slots(self._as_synced(self._synced.turn + 1))
        await disk.replace(self._mark_path, slots)
        self._synced = synced
        if (await disk.size(path) or 0) > self._written:
            # Behind it lies what was never acknowledged.
            await disk.replace(path, await disk.read(path, 0, self._written))
            self._world.trace("ledger.cut", segment=self._segment, whole=self._written)
        self._is_settled = True

    async def _check(self, data: bytes) -> Segment:
        author = self._world.signer.peer_id
        # Bytes per second that `read_segment` checks, for the simulator's clock (measured on
        # one core: 20 to 30).
        return await self._world.run_blocking(
            read_segment, data, self._head, author, cost=len(data) / 20e6
        )

    def __repr__(self) -> str:
        return f"Ledger({self._folder}, {len(self._places)} entries)"


class OwnLedger:
    """The one ledger of a node, read from disk when its first role asks for it.

    All roles sign the same log: with a log each, two of them would sign one number twice.
    """

    def __init__(self, world: World, folder: str = "ledger") -> None:
        self._ledger = Ledger(world, folder)
        self._reading = trio.Lock()
        self._is_read = False

    async def opened(self) -> Ledger:
        """Return the ledger, checked and repaired.

        Raises:
            StorageError: The ledger is damaged. Each call raises this again.
        """
        async with self._reading:
            if not self._is_read:
                await self._ledger.recover()
                told = await newest_told(self._ledger.world)
                if told is not None and not await self._ledger.holds(told):
                    raise self.came_from_backup(told.seqno)
                self._is_read = True
        return self._ledger

    def came_from_backup(self, told: int) -> StorageError:
        """Return the error for a node that lacks entry ``told`` of its own log, which its peers
        have.

        The missing entries are not restored from the peers' copies, though they bear our
        signature. The node cannot know that it signed and sent no later one.
        """
        return StorageError(
            f"{self._ledger.path} ends with entry {self._ledger.head.seqno}, but this node has"
            f" told its peers of entry {told}: it came from a backup; {REMEDY}"
        )


@asynccontextmanager
async def open_ledger(
    world: World, folder: str = "ledger", segment_bytes: int = SEGMENT_BYTES
) -> AsyncIterator[Ledger]:
    """Open the ledger in ``folder``, checked and repaired, for programs that are not nodes. A
    node's roles use `OwnLedger`, since two ledgers open at once would sign the same number.

    Raises:
        StorageError: The ledger is damaged.
    """
    ledger = Ledger(world, folder, segment_bytes)
    await ledger.recover()
    yield ledger
