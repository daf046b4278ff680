"""Inspection of a ledger by someone who trusts neither its author nor its disk.

Theory of operation
-------------------
Every byte of a ledger's folder is bound by something: a record by its checksum, an entry by the
digest that the next one names and by its author's signature, the last entry by the head in the
file ``synced``, each slot of that file by its own checksum, and the space between the slots is
zero. So no byte can be changed without one of these failing, and `inspect` says which, and of
which entry. Behind a damaged record it goes on with the next segment.

The folder may be a stranger's, made to cost whoever audits it. So time is linear in its bytes,
and memory is one segment, `MAX_FLAWS` sentences, and what the caller keeps of the entries.

What lies behind the bytes that ``synced`` vouches for was never acknowledged: half a record
there was torn by a crash, and is no fault. `Ledger.recover` decides the same when a node
starts, and stops at the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import (
    EMPTY,
    NOTHING,
    SLOT_BYTES,
    Entry,
    Head,
    Synced,
    check_link,
    read_record,
    read_slots,
)

MAX_FLAWS: Final = 1000
"""Maximum number of flaws that are listed; of others only their number is kept."""


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
    acknowledged: bytes | None = None
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
        offset = 0
        try:
            while offset < len(data):
                entry, end = read_record(data, offset)
                found.author = found.author or entry.author
                if entry.author != found.author:
                    raise BadMessage(f"it is an entry of another author, {entry.author}")
                if not entry.is_signed(verify):
                    raise BadMessage("its signature is not its author's")
                head = check_link(head or Head(entry.seqno - 1, entry.previous), entry)
                if synced is not None and head.seqno == synced.head.seqno:
                    acknowledged = head.digest
                found.count, found.head, offset = found.count + 1, head, end
                take(entry)
            if offset < owed:
                raise BadMessage(f"it ends there, and should have {owed} bytes")
        except BadMessage as error:
            flaw = Flaw(name, offset, -1 if head is None else head.seqno + 1, str(error))
            if offset < owed:
                found.blame(flaw)
            else:
                found.torn = flaw
            head = None  # it is lost: the next entry is accepted whatever its predecessor
    if synced is not None and synced.segment >= due and synced.size:
        found.blame(Flaw("synced", 0, -1, f"{synced.segment:08d}.seg is missing"))
    if synced is not None and synced.head != EMPTY:  # the head that was acknowledged
        number = synced.head.seqno
        if acknowledged is None and not found.flaws:
            found.blame(Flaw("synced", 0, number, "the entry that it names is missing"))
        elif acknowledged not in (None, synced.head.digest):
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
