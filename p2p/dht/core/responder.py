"""The answering half of a DHT node, with a quota for each peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p.bounded import KeyedQuotas, RateLimit
from p2p.dht import messages as msg
from p2p.dht.core.store import RecordStore
from p2p.dht.core.validation import RecordValidator
from p2p.dht.record import decode_record_untrusted
from p2p.identity import PeerId
from p2p.wire import KI, MIB

if TYPE_CHECKING:
    from p2p.dht.core.table import RoutingTable


class AnswerQuotas:
    """Quotas for the requests of each peer, for answer bytes to each peer, and for answer bytes
    to all peers of a kind.

    There are two kinds of peers: those in our routing table, and strangers. A peer in the table
    has answered us and holds one of few places, so it does not share a bucket with strangers.
    Bytes are charged when the answer is made, so the last answer may put a bucket into debt.
    """

    def __init__(self) -> None:
        # Requests a peer may make at once: it publishes thirty records under three keys, or
        # joins; and a second after that: a lookup asks each node once. Costs us 2 to 4 ms of
        # each second.
        self.requests = KeyedQuotas(20.0, 200.0)
        # Bytes of answers that a peer may get: 512 KiB at once. A peer that joins a very small
        # swarm and publishes thirty records under three keys there asks for 130 lists of twenty
        # contacts of 110 bytes and 90 receipts: 330 KB. A full run key is another 16 to 64 KiB.
        # In the long run 8 KiB a second: the republications of that same peer, every ten
        # minutes, need 0.5 KB/s. Without this limit, 20 requests a second for a key of 64
        # records took 1,277 KB/s of our upload.
        self._answer_bytes = KeyedQuotas(8.0 * KI, 512.0 * KI)
        # Bytes of answers that all peers of one kind may get together: 4 MiB at once are 1,900
        # lists of contacts, when a thousand nodes join in a minute; 256 KiB a second are a
        # quarter of a slow home's upload of 8 Mbit/s.
        self._shared = {known: RateLimit(256.0 * KI, 4.0 * MIB) for known in (True, False)}

    def admit(self, peer: PeerId, now: float, *, known: bool) -> bool:
        """Charge one request and return True if it should be answered. ``known`` is True if the
        peer is in our routing table."""
        if not self.requests.take(peer, now):
            return False
        shared = self._shared[known]
        left = shared.available(now)
        # When at most half of the shared bucket is left, one peer gets 64 KiB of its 512: a
        # lookup or two. Newcomers are then still answered when many greedy peers ask.
        needed = 0.0 if left > shared.capacity / 2 else 448.0 * KI
        return left > 0 and self._answer_bytes.level(peer, now) > needed

    def charge_answer(self, peer: PeerId, size: int, now: float, *, known: bool) -> None:
        """Charge an answer of ``size`` bytes."""
        # Bytes that any answer counts for at least: validating a record to be stored costs 0.1
        # ms. 512 answers a second from each shared bucket are 5 % of a core.
        cost = max(float(size), 512.0)
        self._answer_bytes.charge(peer, now, cost)
        self._shared[known].take(cost)

    def is_flooding(self, peer: PeerId, now: float) -> bool:
        """Return True if ``peer`` has sent so much that its messages are dropped undecoded."""
        return not self.requests.has(peer, now)


@dataclass(frozen=True, slots=True)
class Responder:
    """Answers requests from the routing table and the record store."""

    table: RoutingTable
    store: RecordStore
    validator: RecordValidator
    quotas: AnswerQuotas

    def answer(
        self, sender: msg.Contact, request: msg.Request, wall: float, now: float
    ) -> msg.Reply | None:
        """Return the reply, or None if the peer is over its quota.

        Raises:
            BadMessage: The request is a STORE of a malformed or forged record.
        """
        if not self.quotas.admit(sender.peer, now, known=self._knows(sender.peer)):
            return None
        match request:
            case msg.Ping():
                return msg.Pong()
            case msg.FindNode(target):
                return msg.Nodes(self._nearest(target, sender))
            case msg.FindValue(key):
                return msg.Values(self.store.blobs(key), self._nearest(key, sender))
            case msg.Store(key, blob):
                return msg.Stored(self._hold(key, blob, sender.peer, wall, now))

    def charge(self, peer: PeerId, size: int, now: float) -> None:
        """Charge an answer of ``size`` encoded bytes to ``peer``."""
        self.quotas.charge_answer(peer, size, now, known=self._knows(peer))

    def _knows(self, peer: PeerId) -> bool:
        return self.table.contact_of(peer) is not None

    def _nearest(self, target: bytes, sender: msg.Contact) -> tuple[msg.Contact, ...]:
        return tuple(self.table.closest(target, msg.BUCKET_SIZE, sender.peer))

    def _hold(self, key: bytes, blob: bytes, sender: PeerId, wall: float, now: float) -> bool:
        """Store a record if it is valid, and return True if this node holds it or a newer one.

        A record by another publisher than its sender is taken only from peers in our table.
        Otherwise a stranger could fill the store with the records of a hundred stamped
        publishers.

        Raises:
            BadMessage: The record is malformed or forged.
        """
        record = decode_record_untrusted(blob)
        if not self.store.holds(key, blob, record.publisher):
            if record.publisher != sender and not self._knows(sender):
                return False
            if not self.validator.validate(record, key, wall):
                return False
        priority = self.validator.priority(record, among_public=self.table.among_public)
        return self.store.put(key, record, blob, wall, now, priority)
