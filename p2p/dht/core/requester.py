"""The asking half of a DHT node: runs gets, puts and joins through lookups and calls.

Theory of operation
-------------------
`get`, `put`, `join`, `refresh` and `ping` begin something. Each begins searches,
one per key; a search asks the contacts that its lookup names, by calls that are sent again when
they are late. `answered` and `expire` bring every call to an end: they look up its purpose,
tell the lookup, and `_pump` asks the next contacts. When a lookup is done, `_finish` does what
its operation wants with the nearest contacts, and the last lookup ends the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final

from p2p.dht import messages as msg
from p2p.dht.config import DhtConfig
from p2p.dht.core.calls import Call, Calls
from p2p.dht.core.events import Effect, Found, Joined, SendIfConnected, Written
from p2p.dht.core.lookup import ContactState, Lookup, LookupShape
from p2p.dht.core.neighbours import Neighbours
from p2p.dht.core.store import RecordStore
from p2p.dht.core.validation import RecordValidator
from p2p.dht.record import Record, decode_record_untrusted
from p2p.errors import BadMessage
from p2p.events import AddAddrs, Send
from p2p.identity import PeerId
from p2p.multiaddr import AddrSource

MAX_FOUND: Final = 512
"""Maximum number of publishers that one get returns: eight times as many as a node holds under
a key. Lying holders return other publishers than honest ones do, up to 64 each."""


@dataclass(slots=True, eq=False)
class GetOperation:
    """Reads the records under all keys of one name."""

    token: int
    namespace: str
    name: bytes
    times_out: float = math.inf
    """Time at which the operation ends in any case."""
    settles: float = math.inf
    """Time at which the operation ends if its results still suffice then
    (`Requester._note_found`); infinity while they do not."""
    searches: int = 0
    """Number of lookups that are not finished."""
    records: dict[PeerId, Record] = field(default_factory=dict)
    """Maps each publisher to its newest valid record."""
    found: dict[bytes, bool] = field(default_factory=dict)
    """Keys under which nodes near the key had records. The value is True if that holds on every
    path."""
    validated: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    """Pairs (key, blob) that proved valid. Copies then cost no further signature check."""

    def take(self, record: Record) -> None:
        """Keep a valid record if it is the newest of its publisher."""
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
        """Process the records that a holder returned, and return True if any is valid.

        Raises:
            BadMessage: A record is malformed or forged, or there are two of one publisher.
        """
        publishers: dict[PeerId, None] = {}
        found = False
        for blob in blobs:
            record = decode_record_untrusted(blob)
            if record.publisher in publishers:
                raise BadMessage("a holder returned two DHT records of one publisher")
            publishers[record.publisher] = None
            if (key, blob) in self.validated:
                found = True
                continue
            if validator.validate(record, key, wall):
                if len(self.validated) < 2 * MAX_FOUND:  # two versions of each
                    self.validated[(key, blob)] = None
                self.take(record)
                found = True
        return found


@dataclass(slots=True, eq=False)
class PutOperation:
    """Stores one record at the nearest nodes of each of its keys."""

    token: int | None
    """Token of the waiting caller; None for a republication."""
    record: Record
    blob: bytes
    searches: int = 0
    """Number of lookups that are not finished."""
    stores: int = 0
    """Number of STORE requests that are not answered."""
    copies: int = 0
    """Number of nodes that hold the record, over all keys."""


@dataclass(slots=True, eq=False)
class JoinOperation:
    """Asks seeds for the contacts near our id, then looks our id up."""

    token: int | None
    """Token of the waiting caller; None for a refresh."""
    asked: int = 0
    """Number of seeds that have not answered."""
    search: Search | None = None
    """Lookup of our own id, which begins with the first answer of a seed."""


Operation = GetOperation | PutOperation | JoinOperation


@dataclass(slots=True, eq=False)
class Search:
    """Lookup on behalf of an operation, or, with None, only to learn the contacts near its
    target."""

    lookup: Lookup
    operation: Operation | None
    finished: bool = False
    """True if the lookup has ended and the operation was told."""

    @property
    def key(self) -> bytes:
        """Target of the lookup."""
        return self.lookup.target


# What an open request is for. The requester finds it beside the request when an answer comes.


@dataclass(frozen=True, slots=True)
class LookupPurpose:
    """Purpose of a FIND_NODE or FIND_VALUE of a lookup."""

    search: Search
    contact: msg.Contact


@dataclass(frozen=True, slots=True)
class StorePurpose:
    """Purpose of a STORE. ``spares`` are the next nearest nodes, which are asked if this one
    refuses."""

    operation: PutOperation
    key: bytes
    contact: msg.Contact
    spares: list[msg.Contact]


@dataclass(frozen=True, slots=True)
class PingPurpose:
    """Purpose of a PING. It checks whether ``contact`` is alive, or, with None, whether a peer
    that asked us something answers."""

    contact: msg.Contact | None


Purpose = LookupPurpose | StorePurpose | PingPurpose | JoinOperation
"""A `JoinOperation` is the purpose of a FIND_NODE to a seed, whose contact is not known yet."""


class Requester:
    """Runs operations through lookups and calls.

    Args:
        emit: Passes an effect to the driver.
        keep: Stores our own record (key, record, encoded record) at this node, when it is among
            the nearest.
        written: Called at the end of a put with the record and its number of copies.
        joined: Called at the end of a join.
    """

    def __init__(
        self, neighbours: Neighbours, store: RecordStore, validator: RecordValidator,
        config: DhtConfig, calls: Calls, *, emit: Callable[[Effect], None],
        keep: Callable[[bytes, Record, bytes], None], written: Callable[[Record, int], None],
        joined: Callable[[], None],
    ) -> None:  # fmt: skip
        self._neighbours = neighbours
        self._store = store
        self._validator = validator
        self._config = config
        self._calls = calls
        self._emit = emit
        self._keep = keep
        self._written = written
        self._joined = joined
        self._waiting: dict[int, Operation] = {}
        """Maps the token of each waiting caller to its operation."""
        self._deadlines: list[tuple[float, int]] = []
        # A get looks at twice the replicas: the nodes nearest to a key have changed since the
        # put. A put looks a little beyond the replicas, so that spares are known; a join wants
        # to know its whole bucket.
        alpha, paths, replicas = config.alpha, config.paths, config.replicas
        self._get_shape = LookupShape(
            alpha=alpha, paths=paths, width=2 * replicas, quorum=config.quorum, holders=replicas
        )
        self._put_shape = LookupShape(alpha=alpha, paths=paths, width=replicas + alpha)
        self._join_shape = LookupShape(alpha=alpha, paths=paths, width=msg.BUCKET_SIZE)

    @property
    def next_deadline(self) -> float:
        """Time of the next call to `expire`."""
        due = self._deadlines[0][0] if self._deadlines else math.inf
        return min(due, self._calls.next_deadline)

    # What begins.

    def get(self, token: int, namespace: str, name: bytes, now: float) -> None:
        """Read all records of a name, starting with those held here."""
        operation = GetOperation(token, namespace, name, now + self._config.timeout)
        keys = self._validator.keys(namespace, name)
        for key in keys:
            for record in filter(self._validator.is_admitted, self._store.get(key)):
                operation.take(record)
        self._wait_for(operation, now)
        operation.searches = len(keys)
        for key in keys:
            self._search(key, operation, self._get_shape, now)

    def put(self, token: int | None, record: Record, now: float) -> None:
        """Store a record at the nearest nodes of each of its keys."""
        operation = PutOperation(token, record, record.encode())
        self._wait_for(operation, now)
        keys = self._validator.keys(record.namespace, record.name)
        operation.searches = len(keys)
        for key in keys:
            self._search(key, operation, self._put_shape, now)

    def join(self, token: int | None, peers: Iterable[PeerId], now: float) -> None:
        """Ask ``peers`` for the contacts near our id, then look our id up."""
        operation = JoinOperation(token)
        self._wait_for(operation, now)
        own = self._neighbours.own
        seeds = [peer for peer in peers if peer != own.peer]
        operation.asked = len(seeds)
        for peer in seeds:
            self._call(peer, msg.FindNode(own.id), operation, now)
        if not seeds:
            self._look_up_ourselves(operation, None, (), now)

    def refresh(self, target: bytes, now: float) -> None:
        """Look up ``target`` to learn the contacts around it."""
        self._search(target, None, self._put_shape, now)

    def ping(self, contact: msg.Contact, now: float) -> None:
        """Ping ``contact`` to find out if it is alive."""
        self._call_contact(contact, msg.Ping(), PingPurpose(contact), now)

    def verify(self, peer: PeerId, now: float) -> None:
        """Ping ``peer``, which has asked us or connected to us, to find out if it is a DHT
        node."""
        if not self._calls.waits_for(peer):
            self._neighbours.note_inbound(peer, now)
            self._call(peer, msg.Ping(), PingPurpose(None), now)

    def waits_for(self, peer: PeerId) -> bool:
        """Return True if a call to ``peer`` is open."""
        return self._calls.waits_for(peer)

    def _wait_for(self, operation: Operation, now: float) -> None:
        """Note the operation's caller, if there is one, and when it gets an outcome at last."""
        if operation.token is not None:
            self._waiting[operation.token] = operation
            heappush(self._deadlines, (now + self._config.timeout, operation.token))

    # Calls.

    def _call(self, peer: PeerId, request: msg.Request, purpose: Purpose, now: float) -> None:
        own, is_connected = self._neighbours.own, peer in self._neighbours.up
        call = self._calls.open(
            peer, purpose, lambda number: msg.encode(number, own, request), now, is_connected
        )
        self._send(call)

    def _send(self, call: Call) -> None:
        """Send a request, also repeatedly. A ping to an inbound peer uses only its own
        connection, since a stranger must not cause a dial."""
        to_inbound = isinstance(call.purpose, PingPurpose) and call.purpose.contact is None
        self._emit((SendIfConnected if to_inbound else Send)(call.peer, call.data))

    def _call_contact(
        self, contact: msg.Contact, request: msg.Request, purpose: Purpose, now: float
    ) -> None:
        if contact.addrs and contact.peer not in self._neighbours.up:
            self._emit(AddAddrs(contact.peer, contact.addrs, AddrSource.HEARSAY))
        self._call(contact.peer, request, purpose, now)

    def _search(
        self, target: bytes, operation: Operation | None, shape: LookupShape, now: float
    ) -> None:
        """Begin a lookup with the nearest contacts of the table."""
        near = self._neighbours.table.closest(target, msg.BUCKET_SIZE)
        seeds = self._neighbours.eligible(near, now)
        search = Search(self._lookup(target, seeds, shape, now), operation)
        self._neighbours.table.touch(int.from_bytes(target, "big"), now)
        self._pump(search, now)

    def _lookup(
        self, target: bytes, seeds: Sequence[msg.Contact], shape: LookupShape, now: float
    ) -> Lookup:
        neighbours = self._neighbours
        return Lookup(
            target,
            seeds,
            shape,
            neighbours.is_met,
            lambda peer: not neighbours.is_recent_inbound(peer, now),
        )

    def _pump(self, search: Search, now: float) -> None:
        """Ask the contacts that the lookup returns next, and finish the search when it is
        done."""
        if search.finished:
            return
        values = isinstance(search.operation, GetOperation)
        request = msg.FindValue(search.key) if values else msg.FindNode(search.key)
        for contact in search.lookup.ask():
            self._call_contact(contact, request, LookupPurpose(search, contact), now)
        if search.lookup.done:
            search.finished = True
            self._finish(search, now)

    # Answers.

    def answered(
        self, request_id: int, sender: msg.Contact, reply: msg.Reply, wall: float, now: float
    ) -> bool:
        """Process a reply. Return False if there is no open call for it.

        Raises:
            BadMessage: The reply is a lie. Its call has failed then.
        """
        call = self._calls.settle(request_id, sender.peer, now)
        if call is None:
            return False
        try:
            self._progress(call, sender, reply, wall, now)
        except BadMessage:
            self._failed(call, now)
            raise
        return True

    def _progress(
        self, call: Call, sender: msg.Contact, reply: msg.Reply, wall: float, now: float
    ) -> None:
        match call.purpose, reply:
            case (LookupPurpose(contact=contact), _) if contact.id != sender.id:
                self._failed(call, now)  # it was named with a stamp that it does not use
            case LookupPurpose(search, contact), msg.Values() | msg.Nodes():
                self._contacts_came(search, contact, reply, wall, now)
            case JoinOperation() as operation, msg.Nodes(near):
                self._neighbours.check(near)
                operation.asked -= 1
                eligible = self._neighbours.eligible(near, now)
                self._look_up_ourselves(operation, sender, eligible, now)
            case StorePurpose() as store, msg.Stored(held):
                self._stored(store, held, now)
            case PingPurpose(), msg.Pong():
                pass
            case _:
                raise _wrong_kind(reply)

    def _contacts_came(
        self,
        search: Search,
        contact: msg.Contact,
        reply: msg.Values | msg.Nodes,
        wall: float,
        now: float,
    ) -> None:
        operation, near, found = search.operation, reply.contacts, False
        if isinstance(operation, GetOperation) is not isinstance(reply, msg.Values):
            raise _wrong_kind(reply)
        self._neighbours.check(near)
        if isinstance(operation, GetOperation) and isinstance(reply, msg.Values):
            found = operation.take_untrusted(search.key, reply.records, self._validator, wall)
        search.lookup.answered(contact, self._neighbours.eligible(near, now), found=found)
        if isinstance(operation, GetOperation) and (found or search.key in operation.found):
            self._note_found(operation, search, now)
        self._pump(search, now)

    def expire(self, now: float) -> None:
        """Resend late requests, close overdue calls, and end operations that took too long."""
        for call, state in self._calls.expire(now):
            if state is ContactState.FAILED:
                self._failed(call, now, certain=call.peer in self._neighbours.up)
                continue
            self._send(call)
            if isinstance(call.purpose, LookupPurpose):
                search, contact = call.purpose.search, call.purpose.contact
                search.lookup.settle(contact, state)
                self._pump(search, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            due, token = heappop(self._deadlines)
            operation = self._waiting.get(token)
            unsettled = isinstance(operation, GetOperation) and due < min(
                operation.settles, operation.times_out
            )
            if operation is not None and not unsettled:
                self._end(operation)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """Fail every call to ``peer``, which cannot be reached or has lied."""
        for call in self._calls.fail(peer):
            self._failed(call, now)

    def _failed(self, call: Call, now: float, *, certain: bool = True) -> None:
        """Handle the failure of a call. ``certain`` is True if the peer got the request or
        cannot be reached."""
        note = self._neighbours.failed if certain else self._neighbours.timed_out
        match call.purpose:
            case LookupPurpose(search, contact):
                note(contact, now)
                search.lookup.settle(contact, ContactState.FAILED)
                self._pump(search, now)
            case StorePurpose(contact=contact) as store:
                note(contact, now)
                self._stored(store, False, now)
            case PingPurpose(None):
                pass
            case PingPurpose(msg.Contact() as contact):
                note(contact, now)
            case JoinOperation() as operation:
                operation.asked -= 1
                self._look_up_ourselves(operation, None, (), now)

    # What ends.

    def _finish(self, search: Search, now: float) -> None:
        match search.operation:
            case GetOperation() as operation:
                operation.searches -= 1
                if not operation.searches:
                    self._end(operation)
            case PutOperation() as operation:
                self._store_nearest(search, operation, now)
                operation.searches -= 1
                self._end_if_stored(operation)
            case JoinOperation() as operation:
                self._end(operation)
            case None:
                pass

    def _note_found(self, operation: GetOperation, search: Search, now: float) -> None:
        """Check whether a get has found enough, after a key yielded records or nearer nodes
        became known.

        If most keys have yielded records at nodes near them, and one key did so on every path,
        the other keys get the time of one more reply. Keys with dead or lying holders then do
        not delay the get, but a newer record there may still arrive. Of three keys, two must
        have yielded. If round trips take 80 ms and vary little, the third gets the minimum
        timeout of 0.2 s; three attempts at a dead holder would take seven times that.
        """
        if search.lookup.found_by:
            operation.found[search.key] = search.lookup.found_everywhere
        elif not search.finished:
            operation.found.pop(search.key, None)
        most = 2 * len(operation.found) > self._validator.rules(operation.namespace).salts
        if not (most and any(operation.found.values())):
            operation.settles = math.inf
        elif operation.settles == math.inf:
            operation.settles = now + self._calls.round_trips.timeout(connected=True)
            heappush(self._deadlines, (operation.settles, operation.token))

    def _look_up_ourselves(
        self,
        operation: JoinOperation,
        seed: msg.Contact | None,
        near: Sequence[msg.Contact],
        now: float,
    ) -> None:
        """Look up our own id through a seed that answered with ``near``, or note that a seed
        failed (None). If the last seed has failed, the lookup begins with the contacts of the
        table, and ends at once if there are none."""
        if operation.search is None and (seed is not None or not operation.asked):
            own = self._neighbours.own.id
            known = self._neighbours.table.closest(own, msg.BUCKET_SIZE)
            lookup = self._lookup(own, known, self._join_shape, now)
            operation.search = Search(lookup, operation)
        if operation.search is not None:
            if seed is not None:
                operation.search.lookup.offer((seed,))
                operation.search.lookup.offer(near, seed.peer)
            self._pump(operation.search, now)

    def _store_nearest(self, search: Search, operation: PutOperation, now: float) -> None:
        """Store a record at the nearest nodes, with the next nearest as spares. This node keeps
        a copy if it is one of the nearest."""
        replicas = self._config.replicas
        near = search.lookup.closest(2 * replicas)
        spares = near[replicas:]
        for contact in near[:replicas]:
            self._store_at(StorePurpose(operation, search.key, contact, spares), now)
        key = int.from_bytes(search.key, "big")
        own = self._neighbours.own.number ^ key
        if len(near) < replicas or own < near[replicas - 1].number ^ key:
            self._keep(search.key, operation.record, operation.blob)

    def _store_at(self, purpose: StorePurpose, now: float) -> None:
        purpose.operation.stores += 1
        request = msg.Store(purpose.key, purpose.operation.blob)
        self._call_contact(purpose.contact, request, purpose, now)

    def _stored(self, purpose: StorePurpose, held: bool, now: float) -> None:
        """Note the end of a STORE request. Ask a spare node if the record was not stored."""
        operation = purpose.operation
        operation.stores -= 1
        operation.copies += held
        if not held and purpose.spares:
            self._store_at(replace(purpose, contact=purpose.spares.pop(0)), now)
        self._end_if_stored(operation)

    def _end_if_stored(self, operation: PutOperation) -> None:
        if not operation.searches and not operation.stores:
            self._written(operation.record, operation.copies)
            self._end(operation)

    def _end(self, operation: Operation) -> None:
        """End an operation and report the outcome to its caller, if there still is one."""
        token = operation.token
        if token is not None and self._waiting.pop(token, None) is not None:
            match operation:
                case GetOperation(records=records):
                    ordered = tuple(records[publisher] for publisher in sorted(records))
                    self._emit(Found(token, ordered))
                case PutOperation(copies=copies):
                    self._emit(Written(token, copies))
                case JoinOperation():
                    self._emit(Joined(token, len(self._neighbours.table)))
        if isinstance(operation, JoinOperation):
            self._joined()


def _wrong_kind(reply: msg.Reply) -> BadMessage:
    return BadMessage(f"{type(reply).__name__} is no answer to what was asked")
