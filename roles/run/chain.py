"""A hash-chained log of one author: what an entry is, what a segment file holds, what proves a lie.

Theory of operation
-------------------
Every author numbers its entries from 0, and every entry carries the digest of the one before, so the newest
digest (the *head*) commits to all of them. Order between authors does not matter: everybody holds the union
of all logs. An author that signs two different entries with one number has told two stories; the pair is an
`Equivocation`, which convinces anybody without further context.

On disk a log is a row of segment files, each a sequence of length-prefixed entries. After a crash the last
segment may end in half an entry; `read_segment` says how many bytes are whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, PeerId, Signer, Verify, decode_peer_id_untrusted
from p2p.wire import KI, decode_varint_untrusted, fields_untrusted, pack, unpack_untrusted

DOMAIN: Final = "/shoal/ledger/1.0.0"
DIGEST_BYTES: Final = 32
GENESIS: Final = bytes(DIGEST_BYTES)
"""What the first entry names as the one before."""
MAX_BODY: Final = 64 * KI
"""Bytes an entry may say. A verdict has about 300; evidence goes by digest."""
MAX_ENTRY: Final = MAX_BODY + KI
"""With kind, author, digests, signature."""
MAX_KIND: Final = 32
"""Characters."""
_ZEROS: Final = 8
"""Bytes at the end of a file that the file system had not written. No signature ends so, but one in 2**64."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One signed statement. ``kind`` says how to read ``body``; ``wall`` (author's clock) is for people."""

    author: PeerId
    seqno: int
    previous: bytes
    kind: str
    wall: int
    body: bytes
    signature: bytes

    @property
    def digest(self) -> bytes:
        """What the next entry names; covers everything but the signature."""
        return hashlib.sha256(self._signed()).digest()

    def _signed(self) -> bytes:
        return pack([self.author.digest, self.seqno, self.previous, self.kind, self.wall, self.body])

    def encode(self) -> bytes:
        """The bytes that travel and are stored."""
        return pack([self._signed(), self.signature])

    def is_signed(self, verify: Verify) -> bool:
        """Whether the author really said it."""
        return verify(self.author, DOMAIN, self._signed(), self.signature)


@dataclass(frozen=True, slots=True)
class Head:
    """Where a log ends: the number and digest of its newest entry. Empty logs have `EMPTY`."""

    seqno: int
    digest: bytes


EMPTY: Final = Head(-1, GENESIS)


def make_entry(head: Head, signer: Signer, kind: str, body: bytes, wall: float) -> Entry:
    """The entry behind ``head``, signed. Raises `ValueError` if kind or body are too long."""
    if not 0 < len(kind) <= MAX_KIND or len(body) > MAX_BODY:
        raise ValueError(f"an entry has a kind of 1 to {MAX_KIND} characters and at most {MAX_BODY} bytes")
    bare = Entry(signer.peer_id, head.seqno + 1, head.digest, kind, int(wall), body, b"")
    signature = signer.sign(DOMAIN, bare._signed())
    return Entry(bare.author, bare.seqno, bare.previous, kind, bare.wall, body, signature)


def decode_entry_untrusted(data: bytes) -> Entry:
    """Raise `BadMessage`, and nothing else, whatever the bytes. The signature is not judged here."""
    if len(data) > MAX_ENTRY:
        raise BadMessage(f"a ledger entry of {len(data)} bytes is too long (at most {MAX_ENTRY})")
    signed, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="ledger entry")
    kinds = (bytes, int, bytes, str, int, bytes)
    author, seqno, previous, kind, wall, body = fields_untrusted(
        unpack_untrusted(signed), *kinds, what="ledger entry"
    )
    entry = Entry(decode_peer_id_untrusted(author), seqno, previous, kind, wall, body, signature)
    sizes_ok = len(entry.previous) == DIGEST_BYTES and len(signature) == SIGNATURE_BYTES
    if not sizes_ok or not 0 <= entry.seqno < 2**63 or not 0 < len(entry.kind) <= MAX_KIND:
        raise BadMessage("a ledger entry has a number, digest, kind or signature of the wrong size")
    if len(entry.body) > MAX_BODY or entry.encode() != data:
        raise BadMessage("a ledger entry is too long, or not in its one canonical form")
    return entry


def check_link(head: Head, entry: Entry) -> Head:
    """The head after ``entry``. Raises `BadMessage` if ``entry`` does not continue the log at ``head``."""
    if entry.seqno != head.seqno + 1 or entry.previous != head.digest:
        raise BadMessage(f"ledger entry {entry.seqno} does not continue the log at {head.seqno}")
    return Head(entry.seqno, entry.digest)


@dataclass(frozen=True, slots=True)
class Equivocation:
    """Two different entries with one number by one author: proof of a lie, once `is_proven` has judged it."""

    first: Entry
    second: Entry

    def __post_init__(self) -> None:
        a, b = self.first, self.second
        if a.author != b.author or a.seqno != b.seqno or a.digest == b.digest:
            raise ValueError("an equivocation is two entries of one author and number that differ")

    @property
    def culprit(self) -> PeerId:
        """Who told two stories."""
        return self.first.author

    def is_proven(self, verify: Verify) -> bool:
        """Whether both signatures are the author's."""
        return self.first.is_signed(verify) and self.second.is_signed(verify)

    def encode(self) -> bytes:
        """The bytes that convince others."""
        return pack([self.first.encode(), self.second.encode()])


def decode_equivocation_untrusted(data: bytes) -> Equivocation:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Ask `Equivocation.is_proven` next."""
    if len(data) > 2 * MAX_ENTRY + 16:
        raise BadMessage(f"an equivocation of {len(data)} bytes is too long")
    first, second = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="equivocation")
    try:
        return Equivocation(decode_entry_untrusted(first), decode_entry_untrusted(second))
    except ValueError as error:
        raise BadMessage(str(error)) from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry lies within its segment: the bytes behind its length prefix, and what it is."""

    offset: int
    length: int
    kind: str


@dataclass(frozen=True, slots=True)
class Segment:
    """What `read_segment` found: whole entries, the head behind them, and the bytes they take.

    ``torn``: what lies behind is half an entry, as a crash leaves it. Anything else there is rot, and to
    write over it would be to tell a second story.
    """

    places: Sequence[Place]
    head: Head
    whole: int
    last: Entry | None
    torn: bool


def read_segment(data: bytes, head: Head, author: PeerId) -> Segment:
    """Check one segment file that continues the log at ``head``; stops before a torn or rotten tail.

    Hash links are checked for every entry. Signatures are not: the digest in the head commits to all of
    them, so the caller verifies the last entry's (`Entry.is_signed`). Never raises.
    """
    places: list[Place] = []
    offset, last = 0, None
    while offset < len(data):
        try:
            prefix = decode_varint_untrusted(data, offset)
            if prefix is None or sum(prefix) > len(data):
                break
            length, start = prefix
            entry = decode_entry_untrusted(data[start : start + length])
            if entry.author != author:
                break
            head = check_link(head, entry)
        except BadMessage:
            break
        places.append(Place(start, length, entry.kind))
        last, offset = entry, start + length
    return Segment(tuple(places), head, offset, last, _is_torn(data, offset))


def _is_torn(data: bytes, offset: int) -> bool:
    """Whether an entry cut off (process killed) or ending in zeros (power lost) starts at ``offset``."""
    if data.endswith(bytes(_ZEROS)):
        return True
    try:
        prefix = decode_varint_untrusted(data, offset)
    except BadMessage:
        return False
    return prefix is None or (prefix[0] <= MAX_ENTRY and sum(prefix) > len(data))
