"""The asking half of a DHT node: readings, writings and joins on their way through lookups and calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final

from p2p.dht.config import DhtConfig
from p2p.dht.core.calls import Call, Calls, Lateness
from p2p.dht.core.events import Effect, Found, Joined, Learn, Send, Written
from p2p.dht.core.lookup import Lookup, LookupShape
from p2p.dht.core.neighbours import Neighbours
from p2p.dht.core.operations import (
    Asking,
    Joining,
    Operation,
    Probing,
    Purpose,
    Reading,
    Refreshing,
    Replicating,
    Search,
    Seeding,
    Storing,
    Writing,
)
from p2p.dht.core.store import RecordStore
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
    encode,
)
from p2p.dht.record import Record, RecordJudge
from p2p.errors import BadMessage
from p2p.identity import PeerId

MAX_SEEDS_ASKED: Final = 16
"""Seeds of one join that are asked."""
MAX_VERIFYING: Final = 64
"""Visitors that are being pinged at a time: a silent one is given up after a second or two and not pinged
again for a minute, so 2,000 stamped names that all stay silent would keep the honest waiting."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where an `Asker` reports."""

    emit: Callable[[Effect], None]
    keep: Callable[[bytes, Record, bytes], None]
    """Hold a record of our own: key, record, its encoding."""
    written: Callable[[Record, int], None]
    """A record has this many copies."""
    joined: Callable[[], None]
    """We have looked ourselves up."""


class Asker:
    """Runs operations. Effects go to ``emit``; ``written`` and ``joined`` hear of those two ending."""

    def __init__(
        self,
        neighbours: Neighbours,
        store: RecordStore,
        judge: RecordJudge,
        config: DhtConfig,
        calls: Calls[Purpose],
        hooks: Hooks,
    ) -> None:
        self._neighbours = neighbours
        self._store = store
        self._judge = judge
        self._config = config
        self._calls = calls
        self._hooks = hooks
        self._verifying = 0
        self._waiting: dict[int, Reading | Writing | Joining] = {}
        self._deadlines: list[tuple[float, int]] = []
        read, write, meet = 2 * config.replicas, config.replicas + config.alpha, config.bucket_size
        self._reading = LookupShape(alpha=config.alpha, paths=config.paths, width=read, quorum=config.quorum)
        self._writing = LookupShape(alpha=config.alpha, paths=config.paths, width=write)
        self._meeting = LookupShape(alpha=config.alpha, paths=config.paths, width=meet)

    @property
    def next_deadline(self) -> float:
        """When `expire` has something to do."""
        due = self._deadlines[0][0] if self._deadlines else math.inf
        return min(due, self._calls.next_deadline)

    # Beginnings.

    def read(self, token: int, namespace: str, name: bytes, now: float) -> None:
        """Read all records of a name."""
        reading = Reading(token, namespace, name)
        keys = self._judge.keys(namespace, name)
        for key in keys:
            for record in filter(self._judge.is_welcome, self._store.get(key)):
                reading.take(record)
        self._wait_for(token, reading, now)
        reading.searches = len(keys)
        for key in keys:
            self._search(key, reading, self._reading, now)

    def write(self, token: int | None, record: Record, now: float) -> None:
        """Store a record at the nearest nodes of each of its keys."""
        writing = Writing(token, record, record.encode())
        if token is not None:
            self._wait_for(token, writing, now)
        keys = self._judge.keys(record.namespace, record.name)
        writing.searches = len(keys)
        for key in keys:
            self._search(key, writing, self._writing, now)

    def join(self, token: int | None, peers: Iterable[PeerId], now: float) -> None:
        """Ask ``peers`` who is near us, then look ourselves up."""
        joining = Joining(token)
        if token is not None:
            self._wait_for(token, joining, now)
        own = self._neighbours.own
        seeds = [peer for peer in peers if peer != own.peer][:MAX_SEEDS_ASKED]
        joining.asked = len(seeds)
        for peer in seeds:
            self._call(peer, FindNode(own.id), Seeding(joining), now)
        if not seeds:
            self._look_around(joining, None, (), now)

    def refresh(self, target: bytes, now: float) -> None:
        """Meet who lives around ``target``."""
        self._search(target, Refreshing(), self._writing, now)

    def replicate(self, key: bytes, now: float) -> None:
        """Hand what we hold under ``key`` to the nodes now nearest to it."""
        self._search(key, Replicating(key), self._writing, now)

    def probe(self, contact: Contact, now: float) -> None:
        """Find out whether ``contact`` is alive."""
        self._call_contact(contact, Ping(), Probing(contact), now)

    def verify(self, peer: PeerId, now: float) -> None:
        """Find out whether ``peer``, which has come to us, is a node of the DHT that answers."""
        if self._verifying < MAX_VERIFYING and not self._calls.waits_for(peer):
            self._verifying += 1
            self._neighbours.note_visitor(peer, now)
            self._call(peer, Ping(), Probing(None), now)

    def waits_for(self, peer: PeerId) -> bool:
        """Whether ``peer`` owes us an answer."""
        return self._calls.waits_for(peer)

    def cancel(self, token: int) -> None:
        """Nobody waits for this any more; what is under way ends by itself."""
        self._waiting.pop(token, None)

    def _wait_for(self, token: int, operation: Reading | Writing | Joining, now: float) -> None:
        self._waiting[token] = operation
        heappush(self._deadlines, (now + self._config.timeout, token))

    # Questions.

    def _call(self, peer: PeerId, request: Request, purpose: Purpose, now: float) -> None:
        warm = self._neighbours.is_warm(peer)
        own = self._neighbours.own
        call = self._calls.open(
            peer, purpose, lambda request_id: encode(request_id, own, request), now, warm=warm
        )
        self._send(call)

    def _send(self, call: Call[Purpose]) -> None:
        """Send a question, or send it again. A visitor is asked while it is here."""
        to_visitor = isinstance(call.purpose, Probing) and call.purpose.contact is None
        self._hooks.emit(Send(call.peer, call.data, dial=not to_visitor))

    def _call_contact(self, contact: Contact, request: Request, purpose: Purpose, now: float) -> None:
        if contact.addrs and not self._neighbours.is_warm(contact.peer):
            self._hooks.emit(Learn(contact.peer, contact.addrs))
        self._call(contact.peer, request, purpose, now)

    def _search(self, target: bytes, operation: Operation, shape: LookupShape, now: float) -> Search:
        near = self._neighbours.nearest(target, self._config.bucket_size)
        search = Search(self._lookup(target, self._neighbours.usable(near, now), shape, now), operation)
        self._neighbours.table.touch(int.from_bytes(target, "big"), now)
        self._pump(search, now)
        return search

    def _lookup(self, target: bytes, seeds: Sequence[Contact], shape: LookupShape, now: float) -> Lookup:
        neighbours = self._neighbours
        return Lookup(
            target, seeds, shape, neighbours.is_met, lambda peer: not neighbours.is_visitor(peer, now)
        )

    def _pump(self, search: Search, now: float) -> None:
        """Ask whoever the lookup wants asked; end it when it has ended."""
        if search.finished:
            return
        reading = isinstance(search.operation, Reading)
        request = FindValue(search.key) if reading else FindNode(search.key)
        for contact in search.lookup.ask():
            self._call_contact(contact, request, Asking(search, contact), now)
        if search.lookup.done:
            search.finished = True
            self._finish(search, now)

    # Answers.

    def answered(self, request_id: int, sender: Contact, reply: Reply, wall: float, now: float) -> bool:
        """Take an answer; False if the sender was not asked, or we have given it up since. Raise
        `BadMessage` if it is a lie; its question has failed then.
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

    def _progress(self, call: Call[Purpose], sender: Contact, reply: Reply, wall: float, now: float) -> None:
        match call.purpose, reply:
            case (Asking(contact=contact), _) if contact.id != sender.id:
                self._failed(call, now)  # hearsay about a stamp that this peer does not use
            case Asking(Search(operation=Reading() as reading) as search, contact), Values(blobs, near):
                self._neighbours.check(near)
                fresh = reading.take_untrusted(search.key, blobs, self._judge, wall)
                near_usable = self._neighbours.usable(near, now)
                search.lookup.answered(contact, near_usable, found=fresh)
                if fresh:
                    self._note_found(reading, search, now)
                self._pump(search, now)
            case Asking(search, contact), Nodes(near) if not isinstance(search.operation, Reading):
                self._neighbours.check(near)
                search.lookup.answered(contact, self._neighbours.usable(near, now))
                self._pump(search, now)
            case Seeding(joining), Nodes(near):
                self._neighbours.check(near)
                joining.asked -= 1
                self._look_around(joining, sender, self._neighbours.usable(near, now), now)
            case Storing() as storing, Stored(held):
                self._stored(storing, held, now)
            case Probing(contact), Pong():
                self._verifying -= contact is None
            case _:
                raise BadMessage(f"{type(reply).__name__} is no answer to what was asked")

    def expire(self, now: float) -> None:
        """Send again what is late, give up what is too late, end what has taken too long."""
        for call, lateness in self._calls.expire(now):
            if lateness is Lateness.FAILED:
                self._failed(call, now, certain=self._neighbours.is_warm(call.peer))
                continue
            self._send(call)
            if isinstance(call.purpose, Asking):
                search, contact = call.purpose.search, call.purpose.contact
                note = search.lookup.late if lateness is Lateness.LATE else search.lookup.lost
                note(contact)
                self._pump(search, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            operation = self._waiting.get(heappop(self._deadlines)[1])
            if operation is not None:
                self._end(operation)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """``peer`` cannot be reached, or talks nonsense: every question to it has failed."""
        for call in self._calls.fail(peer):
            self._failed(call, now)

    def _failed(self, call: Call[Purpose], now: float, *, certain: bool = True) -> None:
        """A question will not be answered. ``certain``: the peer has had it, or cannot be reached."""
        silent = self._neighbours.silent if certain else self._neighbours.doubted
        match call.purpose:
            case Asking(search, contact):
                silent(contact, now)
                search.lookup.failed(contact)
                self._pump(search, now)
            case Storing(contact=contact) as storing:
                silent(contact, now)
                self._stored(storing, False, now)
            case Probing(None):
                self._verifying -= 1
            case Probing(Contact() as contact):
                silent(contact, now)
            case Seeding(joining):
                joining.asked -= 1
                self._look_around(joining, None, (), now)

    # Endings.

    def _finish(self, search: Search, now: float) -> None:
        match search.operation:
            case Reading() as reading:
                reading.searches -= 1
                if not reading.searches:
                    self._end(reading)
            case Writing() as writing:
                self._store_nearest(search, writing, now)
                writing.searches -= 1
                self._end_if_written(writing)
            case Joining() as joining:
                self._end(joining)
            case Replicating(key):
                self._hand_on(search, key, now)
            case Refreshing():
                pass

    def _note_found(self, reading: Reading, search: Search, now: float) -> None:
        """A key has yielded records. Once most keys have, and one of them on every path, the rest get the
        time of one more answer: keys whose holders are dead or lying do not hold up the reading, and a
        newer record there still has its chance.
        """
        reading.found[search.key] = search.lookup.found_everywhere
        most = 2 * len(reading.found) > self._judge.salts(reading.namespace)
        if most and any(reading.found.values()) and not reading.settled:
            reading.settled = True
            patience = self._calls.round_trips.timeout(warm=True)
            heappush(self._deadlines, (now + patience, reading.token))

    def _look_around(
        self, joining: Joining, seed: Contact | None, near: Sequence[Contact], now: float
    ) -> None:
        """A seed has answered, or failed: look ourselves up from there, or give up with the last."""
        if joining.search is None and (seed is not None or not joining.asked):
            own = self._neighbours.own.id
            known = self._neighbours.nearest(own, MAX_CONTACTS)
            joining.search = Search(self._lookup(own, known, self._meeting, now), joining)
        if joining.search is not None:
            if seed is not None:
                joining.search.lookup.offer((seed,))
                joining.search.lookup.offer(near, seed.peer)
            self._pump(joining.search, now)

    def _store_nearest(self, search: Search, writing: Writing, now: float) -> None:
        """Store at the nearest; the next nearest stand by. We keep a copy ourselves if we are one of them."""
        replicas = self._config.replicas
        near = search.lookup.closest(2 * replicas)
        spares = near[replicas:]
        for contact in near[:replicas]:
            self._store_at(Storing(writing, search.key, contact, spares), writing.blob, now)
        if len(near) < replicas or self._is_nearer(search.key, near[replicas - 1]):
            self._hooks.keep(search.key, writing.record, writing.blob)

    def _is_nearer(self, key: bytes, contact: Contact) -> bool:
        number = int.from_bytes(key, "big")
        return self._neighbours.own.number ^ number < contact.number ^ number

    def _store_at(self, storing: Storing, blob: bytes, now: float) -> None:
        if storing.writing is not None:
            storing.writing.stores += 1
        self._call_contact(storing.contact, Store(storing.key, blob), storing, now)

    def _stored(self, storing: Storing, held: bool, now: float) -> None:
        """One node has answered a store, or will not."""
        writing = storing.writing
        if writing is None:
            return
        writing.stores -= 1
        writing.copies += held
        if not held and storing.spares:
            self._store_at(replace(storing, contact=storing.spares.pop(0)), writing.blob, now)
        self._end_if_written(writing)

    def _hand_on(self, search: Search, key: bytes, now: float) -> None:
        self._store.note_refreshed(key, now)
        for contact in search.lookup.closest(self._config.replicas):
            for blob in self._store.blobs(key):
                self._store_at(Storing(None, key, contact, []), blob, now)

    def _end_if_written(self, writing: Writing) -> None:
        if not writing.searches and not writing.stores:
            self._hooks.written(writing.record, writing.copies)
            self._end(writing)

    def _end(self, operation: Reading | Writing | Joining) -> None:
        """Report to whoever waits."""
        waited = operation.token is not None and self._waiting.pop(operation.token, None) is not None
        match operation:
            case Reading(token=token, records=records) if waited:
                ordered = tuple(records[publisher] for publisher in sorted(records))
                self._hooks.emit(Found(token, ordered))
            case Writing(token=int(token), copies=copies) if waited:
                self._hooks.emit(Written(token, copies))
            case Joining(token=token):
                if token is not None and waited:
                    self._hooks.emit(Joined(token, len(self._neighbours.table)))
                self._hooks.joined()
            case _:
                pass
