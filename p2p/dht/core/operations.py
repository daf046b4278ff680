"""The state of gets, puts and joins, and what each open request is for.

An operation runs one `Search` per key, and a search is a `Lookup` that knows its operation.
Each request that is open names its purpose: which search, store, ping or seed it belongs to.
All of these are state without decisions: `p2p.dht.core.requester` makes those, and writes the
fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.dht.core.lookup import Lookup
from p2p.dht.core.validation import RecordValidator, RecordValidity
from p2p.dht.messages import Contact
from p2p.dht.record import Record, decode_record_untrusted
from p2p.errors import BadMessage
from p2p.identity import PeerId

MAX_FOUND: Final = 512
"""Publishers that one get returns: eight times as many as a node holds under a key. Holders
that lie return others than honest ones do, up to 64 each."""
MAX_VALIDATED: Final = 1024
"""Records that one get remembers as valid: two editions of each, 1.5 MiB at most."""


@dataclass(slots=True, eq=False)
class GetOperation:
    """Reading the records under all keys of one name."""

    token: int
    namespace: str
    name: bytes
    times_out: float = math.inf
    """When it ends in any case."""
    settles: float = math.inf
    """When it ends if by then it is still found well enough (`Requester._note_found`); infinite
    while it is not."""
    searches: int = 0
    """Lookups not yet finished."""
    records: dict[PeerId, Record] = field(default_factory=dict)
    """The newest valid record of each publisher."""
    found: dict[bytes, bool] = field(default_factory=dict)
    """Keys under which records were found at nodes that should hold them; True if that was so
    on every path."""
    validated: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    """(key, blob) of what was found valid, so that the eighth copy costs no signature."""

    @property
    def ends_at(self) -> float:
        """When it ends though lookups are left."""
        return min(self.settles, self.times_out)

    def note_found(self, search: Search) -> None:
        """A lookup has found values somewhere, or has been told of nearer nodes, so that what
        farther ones had is no longer enough."""
        if search.lookup.found_by:
            self.found[search.key] = search.lookup.found_everywhere
        elif not search.finished:
            self.found.pop(search.key, None)

    def take(self, record: Record) -> None:
        """Keep a valid record if it is this publisher's newest."""
        if (record.namespace, record.name) != (self.namespace, self.name):
            return
        known = self.records.get(record.publisher)
        if known is None and len(self.records) >= MAX_FOUND:
            return
        if known is None or known.rank < record.rank:
            self.records[record.publisher] = record

    def take_untrusted(
        self, key: bytes, blobs: Sequence[bytes], validator: RecordValidator, wall: float
    ) -> bool:
        """Take what a holder returned; whether any of it is valid. Raise `BadMessage` if one is
        forged."""
        publishers: dict[PeerId, None] = {}
        found = False
        for blob in blobs:
            record = decode_record_untrusted(blob)
            if record.publisher in publishers:
                raise BadMessage("a holder returned two DHT records of one publisher")
            publishers[record.publisher] = None
            found |= self._take_if_valid(key, blob, record, validator, wall)
        return found

    def _take_if_valid(
        self, key: bytes, blob: bytes, record: Record, validator: RecordValidator, wall: float
    ) -> bool:
        if (key, blob) in self.validated:
            return True
        validity = validator.validate(record, key, wall)
        if validity is RecordValidity.FORGED:
            raise BadMessage("a holder returned a forged DHT record")
        if validity is not RecordValidity.VALID:
            return False
        if len(self.validated) < MAX_VALIDATED:
            self.validated[(key, blob)] = None
        self.take(record)
        return True


@dataclass(slots=True, eq=False)
class PutOperation:
    """Storing one record at the nearest nodes of each of its keys."""

    token: int | None
    """None for a renewal: no caller waits for it."""
    record: Record
    blob: bytes
    searches: int = 0
    """Lookups not yet finished."""
    stores: int = 0
    """STORE requests not yet answered."""
    copies: int = 0
    """Nodes that hold the record, over all keys."""

    @property
    def is_done(self) -> bool:
        """Whether no lookup and no STORE is open."""
        return not self.searches and not self.stores


@dataclass(slots=True, eq=False)
class JoinOperation:
    """Asking seeds for our own neighbourhood, then looking ourselves up."""

    token: int | None
    """None for a refresh: no caller waits for it."""
    asked: int = 0
    """Seeds that have not answered yet."""
    search: Search | None = None
    """The lookup of our own id, from the first answer of a seed on."""


@dataclass(slots=True, eq=False)
class RefreshOperation:
    """Looking up a random id of a bucket, to learn its contacts."""


Awaited = GetOperation | PutOperation | JoinOperation
"""Operations for which a caller may wait."""
Operation = Awaited | RefreshOperation


@dataclass(slots=True, eq=False)
class Search:
    """One lookup on behalf of an operation."""

    lookup: Lookup
    operation: Operation
    finished: bool = False
    """Whether the operation was told of the end."""

    @property
    def key(self) -> bytes:
        """The target of the lookup."""
        return self.lookup.target


# What an open request is for. The requester finds it beside the request when an answer comes.


@dataclass(frozen=True, slots=True)
class LookupPurpose:
    """A FIND_NODE or FIND_VALUE of a lookup."""

    search: Search
    contact: Contact


@dataclass(frozen=True, slots=True)
class StorePurpose:
    """A STORE; ``spares`` are the next nearest nodes, should this one refuse."""

    operation: PutOperation
    key: bytes
    contact: Contact
    spares: list[Contact]


@dataclass(frozen=True, slots=True)
class PingPurpose:
    """A PING: of ``contact``, to see if it is alive, or of a peer that has asked us something
    (None)."""

    contact: Contact | None


@dataclass(frozen=True, slots=True)
class SeedPurpose:
    """A FIND_NODE to a seed, whose contact is not known yet."""

    operation: JoinOperation


Purpose = LookupPurpose | StorePurpose | PingPurpose | SeedPurpose
