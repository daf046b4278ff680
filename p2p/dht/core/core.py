"""`DhtCore`: the DHT of one node as a state machine, events and time in, effects out.

Theory of operation
-------------------
Every message carries its sender's contact. A peer that has answered us enters the routing
table; one that has asked us something is pinged first. Three operations have callers
(`operations`): a *get* runs one value lookup per salted key and ends with the newest valid
record of each publisher; a *put* runs one node lookup per key and then stores at the nearest
nodes; a *join* asks seeds for the nodes near our id and looks ourselves up. `requester` runs
them.

What peers say is checked before it changes anything: a contact needs a work stamp, a record a
signature and the right key. A peer caught lying loses its place in the lookup and in the table,
and the host hears of it (`Penalise`); so the worst that liars achieve is to hide a record for a
while. Requests are metered (`responder`): a peer over its quota gets no answer and no penalty.

A contact that leaves three requests unanswered leaves the table (`neighbours` says when that is
certain), is not asked for a minute when others name it, and is remembered among the last lost:
at each refresh the lost contacts and the seeds are asked again, so that the two sides of a
partition find each other when it has healed.

The records that this node publishes, and when each has to be republished.

Each republished record is signed anew with a higher sequence number and a later expiry.
Sequence numbers are wall milliseconds, and at least one more than the last, so they grow over
restarts and over clocks set back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, assert_never

from p2p.dht import messages as msg
from p2p.dht.config import DhtConfig
from p2p.dht.core import events as ev
from p2p.dht.core.calls import Calls
from p2p.dht.core.neighbours import Neighbours
from p2p.dht.core.requester import Requester
from p2p.dht.core.responder import AnswerQuotas, Responder
from p2p.dht.core.store import RecordStore
from p2p.dht.core.validation import RecordPriority, RecordValidator
from p2p.dht.record import ADDR_NAMESPACE, MAX_ADDRS, Record, encode_addrs, sign_record
from p2p.dht.stamp import ID_BYTES
from p2p.errors import BadMessage, LimitExceeded
from p2p.events import PeerDown, PeerUp, Penalise, Received, Tick
from p2p.identity import PeerId, Signer
from p2p.offence import Offence

MAX_PUBLICATIONS: Final = 32
"""Maximum number of records that one node publishes. Under three keys each, they fill the quota
that other nodes have for it (`MAX_PER_PUBLISHER`)."""


@dataclass(slots=True)
class _Publication:
    value: bytes
    lifetime: float
    due: float = -math.inf


class Publications:
    """Records that this node publishes. Each is due again after ``interval`` seconds, or a
    third of its lifetime if that is less."""

    def __init__(self, signer: Signer, nonce: bytes, interval: float, seqno: int) -> None:
        self._signer = signer
        self._nonce = nonce
        self._interval = interval
        self._kept: dict[tuple[str, bytes], _Publication] = {}
        self._seqno = seqno - 1

    @property
    def next_deadline(self) -> float:
        """Time at which the next record is due."""
        return min((kept.due for kept in self._kept.values()), default=math.inf)

    def add(self, namespace: str, name: bytes, value: bytes, lifetime: float) -> None:
        """Publish a record from now on, replacing an earlier record of this name.

        Our own address record has no limit: there is one, and our addresses may change when no
        caller is there to get the error.

        Raises:
            LimitExceeded: This node publishes `MAX_PUBLICATIONS` records already.
        """
        place = (namespace, name)
        is_own = namespace == ADDR_NAMESPACE and name == self._signer.peer_id.digest
        if not is_own and place not in self._kept and len(self._kept) >= MAX_PUBLICATIONS:
            raise LimitExceeded(f"a node keeps at most {MAX_PUBLICATIONS} DHT records alive")
        self._kept[place] = _Publication(value, lifetime)

    def forget(self, namespace: str, name: bytes) -> None:
        """Stop publishing a record, which then expires by itself."""
        self._kept.pop((namespace, name), None)

    def sign(self, namespace: str, name: bytes, wall: float, now: float) -> Record:
        """Sign a record with the next sequence number and schedule its next publication, within
        a third of its lifetime."""
        kept = self._kept[(namespace, name)]
        # Times that a record is republished in its lifetime: two may fail before the record is
        # gone.
        kept.due = now + min(self._interval, kept.lifetime / 3)
        self._seqno += 1
        me, expires = self._signer.peer_id, math.ceil(wall + kept.lifetime)
        stamped = (namespace, name, me, self._nonce, self._seqno, expires)
        return sign_record(Record(*stamped, kept.value, b""), self._signer)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """Return the namespace and name of each record that is due."""
        return [place for place, kept in self._kept.items() if kept.due <= now]

    def retry(self, namespace: str, name: bytes, when: float) -> None:
        """Schedule a record that no node took for ``when``, unless it is due earlier."""
        kept = self._kept.get((namespace, name))
        if kept is not None:
            kept.due = min(kept.due, when)

    def republish_all(self, now: float) -> None:
        """Make all records due now, after joining a swarm that holds none of them."""
        for kept in self._kept.values():
            kept.due = min(kept.due, now)


if TYPE_CHECKING:
    from p2p.dht.core.table import RoutingTable


class DhtCore:
    """State machine of a DHT node. Give it `Event`s and carry out its `Effect`s, with a `Tick`
    at `next_deadline`."""

    def __init__(
        self,
        own: msg.Contact,
        signer: Signer,
        validator: RecordValidator,
        table: RoutingTable,
        config: DhtConfig,
        rng: Random,
        seqno: int = 1,
    ) -> None:
        self._config = config
        self._rng = rng
        self._now = 0.0
        self._wall = 0.0
        self._effects: list[ev.Effect] = []
        self._neighbours = Neighbours(own, table, config.difficulty)
        # Bytes of the secret with which this node alone ranks the publishers under a full key.
        self._store = RecordStore(own.number, secret=rng.randbytes(16))
        self._validator = validator
        self._responder = Responder(table, self._store, validator, AnswerQuotas())
        self._publications = Publications(signer, own.nonce, config.republish_interval, seqno)
        self._requester = Requester(
            self._neighbours, self._store, validator, config, Calls(rng),
            emit=self._effects.append, keep=self._keep, written=self._on_put_end,
            joined=self._on_join_end,
        )  # fmt: skip
        self._refresh_due = math.inf
        self._rejoin_due = math.inf
        self._rejoin_wait = 5.0
        """Seconds until a node with an empty table asks its seeds again: 5, 10, 20, 40, 60, 60
        ..."""
        self._alone = True

    @property
    def contacts(self) -> int:
        """Number of contacts in the routing table."""
        return len(self._neighbours.table)

    @property
    def records(self) -> int:
        """Number of records held for the swarm."""
        return len(self._store)

    @property
    def own(self) -> msg.Contact:
        """Contact of this node, with its stamp and addresses."""
        return self._neighbours.own

    def contact_of(self, peer: PeerId) -> msg.Contact | None:
        """Return the contact of ``peer`` in the routing table, or None."""
        return self._neighbours.table.contact_of(peer)

    @property
    def next_deadline(self) -> float:
        """Time of the next `Tick`."""
        return min(
            self._requester.next_deadline,
            self._store.next_deadline,
            self._publications.next_deadline,
            self._refresh_due,
            self._rejoin_due,
        )

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return the effects.

        Raises:
            LimitExceeded: A `Put` exceeds `MAX_PUBLICATIONS`.
        """
        self._now = now
        match event:
            case Received(peer, data, wall):
                self._wall = wall
                self._receive(peer, data)
            case Tick(wall):
                self._wall = wall
                self._tick()
            case PeerUp(peer):
                self._neighbours.up[peer] = None
                if self.contacts < msg.BUCKET_SIZE and self.contact_of(peer) is None:
                    self._requester.verify(peer, now)
            case PeerDown(peer, unreachable):
                self._neighbours.up.pop(peer, None)
                if unreachable:
                    self._neighbours.unreachable(peer, now)
                    self._requester.unreachable(peer, now)
            case ev.Moved(addrs):
                self._move(msg.Contact(self.own.peer, self.own.nonce, addrs[:MAX_ADDRS]))
            case ev.Join(token, peers):
                self._neighbours.remember_seeds(peers)
                self._requester.join(token, peers, now)
            case ev.Get(token, namespace, name):
                self._requester.get(token, namespace, name, now)
            case ev.Put(token, namespace, name, value, lifetime, wall):
                self._wall = wall
                self._publications.add(namespace, name, value, lifetime)
                record = self._publications.sign(namespace, name, wall, now)
                self._requester.put(token, record, now)
            case ev.Forget(namespace, name):
                self._publications.forget(namespace, name)
            case _:
                assert_never(event)
        effects = self._effects.copy()
        self._effects.clear()  # the requester adds to this list
        return effects

    # Messages.

    def _receive(self, peer: PeerId, data: bytes) -> None:
        """Process one message. If it is malformed or a lie, penalise its sender and fail all
        calls to it."""
        flooding = self._responder.quotas.is_flooding(peer, self._now)
        if flooding and not self._requester.waits_for(peer):
            return  # undecoded: decoding costs more than sending
        try:
            envelope = msg.decode_untrusted(data)
            sender = envelope.sender
            if sender.peer != peer:
                raise BadMessage("a DHT message names another sender")
            self._neighbours.check((sender,))
            self._take(envelope)
        except BadMessage as error:
            self._effects.append(Penalise(peer, Offence.MALFORMED, str(error)))
            self._neighbours.unreachable(peer, self._now)
            self._requester.unreachable(peer, self._now)

    def _take(self, envelope: msg.Envelope) -> None:
        sender, body = envelope.sender, envelope.body
        quotas = self._responder.quotas
        self._neighbours.up[sender.peer] = None
        if isinstance(body, msg.Ping | msg.FindNode | msg.FindValue | msg.Store):
            reply = self._responder.answer(sender, body, self._wall, self._now)
            if reply is not None:
                data = msg.encode(envelope.request_id, self.own, reply)
                self._responder.charge(sender.peer, len(data), self._now)
                self._effects.append(ev.SendIfConnected(sender.peer, data))
                if self._neighbours.on_request(sender):
                    self._requester.verify(sender.peer, self._now)
        elif self._requester.answered(envelope.request_id, sender, body, self._wall, self._now):
            oldest = self._neighbours.on_reply(sender)
            if oldest is not None:
                self._requester.ping(oldest, self._now)
            if self._refresh_due == math.inf:
                self._refresh_due = self._now + self._jitter(self._config.refresh_interval)
        else:
            quotas.requests.charge(sender.peer, self._now)  # too late, or never asked

    def _jitter(self, interval: float) -> float:
        """Return ``interval`` times 0.8 to 1.2, so that nodes started together do not act
        together."""
        return interval * self._rng.uniform(0.8, 1.2)

    def _move(self, own: msg.Contact) -> None:
        self._neighbours.move(own)
        name = own.peer.digest
        if own.addrs:
            value = encode_addrs(own.addrs)
            self._publications.add(ADDR_NAMESPACE, name, value, self._config.addr_lifetime)
        else:
            self._publications.forget(ADDR_NAMESPACE, name)

    def _keep(self, key: bytes, record: Record, blob: bytes) -> None:
        """Store our own record here too, because this node is among the nearest."""
        reserved = RecordPriority(reserved=True)
        self._store.put(key, record, blob, self._wall, self._now, reserved)

    def _on_put_end(self, record: Record, copies: int) -> None:
        """Schedule a record that no node took to be published again soon."""
        if not copies:
            # Seconds until a record that no node took is published again: three puts of 10 s
            # (`DhtConfig.timeout`), so a node that is cut off does not look up without a pause.
            when = self._now + 30.0
            self._publications.retry(record.namespace, record.name, when)

    # Time.

    def _on_join_end(self) -> None:
        """Handle the end of a join. Publish all records if we were alone before, and refresh
        stale buckets. Schedule another join if we are still alone."""
        if not self.contacts:
            self._alone = True
            self._rejoin_due = self._now + self._rejoin_wait
            # Seconds at most between two such joins: a node that was cut off is back a minute
            # after its network.
            self._rejoin_wait = min(2 * self._rejoin_wait, 60.0)
            return
        if self._alone:
            self._alone = False
            self._publications.republish_all(self._now)
        self._rejoin_due = math.inf
        self._rejoin_wait = 5.0
        before = self._now - self._config.refresh_interval
        for target in self._neighbours.table.stale_targets(before, self._rng):
            self._requester.refresh(target.to_bytes(ID_BYTES, "big"), self._now)

    def _tick(self) -> None:
        now = self._now
        self._requester.expire(now)
        self._store.expire(now)
        for namespace, name in self._publications.due(now):
            record = self._publications.sign(namespace, name, self._wall, now)
            self._requester.put(None, record, now)
        if self._rejoin_due <= now:
            self._rejoin_due = math.inf
            self._requester.join(None, self._neighbours.rejoin_candidates(), now)
        if self._refresh_due <= now:
            self._refresh_due = now + self._jitter(self._config.refresh_interval)
            self._requester.join(None, self._neighbours.rejoin_candidates(), now)
