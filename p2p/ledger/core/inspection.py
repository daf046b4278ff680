"""A ledger looked at by someone who trusts neither its author nor its disk.

Theory of operation
-------------------
Every byte of a ledger's folder is bound by something: a record by its checksum, an entry by the
digest that the next one names and by its author's signature, the last entry by the head in the
file ``synced``, each slot of that file by its own checksum, and the space between the slots is
zero. So no byte can be changed without one of these failing, and `inspect` says which, and of
which entry. It goes on behind a damaged record, since the next one may be whole.

What lies behind the bytes that ``synced`` vouches for was never acknowledged: half a record
there was torn by a crash, and is no fault. `Ledger.recover` decides the same when a node
starts, and stops at the first fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import EMPTY, Entry, Head, read_record
from p2p.ledger.core.synced import NOTHING, SLOT_BYTES, Synced, read_slots, torn_slots


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that is not as its author wrote it."""

    file: str
    offset: int
    """The byte at which what is wrong begins."""
    entry: int
    """The number of the entry that it is about; -1 if it is about none."""
    what: str

    def __str__(self) -> str:
        about = "" if self.entry < 0 else f", entry {self.entry}"
        return f"{self.file}, byte {self.offset}{about}: {self.what}"


@dataclass(slots=True)
class Inspection:
    """What was found in a ledger's folder."""

    author: PeerId | None = None
    """Of the first entry; None in an empty ledger."""
    entries: list[Entry] = field(default_factory=list)
    """Those that are whole and signed, in their order."""
    flaws: list[Flaw] = field(default_factory=list)
    torn: Flaw | None = None
    """What a crash left at the end, which was never acknowledged."""

    @property
    def head(self) -> Head:
        """The newest of the entries."""
        newest = self.entries[-1] if self.entries else None
        return EMPTY if newest is None else Head(newest.seqno, newest.digest)


def inspect(segments: Mapping[str, bytes], marks: bytes | None, verify: Verify) -> Inspection:
    """Look at the segment files by name, and at the file ``synced``; None if there is none."""
    found = Inspection()
    synced = _read_marks(found, marks, has_segments=bool(segments))
    head: Head | None = EMPTY
    due, newest = 0, max(segments, default="")
    for name in sorted(segments):
        index = int(name[:8])
        if index != due:
            lost = -1 if head is None else head.seqno + 1
            found.flaws.append(Flaw(name, 0, lost, f"{due:08d}.seg is missing"))
            head = None
        data, due = segments[name], index + 1
        owed = _owed(index, len(data), synced, is_newest=name == newest)
        head = _read(found, name, data, head, owed, verify)
    if synced is not None and synced.segment >= due and synced.size:
        found.flaws.append(Flaw("synced", 0, -1, f"{synced.segment:08d}.seg is missing"))
    _check_end(found, synced)
    return found


def _read_marks(found: Inspection, marks: bytes | None, *, has_segments: bool) -> Synced | None:
    if marks is None:
        if has_segments:
            found.flaws.append(Flaw("synced", 0, -1, "it is missing"))
        return None
    synced, _ = read_slots(marks)
    for at in torn_slots(marks):
        what = "a mark is damaged, or a crash tore it"
        found.flaws.append(Flaw("synced", at, -1, what))
    slot = len(NOTHING.encode())
    for start, end in ((slot, SLOT_BYTES), (SLOT_BYTES + slot, len(marks))):
        wrong = [at for at in range(start, min(end, len(marks))) if marks[at]]
        if wrong:
            what = f"something stands outside the marks, up to byte {wrong[-1]}"
            found.flaws.append(Flaw("synced", wrong[0], -1, what))
    return synced


def _owed(index: int, size: int, synced: Synced | None, *, is_newest: bool) -> int:
    """How many bytes of a segment must be whole records."""
    if not is_newest or synced is None or index < synced.segment:
        return size
    return synced.size if index == synced.segment else 0


def _read(
    found: Inspection, name: str, data: bytes, head: Head | None, owed: int, verify: Verify
) -> Head | None:
    """Take up the entries of one segment, which continues the log at ``head``, and say what is
    its head then. None stands for a head that is lost: whatever comes next is believed."""
    offset = 0
    while offset < len(data):
        number = -1 if head is None else head.seqno + 1
        try:
            entry, end = read_record(data, offset)
        except BadMessage as error:
            end = _next_record(data, offset)
            if offset >= owed and end == len(data):
                found.torn = Flaw(name, offset, number, str(error))
            else:
                what = f"{error} (bytes {offset} to {end - 1})"
                found.flaws.append(Flaw(name, offset, number, what))
            head, offset = None, end
            continue
        found.author = found.author or entry.author
        head = head or Head(entry.seqno - 1, entry.previous)
        faults = list(_faults(entry, found.author, head, verify))
        found.flaws += [Flaw(name, offset, entry.seqno, fault) for fault in faults]
        if not faults:
            found.entries.append(entry)
        head, offset = Head(entry.seqno, entry.digest), end
    if len(data) < owed:
        what = f"it ends there, and should have {owed} bytes"
        found.flaws.append(Flaw(name, len(data), -1 if head is None else head.seqno + 1, what))
    return head


def _next_record(data: bytes, offset: int) -> int:
    """Where the next whole record behind ``offset`` begins; the end of ``data`` if none does.
    The length of a record begins with a zero byte."""
    while (offset := data.find(b"\0", offset + 1)) >= 0:
        with suppress(BadMessage):
            read_record(data, offset)
            return offset
    return len(data)


def _faults(entry: Entry, author: PeerId, head: Head, verify: Verify) -> Iterator[str]:
    if entry.author != author:
        yield f"it is an entry of another author, {entry.author}"
    if entry.seqno != head.seqno + 1:
        yield f"it should have number {head.seqno + 1}"
    elif entry.previous != head.digest:
        yield f"it does not follow on entry {head.seqno} as that stands here"
    if not entry.is_signed(verify):
        yield "its signature is not its author's"


def _check_end(found: Inspection, synced: Synced | None) -> None:
    """Hold the entries against the head that was acknowledged."""
    if synced is None or synced.head == EMPTY:
        return
    number = synced.head.seqno
    named = [entry for entry in found.entries if entry.seqno == number]
    if not named and not found.flaws:
        found.flaws.append(Flaw("synced", 0, number, "the entry that it names is missing"))
    elif named and named[0].digest != synced.head.digest:
        found.flaws.append(Flaw("synced", 0, number, "the entry that it names was another"))
