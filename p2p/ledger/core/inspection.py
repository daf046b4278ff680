"""Inspection of a ledger by someone who trusts neither its author nor its disk.

Theory of operation
-------------------
Every byte of a ledger's folder is bound by something: a record by its checksum, an entry by the
digest that the next one names and by its author's signature, the last entry by the head in the
file ``synced``, each slot of that file by its own checksum, and the space between the slots is
zero. So no byte can be changed without one of these failing, and `inspect` says which, and of
which entry. It goes on behind a damaged record, since the next one may be whole.

The folder may be a stranger's, made to cost whoever audits it. So time is linear in its bytes:
the next whole record is searched for once in each of them, and what only looks like one is
hashed up to twice what was read. Memory is one segment, `MAX_FLAWS` sentences, and what the
caller keeps of the entries.

What lies behind the bytes that ``synced`` vouches for was never acknowledged: half a record
there was torn by a crash, and is no fault. `Ledger.recover` decides the same when a node
starts, and stops at the first fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import (
    EMPTY,
    LENGTH_BYTES,
    MAX_ENTRY,
    NOTHING,
    RECORD_HEAD,
    SLOT_BYTES,
    Entry,
    Head,
    Synced,
    read_record,
    read_slots,
)

MAX_FLAWS: Final = 1000
"""Maximum number of flaws that are listed; of others only their number is kept."""
_RECORD: Final = re.compile(
    rb"(?<=\x00[\x00\x01].{%d})\x92[\xc4-\xc6]" % (RECORD_HEAD - 2), re.DOTALL
)
"""Pattern of a record's start: a list whose first item is bytes, behind a length that begins
with a zero byte (`MAX_ENTRY`)."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Difference from what the author must have written."""

    file: str
    offset: int
    """Byte at which the damage begins."""
    entry: int
    """Number of the entry concerned; -1 if there is none."""
    what: str

    def __str__(self) -> str:
        about = "" if self.entry < 0 else f", entry {self.entry}"
        return f"{self.file}, byte {self.offset}{about}: {self.what}"


@dataclass(slots=True)
class Inspection:
    """Findings about a ledger's folder."""

    author: PeerId | None = None
    """Author of the first entry; None for an empty ledger."""
    entries: list[Entry] = field(default_factory=list)
    """Whole, signed entries in order, unless the caller takes them."""
    count: int = 0
    """Number of entries."""
    head: Head = EMPTY
    """Head after the newest entry."""
    flaws: list[Flaw] = field(default_factory=list)
    """First `MAX_FLAWS` flaws."""
    more: int = 0
    """Number of further flaws."""
    torn: Flaw | None = None
    """Unacknowledged bytes that a crash left at the end."""
    acknowledged: bytes | None = None
    """Digest of the entry here with the number in ``synced``; None if there is none."""

    def blame(self, flaw: Flaw) -> None:
        """Add a flaw to the list, or count it if the list is full."""
        if len(self.flaws) < MAX_FLAWS:
            self.flaws.append(flaw)
        else:
            self.more += 1


def inspect(
    segments: Mapping[str, bytes],
    marks: bytes | None,
    verify: Verify,
    take: Callable[[Entry], object] | None = None,
) -> Inspection:
    """Inspect the files of a ledger and return the findings.

    Args:
        segments: The segment files by name. Each is read once, in order, so a mapping may load
            them on access.
        marks: The file ``synced``; None if there is none.
        verify: Verifies signatures.
        take: Called with each whole and signed entry, which is then not kept.
    """
    found = Inspection()
    take = take or found.entries.append
    synced = _read_marks(found, marks, has_segments=bool(segments))
    head: Head | None = EMPTY
    due, newest = 0, max(segments, default="")
    for name in sorted(segments):
        index = int(name[:8])
        if index != due:
            lost = -1 if head is None else head.seqno + 1
            found.blame(Flaw(name, 0, lost, f"{due:08d}.seg is missing"))
            head = None
        data, due = segments[name], index + 1
        owed = len(data)  # how many of its bytes must be whole records
        if name == newest and synced is not None and index >= synced.segment:
            owed = synced.size if index == synced.segment else 0
        behind = head
        for entry, behind in _read(found, name, data, head, owed, verify):
            if entry is None:
                continue
            found.count += 1
            found.head = behind or EMPTY
            if synced is not None and entry.seqno == synced.head.seqno:
                found.acknowledged = found.acknowledged or entry.digest
            take(entry)
        head = behind
    if synced is not None and synced.segment >= due and synced.size:
        found.blame(Flaw("synced", 0, -1, f"{synced.segment:08d}.seg is missing"))
    if synced is not None and synced.head != EMPTY:  # the head that was acknowledged
        number, named = synced.head.seqno, found.acknowledged
        if named is None and not found.flaws:
            found.blame(Flaw("synced", 0, number, "the entry that it names is missing"))
        elif named not in (None, synced.head.digest):
            found.blame(Flaw("synced", 0, number, "the entry that it names was another"))
    return found


def _read_marks(found: Inspection, marks: bytes | None, *, has_segments: bool) -> Synced | None:
    if marks is None:
        if has_segments:
            found.blame(Flaw("synced", 0, -1, "it is missing"))
        return None
    synced, torn = read_slots(marks)
    for at in torn:
        found.blame(Flaw("synced", at, -1, "a mark is damaged, or a crash tore it"))
    slot = len(NOTHING.encode())
    for start, end in ((slot, SLOT_BYTES), (SLOT_BYTES + slot, len(marks))):
        wrong = [at for at in range(start, min(end, len(marks))) if marks[at]]
        if wrong:
            what = f"something stands outside the marks, up to byte {wrong[-1]}"
            found.blame(Flaw("synced", wrong[0], -1, what))
    return synced


def _read(
    found: Inspection, name: str, data: bytes, head: Head | None, owed: int, verify: Verify
) -> Iterator[tuple[Entry | None, Head | None]]:
    """Yield the sound entries of one segment, which continues the log at ``head``. Each comes
    with the head after it; at the end comes the last head with None as entry. A head of None is
    lost: the next entry is then accepted whatever its predecessor."""
    # Bytes that may be hashed in vain: some may look like records of 65 KiB that begin every
    # few bytes.
    offset, budget = 0, 2 * len(data) + 16 * MAX_ENTRY
    while offset < len(data):
        number = -1 if head is None else head.seqno + 1
        try:
            entry, end = read_record(data, offset)
        except BadMessage as error:
            end, budget = _next_record(data, offset, budget)
            if offset >= owed and end == len(data):
                found.torn = Flaw(name, offset, number, str(error))
            else:
                what = f"{error} (bytes {offset} to {end - 1})"
                found.blame(Flaw(name, offset, number, what))
            head, offset = None, end
            continue
        found.author = found.author or entry.author
        head = head or Head(entry.seqno - 1, entry.previous)
        faults = list(_faults(entry, found.author, head, verify))
        for fault in faults:
            found.blame(Flaw(name, offset, entry.seqno, fault))
        head, offset = Head(entry.seqno, entry.digest), end
        if not faults:
            yield entry, head
    if len(data) < owed:
        what = f"it ends there, and should have {owed} bytes"
        found.blame(Flaw(name, len(data), -1 if head is None else head.seqno + 1, what))
    yield None, head


def _next_record(data: bytes, offset: int, budget: int) -> tuple[int, int]:
    """Return the start of the next whole record after ``offset``, or the end of the data if
    none is found within the budget, and what is left of that."""
    for match in _RECORD.finditer(data, offset + 1 + RECORD_HEAD):
        start = match.start() - RECORD_HEAD
        budget -= int.from_bytes(data[start : start + LENGTH_BYTES], "big")
        if budget < 0:
            break
        try:
            read_record(data, start)
        except BadMessage:
            continue
        return start, budget
    return len(data), budget


def _faults(entry: Entry, author: PeerId, head: Head, verify: Verify) -> Iterator[str]:
    if entry.author != author:
        yield f"it is an entry of another author, {entry.author}"
    if entry.seqno != head.seqno + 1:
        yield f"it should have number {head.seqno + 1}"
    elif entry.previous != head.digest:
        yield f"it does not follow on entry {head.seqno} as that stands here"
    if not entry.is_signed(verify):
        yield "its signature is not its author's"
