"""Ledgers on disk: this node's own (append, survive kill -9, iterate), and copies of others'.

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
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, StorageError
from p2p.identity import PeerId
from p2p.ledger.core.chain import (
    EMPTY,
    NOTHING,
    Entry,
    Head,
    Place,
    Synced,
    decode_fork_untrusted,
    encode_record,
    encode_slots,
    make_entry,
    read_record,
)
from p2p.ledger.core.exchange import LEAST, Exchange, News
from p2p.ledger.core.inspection import SYNCED, Inspector
from p2p.wire import MIB
from p2p.world import World

logger = logging.getLogger(__name__)

REMEDY: Final = (
    "restore the ledger as it was when the node ran last, or give the node a new key and an"
    " empty ledger: with part of its log missing it would sign numbers twice, which proves that"
    " it lies"
)


FOLDER: Final = "ledgers"
_FORK: Final = ".fork"
READ_RATE: Final = 20e6
"""Bytes of records that are checked per second, for the simulator's clock (measured on one
core: 20 to 30)."""


class Ledger:
    """The one log of this node, read from disk when its first role asks for it (`opened`).

    All roles sign the same log: with a log each, two of them would sign one number twice.
    """

    def __init__(self, world: World, segment_bytes: int = 4 * MIB) -> None:
        """Prepare the ledger. A segment is closed after ``segment_bytes``: recovery rewrites at
        most one segment, by default in some 50 ms."""
        self._world = world
        self._folder = "ledger"
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
        self._reading = trio.Lock()
        self._is_read = False

    @property
    def head(self) -> Head:
        """Number and digest of the newest entry, which heartbeats carry."""
        return self._head

    async def opened(self) -> Ledger:
        """Return this ledger, checked and repaired.

        Raises:
            StorageError: The ledger is damaged. Each call raises this again.
        """
        async with self._reading:
            if not self._is_read:
                await self.recover()
                told = await newest_told(self._world)
                if told is not None and not await self._holds(Head(told.seqno, told.digest)):
                    raise self.came_from_backup(told.seqno)
                self._is_read = True
        return self

    def came_from_backup(self, told: int) -> StorageError:
        """Return the error for a node that lacks entry ``told`` of its own log, which its peers
        have.

        The missing entries are not restored from the peers' copies, though they bear our
        signature. The node cannot know that it signed and sent no later one.
        """
        return StorageError(
            f"{self._world.disk.locate(self._folder)} ends with entry {self._head.seqno}, but"
            f" this node has told its peers of entry {told}: it came from a backup; {REMEDY}"
        )

    def __len__(self) -> int:
        return len(self._places)

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
            entries, places, head, data = list[Entry](), list[Place](), self._head, bytearray()
            for kind, body in statements:
                entry = make_entry(head, self._world.signer, kind, body, self._world.wall())
                head = Head(entry.seqno, entry.digest)
                record = encode_record(entry)
                places.append(Place(self._written + len(data), len(record), kind))
                data += record
                entries.append(entry)
            self._is_settled = False  # until the disk says otherwise
            path = self._path(self._segment)
            with trio.CancelScope(shield=True):
                await self._world.disk.append(path, bytes(data))
                await self._world.disk.fsync(path)
                # Recovery expects so many bytes of the segment from now on.
                size = self._written + len(data)
                synced = Synced(self._synced.turn + 1, self._segment, size, head)
                await self._world.disk.write(self._mark_path, synced.encode(), synced.offset)
                await self._world.disk.fsync(self._mark_path)
                self._synced = synced
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
            name = f"{segment:08d}.seg"
            raise self._rot(name, place.offset, str(error)) from None

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

    def _rot(self, name: str, offset: int, flaw: str) -> StorageError:
        path = self._world.disk.locate(f"{self._folder}/{name}")
        return StorageError(f"{path} is damaged at byte {offset} ({flaw}); {REMEDY}")

    async def recover(self) -> None:
        """Read the ledger from disk and check it. `opened` calls this."""
        disk = self._world.disk
        names = [name for name in await disk.list(self._folder) if name.endswith(".seg")]
        if names != [f"{index:08d}.seg" for index in range(len(names))]:
            folder = disk.locate(self._folder)
            raise StorageError(
                f"{folder} lacks a segment of the ledger (found {', '.join(names)}); {REMEDY}"
            )
        marks = None
        if await disk.size(self._mark_path) is not None:
            marks = await disk.read(self._mark_path)
        elif names and await disk.read(self._path(0), 0, 1) not in (b"", b"\0"):
            # Records begin with a zero byte, since none is longer than 2**24; entries of the
            # old format begin with another.
            path = disk.locate(self._path(0))
            raise StorageError(
                f"{path} is damaged, or was written by an older version of Shoal, which this"
                f" one does not read; go on with that version, or {REMEDY}"
            )
        me = self._world.signer.peer_id
        self._places.clear()
        # Each digest commits to all that was signed before: the last signature suffices.
        inspector = Inspector(names, marks, lambda *_: True, self._place, me)
        for self._segment, name in enumerate(names):
            self._written = 0
            data = await disk.read(self._path(self._segment))
            cost = len(data) / READ_RATE
            await self._world.run_blocking(inspector.read, name, data, cost=cost)
        inspector.end()
        found, of_marks = inspector.found, inspector.flaws_of_marks
        if len(found.flaws) > of_marks:
            flaw = found.flaws[of_marks]
            raise self._rot(flaw.file, flaw.offset, flaw.what)
        if marks is not None and not names and inspector.synced is None:
            raise self._rot(SYNCED, 0, "and there is no segment of the ledger")
        self._head = found.head
        if len(self) and not (await self.read(len(self) - 1)).is_signed(self._world.verify):
            name = f"{self._segment:08d}.seg"
            raise self._rot(name, self._written, "its last entry bears a wrong signature")
        if of_marks:
            path, flaw = disk.locate(self._mark_path), found.flaws[0]
            logger.warning("%s: %s; it is made again from a sound ledger", path, flaw.what)
        self._synced = inspector.synced or NOTHING
        is_marked = marks is not None and not of_marks
        is_current = self._as_synced(self._synced.turn) == self._synced
        self._is_settled = is_marked and is_current and found.torn is None
        if not self._is_settled:
            try:
                await self._settle()
            except StorageError as error:  # the next `append` settles before it writes
                logger.warning("ledger.not_settled segment=%d reason=%s", self._segment, error)

    def _place(self, _: Entry, place: Place) -> None:
        self._places.append((self._segment, place))
        self._written = place.offset + place.length

    async def _holds(self, head: Head) -> bool:
        """Return True if ``head`` is that of one of our entries."""
        if head.seqno < 0:
            return head == EMPTY
        return head.seqno < len(self) and (await self.read(head.seqno)).digest == head.digest

    def _as_synced(self, turn: int) -> Synced:
        return Synced(turn, self._segment, self._written, self._head)

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


class KeptLedgers:
    """Copies, in the folder `FOLDER` of a node, of followed authors' logs and of proofs of
    equivocation, so that a restart forgets no ban or proof.

    One file of records for each author (as in a segment, `p2p.ledger.core.chain`), and one for
    each proof. They are copies: a file that is damaged is cut off there, and asked for again. A
    node that the run names keeps one of its own log as well: it shows what others may have
    heard of it, should the log itself come back from a backup (`newest_told`).
    """

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
        if size > 2 * max(self._exchange.size(author), LEAST):
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
    entries = (one for one in told if isinstance(one, Entry))
    newest = max(entries, key=lambda entry: entry.seqno, default=None)
    return newest if newest is not None and newest.is_signed(world.verify) else None


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
