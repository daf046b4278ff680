"""The answering half of a DHT node: what it tells strangers, and how much of that each of them gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from p2p.dht.messages import (
    MAX_CONTACTS,
    Contact,
    FindNode,
    FindValue,
    Nodes,
    Ping,
    Pong,
    Reply,
    Request,
    Store,
    Stored,
    Values,
)
from p2p.dht.record import Judgement, RecordJudge, decode_record_untrusted
from p2p.dht.store import Holding, RecordStore
from p2p.errors import BadMessage
from p2p.identity import PeerId

if TYPE_CHECKING:
    from p2p.dht.table import ContactTable

BURST: Final = 200.0
"""Requests a peer may make at once: it publishes thirty records under three keys, or joins."""
RATE: Final = 20.0
"""Requests a second after that; a lookup asks each node once. Costs us 2 to 4 ms of each second."""
MAX_METERED: Final = 4096
"""Peers whose requests are counted; the longest silent are forgotten, by then with a full allowance."""


class Meter:
    """A token bucket per peer, so that one flooding peer is answered slowly and everybody else at once."""

    def __init__(self) -> None:
        self._left: dict[PeerId, tuple[float, float]] = {}

    def allows(self, peer: PeerId, now: float) -> bool:
        """Count one request."""
        left, at = self._left.pop(peer, (BURST, now))
        left = min(BURST, left + (now - at) * RATE)
        allowed = left >= 1
        self._left[peer] = (left - allowed, now)
        if len(self._left) > MAX_METERED:
            del self._left[next(iter(self._left))]
        return allowed


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers requests out of what we know and hold."""

    table: ContactTable
    store: RecordStore
    judge: RecordJudge
    meter: Meter

    def answer(self, sender: Contact, request: Request, wall: float, now: float) -> Reply | None:
        """The reply, or None if the peer has asked too much. Raise `BadMessage` if it stores a forgery."""
        if not self.meter.allows(sender.peer, now):
            return None
        match request:
            case Ping():
                return Pong()
            case FindNode(target):
                return Nodes(self._nearest(target, sender))
            case FindValue(key):
                return Values(self.store.blobs(key), self._nearest(key, sender))
            case Store(key, blob):
                return Stored(self.hold(key, blob, wall, now))

    def _nearest(self, target: bytes, sender: Contact) -> tuple[Contact, ...]:
        return tuple(self.table.closest(int.from_bytes(target, "big"), MAX_CONTACTS, sender.peer))

    def hold(self, key: bytes, blob: bytes, wall: float, now: float) -> bool:
        """Whether we hold this record, or a newer one, from now on. Raise `BadMessage` if it is forged."""
        record = decode_record_untrusted(blob)
        if not self.store.holds(key, blob, record.publisher):
            verdict = self.judge.judge(record, key, wall)
            if verdict is Judgement.FORGED:
                raise BadMessage("a DHT record is forged")
            if verdict is not Judgement.VALID:
                return False
        return self.store.put(key, record, blob, wall, now) is not Holding.FULL
