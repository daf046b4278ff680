"""The answering half of a DHT node: what it tells strangers, and how much of that each of them gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from p2p.dht.core.store import Holding, RecordStore
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
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.wire import KI, MIB

if TYPE_CHECKING:
    from p2p.dht.core.table import ContactTable

BURST: Final = 200.0
"""Requests a peer may make at once: it publishes thirty records under three keys, or joins."""
RATE: Final = 20.0
"""Requests a second after that; a lookup asks each node once. Costs us 2 to 4 ms of each second."""
BURST_BYTES: Final = 512.0 * KI
"""Bytes of answers a peer may have at once. One that joins a swarm so small that every lookup asks us, and
publishes thirty records under three keys there, asks for 130 lists of twenty contacts of 110 bytes and 90
receipts: 330 KB. A full run key is another 16 to 64 KiB."""
RATE_BYTES: Final = 8.0 * KI
"""Bytes a second after that: the same node's renewals, every ten minutes, need 0.5 KB/s. What it saves: 20
questions a second for a key of 64 records took 1,277 KB/s of our upload."""
ALL_BURST: Final = 4.0 * MIB
"""Bytes of answers that all peers outside our table have together at once: 1,900 lists of contacts, when a
thousand nodes join in a minute. Peers in our table have as much again, so strangers starve none of them."""
ALL_RATE: Final = 256.0 * KI
"""Bytes a second after that: a quarter of a slow home's upload of 8 Mbit/s."""
FRESH_BYTES: Final = 64.0 * KI
"""What a peer may have had while less than half of its pot is left: one lookup or two, so that newcomers
are still answered when many greedy ones ask. Each of these would need a new stamp, half a CPU second, for
every 64 KiB: one core takes half of the rate, not all of it."""
LEAST_CHARGE: Final = 512.0
"""Bytes that any answer counts for at least: judging a stored record costs 0.1 ms. 512 answers a second of
each pot are 5 % of a core."""
MAX_METERED: Final = 4096
"""Peers whose requests are counted; the longest silent are forgotten, by then with a full allowance. One who
mints names to be forgotten still finds the pot of all strangers as they have left it."""


@dataclass(slots=True)
class _Allowance:
    """What one peer has left."""

    requests: float
    size: float
    at: float


@dataclass(slots=True)
class _Pot:
    """What a class of peers has left together, in bytes."""

    size: float = ALL_BURST
    at: float = 0.0

    def left(self, now: float) -> float:
        self.size = min(ALL_BURST, self.size + max(0.0, now - self.at) * ALL_RATE)
        self.at = now
        return self.size


class Meter:
    """What each peer, and all of a kind, may still ask: requests, and bytes of answers.

    A peer in our table has answered us, holds one of few places and is of use to us; it draws on another
    pot than strangers do. Bytes are charged when the answer is made, so the last one may go into debt.
    """

    def __init__(self) -> None:
        self._left: dict[PeerId, _Allowance] = {}
        self._pots = {True: _Pot(), False: _Pot()}

    def _of(self, peer: PeerId, now: float) -> _Allowance:
        left = self._left.pop(peer, None) or _Allowance(BURST, BURST_BYTES, now)
        left.requests = min(BURST, left.requests + (now - left.at) * RATE)
        left.size = min(BURST_BYTES, left.size + (now - left.at) * RATE_BYTES)
        left.at = now
        self._left[peer] = left
        if len(self._left) > MAX_METERED:
            del self._left[next(iter(self._left))]
        return left

    def allows(self, peer: PeerId, now: float, *, known: bool) -> bool:
        """Count one request; whether to answer it. ``known``: the peer is in our table."""
        left = self._of(peer, now)
        if left.requests < 1:
            return False
        left.requests -= 1
        pot = self._pots[known].left(now)
        needed = 0.0 if pot > ALL_BURST / 2 else BURST_BYTES - FRESH_BYTES
        return pot > 0 and left.size > needed

    def count(self, peer: PeerId, now: float) -> None:
        """Note a message that asks for nothing."""
        self._of(peer, now).requests -= 1

    def charge(self, peer: PeerId, size: int, now: float, *, known: bool) -> None:
        """Note an answer of ``size`` bytes."""
        cost = max(float(size), LEAST_CHARGE)
        self._of(peer, now).size -= cost
        self._pots[known].size -= cost

    def is_flooding(self, peer: PeerId, now: float) -> bool:
        """Whether ``peer`` has sent so much that what it sends need not be read."""
        left = self._left.get(peer)
        return left is not None and left.requests < 1 and self._of(peer, now).requests < 1


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers requests out of what we know and hold."""

    table: ContactTable
    store: RecordStore
    judge: RecordJudge
    meter: Meter

    def answer(self, sender: Contact, request: Request, wall: float, now: float) -> Reply | None:
        """The reply, or None if the peer has asked too much. Raise `BadMessage` if it stores a forgery."""
        if not self.meter.allows(sender.peer, now, known=self._knows(sender.peer)):
            return None
        match request:
            case Ping():
                return Pong()
            case FindNode(target):
                return Nodes(self._nearest(target, sender))
            case FindValue(key):
                return Values(self.store.blobs(key), self._nearest(key, sender))
            case Store(key, blob):
                return Stored(self.hold(key, blob, sender.peer, wall, now))

    def charge(self, peer: PeerId, size: int, now: float) -> None:
        """Note an answer of ``size`` bytes to ``peer``."""
        self.meter.charge(peer, size, now, known=self._knows(peer))

    def _knows(self, peer: PeerId) -> bool:
        return self.table.contact_of(peer) is not None

    def _nearest(self, target: bytes, sender: Contact) -> tuple[Contact, ...]:
        return tuple(self.table.closest(int.from_bytes(target, "big"), MAX_CONTACTS, sender.peer))

    def hold(self, key: bytes, blob: bytes, sender: PeerId, wall: float, now: float) -> bool:
        """Whether we hold this record, or a newer one, from now on. Raise `BadMessage` if it is forged.

        Others' records are taken only from peers in our table. Who replicates has looked the key up before,
        which got it verified if there was room for it; a stranger who brings the records of a hundred
        publishers fills us with them.
        """
        record = decode_record_untrusted(blob)
        if not self.store.holds(key, blob, record.publisher):
            if record.publisher != sender and not self._knows(sender):
                return False
            verdict = self.judge.judge(record, key, wall)
            if verdict is Judgement.FORGED:
                raise BadMessage("a DHT record is forged")
            if verdict is not Judgement.VALID:
                return False
        standing = self.judge.standing(record, among_public=self.table.among_public)
        return self.store.put(key, record, blob, wall, now, standing) is not Holding.FULL
