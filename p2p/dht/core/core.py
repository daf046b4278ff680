"""The DHT of one node as a state machine: events and time in, effects out.

Theory of operation
-------------------
Every message carries its sender's contact. Who has answered us enters the routing table; who has asked us
something is pinged first. A *reading* runs one value lookup per salted key and ends with the newest valid
record of each publisher; a *writing* runs one node lookup per key and then stores at the nearest nodes; a
*joining* asks seeds who is near us and looks ourselves up (`requester`). What strangers say is judged
before it changes anything: a contact needs a work stamp, a record a signature and the right key. A peer
caught lying loses its place in the lookup and in the table, and the host hears of it; so the worst that
liars achieve is to hide a record for a while. Each question costs the asker a part of what it may have of
us (`responder`); what is beyond gets no answer, and no blame.

Who is asked three times in vain leaves the table (`neighbours` says when that is certain), is not
asked on hearsay for a minute, and is remembered among the last lost: at each refresh the lost and the seeds
are asked again, so that the two sides of a partition find each other when it has healed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, assert_never

from p2p.dht.config import DhtConfig
from p2p.dht.core.calls import Calls
from p2p.dht.core.events import (
    Cancel,
    Effect,
    Event,
    Forget,
    Get,
    Join,
    Moved,
    PeerDown,
    PeerUp,
    Penalise,
    Put,
    Received,
    Send,
    Tick,
)
from p2p.dht.core.neighbours import Neighbours
from p2p.dht.core.operations import Purpose
from p2p.dht.core.publications import Publications
from p2p.dht.core.requester import Asker, Hooks
from p2p.dht.core.responder import Answers, Meter
from p2p.dht.core.store import RecordStore
from p2p.dht.messages import (
    Contact,
    Envelope,
    FindNode,
    FindValue,
    Ping,
    Reply,
    Store,
    decode_untrusted,
    encode,
)
from p2p.dht.record import ADDR_NAMESPACE, MAX_ADDRS, Record, RecordJudge, Standing, encode_addrs
from p2p.dht.stamp import ID_BYTES
from p2p.errors import BadMessage
from p2p.identity import PeerId, Signer

if TYPE_CHECKING:
    from random import Random

    from p2p.dht.core.table import ContactTable

SECRET_BYTES: Final = 16
"""Of what ranks the publishers under a full key on this node alone."""
GARBAGE_POINTS: Final = 10.0
"""What a forgery or an unreadable message costs its sender's score."""
FIRST_REJOIN: Final = 5.0
"""Seconds until a node that knows nobody asks its seeds again, doubled each time."""
LAST_REJOIN: Final = 60.0
REPUBLISH_RETRY: Final = 30.0
"""Seconds until a record that nobody took is published again."""
REPLICATED_AT_ONCE: Final = 64
"""Records handed on per step; the rest wait for the next."""
REPLICATION_STEP: Final = 10.0
"""Seconds between steps: 64 records at 8 nodes are 70 KB/s at the very worst, and all that a node can hold
takes 43 minutes, less than the hour after which it is due again."""


class DhtCore:
    """One node. Give it events, do what the effects say, and tick it at `next_deadline`."""

    def __init__(
        self,
        own: Contact,
        signer: Signer,
        judge: RecordJudge,
        table: ContactTable,
        config: DhtConfig,
        rng: Random,
        seqno: int = 0,
    ) -> None:
        self._config = config
        self._rng = rng
        self._now = 0.0
        self._wall = 0.0
        self._effects: list[Effect] = []
        self._neighbours = Neighbours(own, table, config.difficulty)
        self._store = RecordStore(own.number, secret=rng.randbytes(SECRET_BYTES))
        self._judge = judge
        self._answers = Answers(table, self._store, judge, Meter())
        self._publications = Publications(signer, own.nonce, config.republish_interval, seqno)
        hooks = Hooks(self._effects.append, self._keep, self._written, self._joined)
        calls: Calls[Purpose] = Calls(rng)
        self._asker = Asker(self._neighbours, self._store, judge, config, calls, hooks)
        self._refresh_due = math.inf
        self._replicate_due = math.inf
        self._rejoin_due = math.inf
        self._rejoin_wait = FIRST_REJOIN
        self._alone = True

    @property
    def contacts(self) -> int:
        """How many nodes we know."""
        return len(self._neighbours.table)

    @property
    def records(self) -> int:
        """How many records we hold for others."""
        return len(self._store)

    @property
    def own(self) -> Contact:
        """Our own place and addresses."""
        return self._neighbours.own

    @property
    def seqno(self) -> int:
        """The highest sequence number we have signed."""
        return self._publications.seqno

    def contact_of(self, peer: PeerId) -> Contact | None:
        """What the routing table knows of ``peer``."""
        return self._neighbours.table.contact_of(peer)

    @property
    def next_deadline(self) -> float:
        """When to deliver the next `Tick`."""
        return min(
            self._asker.next_deadline,
            self._store.next_deadline,
            self._publications.next_deadline,
            self._refresh_due,
            self._replicate_due,
            self._rejoin_due,
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event and return what to do about it. Raise `LimitExceeded` for a `Put` too many."""
        self._now = now
        match event:
            case Received(peer, data, wall):
                self._wall = wall
                self._receive(peer, data)
            case Tick(wall):
                self._wall = wall
                self._tick()
            case PeerUp(peer):
                self._peer_up(peer)
            case PeerDown(peer, unreachable):
                self._neighbours.disconnected(peer)
                if unreachable:
                    self._neighbours.unreachable(peer, now)
                    self._asker.unreachable(peer, now)
            case Moved(addrs):
                self._move(Contact(self.own.peer, self.own.nonce, addrs[:MAX_ADDRS]))
            case Join(token, peers):
                self._neighbours.remember_seeds(peers)
                self._asker.join(token, peers, now)
            case Get(token, namespace, name):
                self._asker.read(token, namespace, name, now)
            case Put():
                self._put(event)
            case Forget(namespace, name):
                self._publications.forget(namespace, name)
            case Cancel(token):
                self._asker.cancel(token)
            case _:
                assert_never(event)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # Messages.

    def _receive(self, peer: PeerId, data: bytes) -> None:
        """Judge one message; a peer that lies pays for it, and whatever we have asked it has failed."""
        if self._answers.meter.is_flooding(peer, self._now) and not self._asker.waits_for(peer):
            return  # decoding costs more than sending
        try:
            envelope = decode_untrusted(data)
            sender = envelope.sender
            if sender.peer != peer:
                raise BadMessage("a DHT message names another sender")
            self._neighbours.check((sender,))
            self._take(envelope)
        except BadMessage as error:
            self._effects.append(Penalise(peer, GARBAGE_POINTS, str(error)))
            self._neighbours.unreachable(peer, self._now)
            self._asker.unreachable(peer, self._now)

    def _take(self, envelope: Envelope) -> None:
        sender, body = envelope.sender, envelope.body
        self._neighbours.connected(sender.peer)
        if isinstance(body, Ping | FindNode | FindValue | Store):
            reply = self._answers.answer(sender, body, self._wall, self._now)
            if reply is not None:
                self._reply(envelope, reply)
                self._visit(sender)
        elif self._asker.answered(envelope.request_id, sender, body, self._wall, self._now):
            self._hear(sender)
        else:
            self._answers.meter.count(sender.peer, self._now)  # too late, or never asked

    def _reply(self, envelope: Envelope, reply: Reply) -> None:
        peer = envelope.sender.peer
        data = encode(envelope.request_id, self.own, reply)
        self._answers.charge(peer, len(data), self._now)
        self._effects.append(Send(peer, data, dial=False))

    def _visit(self, sender: Contact) -> None:
        """A peer has asked us something: if it is not in the table, see whether it answers, too."""
        if self._neighbours.visited(sender, self._now):
            self._asker.verify(sender.peer, self._now)

    def _hear(self, sender: Contact) -> None:
        """A peer has answered us. If its bucket is full, see whether the node longest unheard still does."""
        oldest = self._neighbours.heard(sender)
        if oldest is not None and self._neighbours.is_worth_a_ping(oldest.peer, self._now):
            self._asker.probe(oldest, self._now)
        if self._refresh_due == math.inf:
            self._refresh_due = self._now + self._jitter(self._config.refresh_interval)
            self._replicate_due = self._now + self._jitter(self._config.replicate_interval)

    def _jitter(self, interval: float) -> float:
        """So that nodes started together do not act together."""
        return interval * self._rng.uniform(0.8, 1.2)

    def _peer_up(self, peer: PeerId) -> None:
        """Somebody connected, maybe for other reasons. While we know few, ask whether it is one of us.

        That is all it gets us to do: whom it knows, and may name in order that we dial them, we ask when
        we look for something ourselves.
        """
        self._neighbours.connected(peer)
        few = self.contacts < self._config.bucket_size and self.contact_of(peer) is None
        if few and self._neighbours.is_worth_a_ping(peer, self._now):
            self._asker.verify(peer, self._now)

    # Publishing.

    def _put(self, put: Put) -> None:
        self._wall = put.wall
        self._publications.add(put.namespace, put.name, put.value, put.lifetime)
        record = self._publications.sign(put.namespace, put.name, put.wall, self._now)
        self._asker.write(put.token, record, self._now)

    def _move(self, own: Contact) -> None:
        self._neighbours.move(own)
        name = own.peer.digest
        if own.addrs:
            value = encode_addrs(own.addrs)
            self._publications.add(ADDR_NAMESPACE, name, value, self._config.addr_lifetime, own=True)
        else:
            self._publications.forget(ADDR_NAMESPACE, name)

    def _keep(self, key: bytes, record: Record, blob: bytes) -> None:
        self._store.put(key, record, blob, self._wall, self._now, Standing(reserved=True))

    def _written(self, record: Record, copies: int) -> None:
        if not copies:
            when = self._now + REPUBLISH_RETRY
            self._publications.retry(record.namespace, record.name, when)

    # Time.

    def _joined(self) -> None:
        """We have looked ourselves up: say again what we publish, and meet the rest of the id space."""
        if not self.contacts:
            self._alone = True
            self._rejoin_due = self._now + self._rejoin_wait
            self._rejoin_wait = min(2 * self._rejoin_wait, LAST_REJOIN)
            return
        if self._alone:
            self._alone = False
            self._publications.renew_all(self._now)
        self._rejoin_due = math.inf
        self._rejoin_wait = FIRST_REJOIN
        before = self._now - self._config.refresh_interval
        for target in self._neighbours.table.stale_targets(before, self._rng):
            self._asker.refresh(target.to_bytes(ID_BYTES, "big"), self._now)

    def _tick(self) -> None:
        now = self._now
        self._asker.expire(now)
        self._store.expire(now)
        for namespace, name in self._publications.due(now):
            record = self._publications.sign(namespace, name, self._wall, now)
            self._asker.write(None, record, now)
        if self._rejoin_due <= now:
            self._rejoin_due = math.inf
            self._asker.join(None, self._neighbours.forgotten(), now)
        if self._refresh_due <= now:
            self._refresh_due = now + self._jitter(self._config.refresh_interval)
            self._asker.join(None, self._neighbours.forgotten(), now)
        if self._replicate_due <= now:
            self._replicate()

    def _replicate(self) -> None:
        """Hand on a few keys that nobody has refreshed; the nodes that take them need not do it again."""
        before = self._now - self._config.replicate_interval
        keys = self._store.unrefreshed(before, REPLICATED_AT_ONCE)
        for key in keys:
            self._asker.replicate(key, self._now)
        wait = REPLICATION_STEP if keys else self._config.replicate_interval / 8
        self._replicate_due = self._now + self._jitter(wait)
