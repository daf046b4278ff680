"""A hash-chained log of one author: entries, segment files, and the proof that a log forked.

Theory of operation
-------------------
Every author numbers its entries from 0, and every entry carries the digest of the one before,
so the newest digest (the *head*) commits to all of them. The logs of different authors do not
refer to each other: there is no order between them. An author that signs two different entries
with one number has forked its log; the pair is an `Equivocation`, which proves that to any peer
without further context.

On disk a log is a row of segment files, each a sequence of *records*: four bytes of length,
eight of checksum over length and entry, the entry. The chain covers all of an entry but its
signature and its length; the checksum covers these too, so no bit of a record can change
unseen. Bytes that are not a record may have been torn by a crash or may have rotted; the bytes
themselves do not tell which. A position on disk, up to which all must be records, decides it.

A crash may leave half a record at the end of the newest segment. That half must be cut off,
since its entry was never acknowledged. A decaying disk leaves the same picture, but there a cut
would be fatal: the entries were acknowledged, and the next entry would sign their number a
second time. So after the fsync of the segment, and before `Ledger.append` returns, one of two
*slots* records how far the log goes now: segment, bytes, head. Before that position, anything
that is not a record is rot. Only bytes after it may be torn.

The slots are written in turn, each in a sector of its own: if power fails during a write, the
other slot is intact. A slot is written only when the segment is on disk, so one crash never
leaves both a void slot and a torn record.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Final

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, PeerId, Signer, Verify, decode_peer_id_untrusted
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

DOMAIN: Final = "/shoal/ledger/1.0.0"
HEAD_DOMAIN: Final = "/shoal/ledger-head/1.0.0"
DIGEST_BYTES: Final = 32
"""Bytes of a digest, which is SHA-256."""
MAX_BODY: Final = 64 * KI
"""Maximum bytes of an entry's body. A verdict has about 300; evidence is named by its
digest."""
MAX_ENTRY: Final = MAX_BODY + KI
"""Maximum bytes of a whole entry: body, kind, author, digests and signature."""
MAX_KIND: Final = 32
"""Maximum characters of an entry's kind, a word chosen by a role. Ours have up to 7."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Signed entry. ``kind`` says how to read ``body``; ``wall`` (the author's clock) is for
    people."""

    author: PeerId
    seqno: int
    previous: bytes
    kind: str
    wall: int
    body: bytes
    signature: bytes

    @property
    def digest(self) -> bytes:
        """Digest that the next entry names. It covers everything but the signature."""
        return hashlib.sha256(self._signed()).digest()

    @property
    def bound(self) -> dict[int, bytes]:
        """Maps the numbers of this entry and of the one before it to their digests."""
        before = {self.seqno - 1: self.previous} if self.seqno else {}
        return {self.seqno: self.digest, **before}

    def _signed(self) -> bytes:
        return pack(
            [self.author.digest, self.seqno, self.previous, self.kind, self.wall, self.body]
        )

    def encode(self) -> bytes:
        """Return the bytes that are sent and stored."""
        return pack([self._signed(), self.signature])

    def is_signed(self, verify: Verify) -> bool:
        """Return True if the author's signature is valid."""
        return verify(self.author, DOMAIN, self._signed(), self.signature)


@dataclass(frozen=True, slots=True)
class Head:
    """End of a log: number and digest of its newest entry. An empty log has `EMPTY`."""

    seqno: int
    digest: bytes


EMPTY: Final = Head(-1, bytes(DIGEST_BYTES))
"""Head of a log without entries. The first entry has its digest as predecessor."""


def make_entry(head: Head, signer: Signer, kind: str, body: bytes, wall: float) -> Entry:
    """Sign a new entry that follows ``head``.

    Raises:
        ValueError: The kind or the body is too long.
    """
    if not 0 < len(kind) <= MAX_KIND or len(body) > MAX_BODY:
        raise ValueError(
            f"an entry has a kind of 1 to {MAX_KIND} characters and at most {MAX_BODY} bytes"
        )
    bare = Entry(signer.peer_id, head.seqno + 1, head.digest, kind, int(wall), body, b"")
    return replace(bare, signature=signer.sign(DOMAIN, bare._signed()))


def decode_entry_untrusted(data: bytes) -> Entry:
    """Decode an entry without checking its signature.

    Raises:
        BadMessage: The bytes are not an entry. Nothing else is raised, whatever the bytes.
    """
    if len(data) > MAX_ENTRY:
        raise BadMessage(
            f"a ledger entry of {len(data)} bytes is too long (at most {MAX_ENTRY})"
        )
    signed, signature = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="ledger entry"
    )
    kinds = (bytes, int, bytes, str, int, bytes)
    fields = fields_untrusted(unpack_untrusted(signed), *kinds, what="ledger entry")
    fields[0] = decode_peer_id_untrusted(fields[0])
    fields.append(signature)
    entry = Entry(*fields)
    sizes_ok = len(entry.previous) == DIGEST_BYTES and len(signature) == SIGNATURE_BYTES
    if not sizes_ok or not 0 <= entry.seqno < 2**63 or not 0 < len(entry.kind) <= MAX_KIND:
        raise BadMessage(
            "a ledger entry has a number, digest, kind or signature of the wrong size"
        )
    if len(entry.body) > MAX_BODY or entry.encode() != data:
        raise BadMessage("a ledger entry is too long, or not in its one canonical form")
    return entry


def check_link(head: Head, entry: Entry) -> Head:
    """Return the head after ``entry``.

    Raises:
        BadMessage: ``entry`` does not continue the log at ``head``.
    """
    if entry.seqno != head.seqno + 1 or entry.previous != head.digest:
        raise BadMessage(
            f"ledger entry {entry.seqno} does not continue the log at {head.seqno}"
        )
    return Head(entry.seqno, entry.digest)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """Author's signed claim of its log's end, used where entries would be too long."""

    author: PeerId
    seqno: int
    digest: bytes
    signature: bytes

    @property
    def bound(self) -> dict[int, bytes]:
        """Maps the number of the newest entry to its digest."""
        return {self.seqno: self.digest}

    def encode(self) -> bytes:
        """Return the bytes with the author, for a receiver that does not know whose head it
        is."""
        return pack([self.author.digest, *self._fields()])

    def brief(self) -> bytes:
        """Return the bytes without the author, for a receiver that knows it."""
        return pack(self._fields())

    def _fields(self) -> list[int | bytes]:
        return [self.seqno, self.digest, self.signature]

    def is_signed(self, verify: Verify) -> bool:
        """Return True if the author's signature is valid."""
        signed = _head_signed(self.author, self.seqno, self.digest)
        return verify(self.author, HEAD_DOMAIN, signed, self.signature)


def _head_signed(author: PeerId, seqno: int, digest: bytes) -> bytes:
    return pack([author.digest, seqno, digest])


def sign_head(head: Head, signer: Signer) -> SignedHead:
    """Sign ``head`` in the name of its author."""
    author = signer.peer_id
    signature = signer.sign(HEAD_DOMAIN, _head_signed(author, head.seqno, head.digest))
    return SignedHead(author, head.seqno, head.digest, signature)


def decode_brief_untrusted(author: PeerId, data: bytes) -> SignedHead:
    """Decode a head without its author, and without checking its signature.

    Raises:
        BadMessage: The bytes are not a head. Nothing else is raised, whatever the bytes.
    """
    # 9 of number, 34 of digest, 66 of signature, and those of the list.
    if len(data) > 112:
        raise BadMessage("the head of a ledger has at most 112 bytes")
    return _head_untrusted(
        author, *fields_untrusted(unpack_untrusted(data), int, bytes, bytes, what="ledger head")
    )


def _head_untrusted(author: PeerId, seqno: int, digest: bytes, signature: bytes) -> SignedHead:
    sizes_ok = len(digest) == DIGEST_BYTES and len(signature) == SIGNATURE_BYTES
    if not sizes_ok or not 0 <= seqno < 2**63:
        raise BadMessage("a ledger head has a number, digest or signature of the wrong size")
    return SignedHead(author, seqno, digest, signature)


Statement = Entry | SignedHead
"""Signed statement of an author about its log."""


def decode_statement_untrusted(data: bytes) -> Statement:
    """Decode an entry or a signed head without checking its signature.

    Raises:
        BadMessage: The bytes are neither. Nothing else is raised, whatever the bytes.
    """
    value = unpack_untrusted(data)
    if isinstance(value, list) and len(value) == 4:
        author, *rest = fields_untrusted(value, bytes, int, bytes, bytes, what="ledger head")
        return _head_untrusted(decode_peer_id_untrusted(author), *rest)
    return decode_entry_untrusted(data)


def decode_fork_untrusted(data: bytes) -> Equivocation[Statement]:
    """Decode a proof of equivocation. The caller verifies the signatures.

    Raises:
        BadMessage: The bytes are no such proof. Nothing else is raised, whatever the bytes.
    """
    # Bytes of a proof that a log forked: two entries and their framing.
    if len(data) > 2 * MAX_ENTRY + 16:
        raise BadMessage(f"a ledger fork of {len(data)} bytes is too long")
    first, second = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="ledger fork")
    return Equivocation(decode_statement_untrusted(first), decode_statement_untrusted(second))


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a record in its segment, including the record's head, and its entry's
    kind."""

    offset: int
    length: int
    kind: str


def checksum(data: bytes) -> bytes:
    """Return 8 bytes that detect decay of ``data`` on the disk, not manipulation: one damaged
    record in 2**64 passes."""
    return hashlib.sha256(data).digest()[:8]


def encode_record(entry: Entry) -> bytes:
    """Return an entry in the form that segment files hold."""
    encoded = entry.encode()
    length = len(encoded).to_bytes(4, "big")
    return length + checksum(length + encoded) + encoded


def read_record(data: bytes, offset: int = 0) -> tuple[Entry, int]:
    """Return the entry of the record at ``offset``, and the end of the record.

    Raises:
        BadMessage: There is no whole and sound record at ``offset``.
    """
    length = data[offset : offset + 4]
    start = offset + 12
    end = start + int.from_bytes(length, "big")
    if end - start > MAX_ENTRY:
        raise BadMessage(f"a record of {end - start} bytes is too long (at most {MAX_ENTRY})")
    if end > len(data) or start > len(data):
        raise BadMessage("a record is cut off")
    encoded = data[start:end]
    if checksum(length + encoded) != data[offset + 4 : start]:
        raise BadMessage("a record does not have its checksum")
    return decode_entry_untrusted(encoded), end


SLOT_BYTES: Final = 4 * KI
"""Distance between the slots: the largest sector of any disk, so that no write touches both."""
_FIELDS: Final = struct.Struct(f">8sQQQq{DIGEST_BYTES}s")
_MAGIC: Final = b"shoal/l2"


@dataclass(frozen=True, slots=True)
class Synced:
    """Content of a slot: all segments before ``segment``, and its first ``size`` bytes, are on
    the disk, and the log ends there with ``head``."""

    turn: int
    """Number of the write. The slot with the higher number is the newer one."""
    segment: int
    size: int
    head: Head

    @property
    def offset(self) -> int:
        """Offset of the slot in the file."""
        return self.turn % 2 * SLOT_BYTES

    def encode(self) -> bytes:
        """Return the bytes of the slot."""
        fields = _FIELDS.pack(
            _MAGIC, self.turn, self.segment, self.size, self.head.seqno, self.head.digest
        )
        return fields + checksum(fields)


NOTHING: Final = Synced(0, 0, 0, EMPTY)
"""State of a ledger without entries."""


def encode_slots(synced: Synced) -> tuple[Synced, bytes]:
    """Return the newer of two slots with the content of ``synced``, and the file with both."""
    even = Synced(synced.turn + synced.turn % 2, synced.segment, synced.size, synced.head)
    odd = Synced(even.turn + 1, synced.segment, synced.size, synced.head)
    return odd, even.encode().ljust(SLOT_BYTES, b"\0") + odd.encode()


def read_slots(data: bytes) -> tuple[Synced | None, list[int]]:
    """Return the newer of the sound slots, or None, and the offsets of damaged slots. Never
    raises."""
    slots = {offset: _read_slot(data, offset) for offset in (0, SLOT_BYTES)}
    newest = max(filter(None, slots.values()), key=lambda slot: slot.turn, default=None)
    return newest, [offset for offset, slot in slots.items() if slot is None]


def _read_slot(data: bytes, offset: int) -> Synced | None:
    fields = data[offset : offset + _FIELDS.size]
    end = offset + _FIELDS.size
    if data[end : end + 8] != checksum(fields):
        return None
    magic, turn, segment, size, seqno, digest = _FIELDS.unpack(fields)
    slot = Synced(turn, segment, size, Head(seqno, digest))
    return slot if magic == _MAGIC and slot.offset == offset else None
