"""Reads a ledger's files: for its own node at the start, and for whoever trusts neither its
author nor its disk.

Theory of operation
-------------------
Every byte of a ledger's folder is bound by something: a record by its checksum, an entry by the
digest that the next one names and by its author's signature, the last entry by the head in the
file ``synced``, each slot of that file by its own checksum, and the space between the slots is
zero. So no byte can be changed without one of these failing, and `Inspector` says which, and of
which entry. Behind a damaged record it goes on with the next segment.

What lies behind the bytes that ``synced`` vouches for was never acknowledged: half a record
there was torn by a crash, and is no fault. If a slot is damaged, it may have been the newer
one, so every byte must be a record: one crash never leaves both a void slot and a torn record.

The folder may be a stranger's, made to cost whoever audits it. So time is linear in its bytes,
and memory is one segment, `MAX_FLAWS` sentences, and what the caller keeps of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    Place,
    Synced,
    check_link,
    read_record,
    read_slots,
)

SYNCED: Final = "synced"
"""Name of the file that says how much of the ledger is on disk (`p2p.ledger.core.chain`)."""
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


class Inspector:
    """Reads the files of a ledger, one segment after the other, and says in `found` what is
    wrong with them."""

    def __init__(
        self,
        names: Collection[str],
        marks: bytes | None,
        verify: Verify,
        take: Callable[[Entry, Place], object],
        author: PeerId | None = None,
    ) -> None:
        """Prepare to read the segments called ``names``.

        Args:
            names: Names of the segment files.
            marks: The file ``synced``; None if there is none.
            verify: Verifies signatures.
            take: Called with each whole and signed entry, and its place in its segment.
            author: Author of the ledger; by default that of its first entry.
        """
        self.found = Inspection(author=author)
        self._verify = verify
        self._take = take
        self._newest = max(names, default="")
        self._due = 0
        """Number of the next segment."""
        self._head: Head | None = EMPTY
        """Head after the last entry; None behind a damaged record."""
        self._acknowledged: bytes | None = None
        """Digest of the entry that ``synced`` names."""
        self.synced = _read_marks(self.found, marks, has_segments=bool(names))
        self.flaws_of_marks = len(self.found.flaws)
        """Number of flaws of the file ``synced`` itself, which are the first in `found`."""

    def read(self, name: str, data: bytes) -> None:
        """Check the next segment, in the order of their names."""
        found, synced, index = self.found, self.synced, int(name[:8])
        if index != self._due:
            lost = -1 if self._head is None else self._head.seqno + 1
            found.blame(Flaw(name, 0, lost, f"{self._due:08d}.seg is missing"))
            self._head = None
        self._due = index + 1
        owed = len(data)  # how many of its bytes must be whole records
        if synced is not None and name == self._newest and index >= synced.segment:
            size = synced.size if index == synced.segment else 0
            owed = max(size, owed) if self.flaws_of_marks else size
        offset = 0
        try:
            while offset < len(data):
                entry, end = read_record(data, offset)
                found.author = found.author or entry.author
                if entry.author != found.author:
                    raise BadMessage(f"it is an entry of another author, {entry.author}")
                if not entry.is_signed(self._verify):
                    raise BadMessage("its signature is not its author's")
                head = self._head or Head(entry.seqno - 1, entry.previous)
                self._head = found.head = check_link(head, entry)
                if synced is not None and entry.seqno == synced.head.seqno:
                    self._acknowledged = found.head.digest
                self._take(entry, Place(offset, end - offset, entry.kind))
                found.count, offset = found.count + 1, end
            if offset < owed:
                raise BadMessage(f"it ends there, and should have {owed} bytes")
        except BadMessage as error:
            number = -1 if self._head is None else self._head.seqno + 1
            flaw = Flaw(name, offset, number, str(error))
            if offset < owed:
                found.blame(flaw)
            else:
                found.torn = flaw
            self._head = None  # it is lost: the next entry is accepted whatever its predecessor

    def end(self) -> None:
        """Compare what was read with what was acknowledged."""
        found, synced = self.found, self.synced
        if synced is None:
            return
        if synced.segment >= self._due and synced.size:
            found.blame(Flaw(SYNCED, 0, -1, f"{synced.segment:08d}.seg is missing"))
        if synced.head != EMPTY:
            number = synced.head.seqno
            if self._acknowledged is None and len(found.flaws) == self.flaws_of_marks:
                found.blame(Flaw(SYNCED, 0, number, "the entry that it names is missing"))
            elif self._acknowledged not in (None, synced.head.digest):
                found.blame(Flaw(SYNCED, 0, number, "the entry that it names was another"))


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
    entries: list[Entry] = []
    keep = take or entries.append
    inspector = Inspector(segments, marks, verify, lambda entry, _: keep(entry))
    inspector.found.entries = entries
    for name in sorted(segments):
        inspector.read(name, segments[name])
    inspector.end()
    return inspector.found


def _read_marks(found: Inspection, marks: bytes | None, *, has_segments: bool) -> Synced | None:
    if marks is None:
        if has_segments:
            found.blame(Flaw(SYNCED, 0, -1, "it is missing"))
        return None
    synced, torn = read_slots(marks)
    for at in torn:
        found.blame(Flaw(SYNCED, at, -1, "a mark is damaged, or a crash tore it"))
    slot = len(NOTHING.encode())
    for start, end in ((slot, SLOT_BYTES), (SLOT_BYTES + slot, len(marks))):
        wrong = [at for at in range(start, min(end, len(marks))) if marks[at]]
        if wrong:
            what = f"something stands outside the marks, up to byte {wrong[-1]}"
            found.blame(Flaw(SYNCED, wrong[0], -1, what))
    return synced
