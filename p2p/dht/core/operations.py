"""What a DHT node is in the middle of: reads, writes, joins, and the lookups they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.dht.core.lookup import Lookup
from p2p.dht.messages import Contact
from p2p.dht.record import Judgement, Record, RecordJudge, decode_record_untrusted
from p2p.errors import BadMessage
from p2p.identity import PeerId

MAX_FOUND: Final = 512
"""Publishers that one reading returns: eight times as many as a node holds under a key. Holders that lie
return others than they all do, up to 64 each."""
MAX_JUDGED: Final = 1024
"""Records that one reading remembers as valid: two editions of each, 1.5 MiB at most."""


@dataclass(slots=True, eq=False)
class Reading:
    """Records under all keys of one name."""

    token: int
    namespace: str
    name: bytes
    searches: int = 0
    """Lookups not yet finished."""
    found: dict[bytes, bool] = field(default_factory=dict)
    """Keys under which records were found; True if that was so on every path."""
    settled: bool = False
    """Found well enough: what is left has little time."""
    records: dict[PeerId, Record] = field(default_factory=dict)
    judged: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    """(key, blob) of what was found valid, so that the eighth copy costs no signature."""

    def take(self, record: Record) -> None:
        """Keep a judged record if it is this publisher's newest."""
        if (record.namespace, record.name) != (self.namespace, self.name):
            return
        known = self.records.get(record.publisher)
        if known is None and len(self.records) >= MAX_FOUND:
            return
        if known is None or known.rank < record.rank:
            self.records[record.publisher] = record

    def take_untrusted(self, key: bytes, blobs: Sequence[bytes], judge: RecordJudge, wall: float) -> bool:
        """Judge what a holder returned; whether it is worth anything. Raise `BadMessage` if it is forged."""
        publishers: dict[PeerId, None] = {}
        fresh = False
        for blob in blobs:
            record = decode_record_untrusted(blob)
            if record.publisher in publishers:
                raise BadMessage("a holder returned two DHT records of one publisher")
            publishers[record.publisher] = None
            fresh |= self._is_worth(key, blob, record, judge, wall)
        return fresh

    def _is_worth(self, key: bytes, blob: bytes, record: Record, judge: RecordJudge, wall: float) -> bool:
        if (key, blob) in self.judged:
            return True
        verdict = judge.judge(record, key, wall)
        if verdict is Judgement.FORGED:
            raise BadMessage("a holder returned a forged DHT record")
        if verdict is not Judgement.VALID:
            return False
        if len(self.judged) < MAX_JUDGED:
            self.judged[(key, blob)] = None
        self.take(record)
        return True


@dataclass(slots=True, eq=False)
class Writing:
    """One record on its way to the nearest nodes of each of its keys."""

    token: int | None
    record: Record
    blob: bytes
    searches: int = 0
    stores: int = 0
    """Stores not yet answered."""
    copies: int = 0


@dataclass(slots=True, eq=False)
class Joining:
    """Asking seeds for our own neighbourhood, then looking ourselves up."""

    token: int | None
    asked: int = 0
    """Seeds that have not answered yet."""
    search: Search | None = None


@dataclass(slots=True, eq=False)
class Refreshing:
    """Looking up a random id, to meet who lives there."""


@dataclass(slots=True, eq=False)
class Replicating:
    """Handing what we hold under one key to the nodes nearest to it."""

    key: bytes


Operation = Reading | Writing | Joining | Refreshing | Replicating


@dataclass(slots=True, eq=False)
class Search:
    """One lookup on behalf of an operation."""

    lookup: Lookup
    operation: Operation
    finished: bool = False

    @property
    def key(self) -> bytes:
        """The target."""
        return self.lookup.target


@dataclass(frozen=True, slots=True)
class Asking:
    """The purpose of a FIND_NODE or FIND_VALUE."""

    search: Search
    contact: Contact


@dataclass(frozen=True, slots=True)
class Storing:
    """The purpose of a STORE; ``spares`` are the next nearest, should this one refuse."""

    writing: Writing | None
    key: bytes
    contact: Contact
    spares: list[Contact]


@dataclass(frozen=True, slots=True)
class Probing:
    """The purpose of a PING."""

    contact: Contact | None


@dataclass(frozen=True, slots=True)
class Seeding:
    """The purpose of a FIND_NODE to a peer whose place is not known yet."""

    joining: Joining


Purpose = Asking | Storing | Probing | Seeding
