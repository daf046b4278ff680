"""The DHT's transcripts. The core is that of ``me``; peers and records go by names.

    join PEER...                seeds
    put NAME VALUE SECONDS      get NAME                   forget NAME
    connect PEER                disconnect PEER            unreachable PEER
    reply PEER WHAT             to the oldest open request that WHAT answers: ``pong``,
                                ``nodes PEER...``, ``values RECORD... | PEER...``,
                                ``stored`` or ``refused``; a peer may be
                                ``unstamped:PEER``, a record ``forged:RECORD``
    request PEER WHAT           WHAT is ``ping``, ``find_node PEER``, ``find_value NAME``,
                                ``store RECORD``
    record RECORD NAME by PEER  makes a record for the commands above
    wait SECONDS                ticks come when they are due

Below a step stand the effects, then what it has changed: contacts in the table, records held.
The lookups have 2 paths with 1 request each, a record has 2 replicas and 1 key, and a stamp is
4 bits of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from p2p.dht import messages as msg
from p2p.dht.config import DhtConfig
from p2p.dht.core import events as ev
from p2p.dht.core.core import DhtCore
from p2p.dht.core.table import RoutingTable
from p2p.dht.core.validation import Namespace, RecordValidator
from p2p.dht.record import Record, decode_record_untrusted, record_key, sign_record
from p2p.dht.stamp import make_stamp, stamp_work
from p2p.events import AddAddrs, PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from tests.transcripts import changes, player
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named

DIFFICULTY = 4
WALL = 1_800_000_000.0
NAMESPACE = "notes"


@player("dht")
class DhtPlayer:
    """One DHT core and the names of its peers and records."""

    def __init__(self) -> None:
        self._now = 0.0
        self._contacts: dict[str, msg.Contact] = {}
        self._names: dict[PeerId, str] = {}
        self._records: dict[str, Record] = {}
        self._keys: dict[bytes, str] = {}
        self._open: dict[str, dict[int, type]] = {}
        self._tokens = 0
        own = self._contact("me")
        config = DhtConfig(difficulty=DIFFICULTY, alpha=1, paths=2, replicas=2, quorum=1)
        notes = Namespace(NAMESPACE, lambda record: True, salts=1)
        validator = RecordValidator(fake_verify, DIFFICULTY, {NAMESPACE: notes})
        table = RoutingTable(own, msg.BUCKET_SIZE)
        self._core = DhtCore(own, FakeSigner(own.peer), validator, table, config, Random(1))

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        before = self._state()
        if command == "wait":
            yield from self._wait(float(args[0]))
        elif command == "record":
            self._make_record(args[0], args[1], args[3])
        else:
            yield from self._feed(self._event(command, args))
        yield from changes(before, self._state())

    def _wait(self, seconds: float) -> list[str]:
        end, out = self._now + seconds, []
        while self._core.next_deadline <= end:
            self._now = max(self._now, self._core.next_deadline)
            out += [f"{self._now:.1f} s: {said}" for said in self._feed(Tick(self._wall))]
        self._now = end
        return out

    @property
    def _wall(self) -> float:
        return WALL + self._now

    def _feed(self, event: ev.Event) -> list[str]:
        return [self._show(effect) for effect in self._core.handle(event, self._now)]

    def _event(self, verb: str, words: list[str]) -> ev.Event:
        self._tokens += 1
        token = self._tokens
        match verb:
            case "join":
                return ev.Join(token, tuple(self._contact(name).peer for name in words))
            case "put":
                name, value, lifetime = words
                self._key(name)
                return ev.Put(
                    token, NAMESPACE, name.encode(), value.encode(), float(lifetime), self._wall
                )
            case "get":
                self._key(words[0])
                return ev.Get(token, NAMESPACE, words[0].encode())
            case "forget":
                return ev.Forget(NAMESPACE, words[0].encode())
            case "connect":
                return PeerUp(self._contact(words[0]).peer)
            case "disconnect" | "unreachable":
                peer = self._contact(words[0]).peer
                return PeerDown(peer, unreachable=verb == "unreachable")
            case "reply":
                return self._answer(words[0], self._reply(words[1:]))
            case "request":
                return self._received(words[0], token, self._request(words[1:]))
            case _:
                raise ValueError(verb)

    def _received(self, name: str, request_id: int, body: msg.Request | msg.Reply) -> Received:
        sender = self._contact(name)
        return Received(sender.peer, msg.encode(request_id, sender, body), self._wall)

    def _answer(self, name: str, body: msg.Reply) -> Received:
        kinds = {
            msg.Pong: msg.Ping,
            msg.Nodes: msg.FindNode,
            msg.Values: msg.FindValue,
            msg.Stored: msg.Store,
        }
        waiting = self._open[name]
        fitting = (each for each, kind in waiting.items() if kind is kinds[type(body)])
        request_id = next(fitting, None)
        if request_id is None:
            raise ValueError(f"{name} has no open request that {body} answers, but {waiting}")
        del waiting[request_id]
        return self._received(name, request_id, body)

    def _reply(self, words: list[str]) -> msg.Reply:
        match words:
            case ["pong"]:
                return msg.Pong()
            case ["nodes", *names]:
                return msg.Nodes(tuple(self._contact(name) for name in names))
            case ["values", *rest]:
                cut = rest.index("|")
                records = tuple(self._record(name).encode() for name in rest[:cut])
                return msg.Values(
                    records, tuple(self._contact(name) for name in rest[cut + 1 :])
                )
            case [answer]:
                return msg.Stored(answer == "stored")
            case _:
                raise ValueError(words)

    def _request(self, words: list[str]) -> msg.Request:
        match words:
            case ["ping"]:
                return msg.Ping()
            case ["find_node", name]:
                return msg.FindNode(self._contact(name).id)
            case ["find_value", name]:
                return msg.FindValue(self._key(name))
            case ["store", name]:
                record = self._record(name)
                return msg.Store(self._key(record.name.decode()), record.encode())
            case _:
                raise ValueError(words)

    def _make_record(self, record: str, name: str, publisher: str) -> None:
        contact = self._contact(publisher)
        key, seqno = name.encode(), len(self._records) + 1
        expires = int(self._wall) + 3600
        value = record.encode()
        unsigned = Record(
            NAMESPACE, key, contact.peer, contact.nonce, seqno, expires, value, b""
        )
        self._records[record] = sign_record(unsigned, FakeSigner(contact.peer))
        self._key(name)

    def _record(self, name: str) -> Record:
        kind, _, plain = name.rpartition(":")
        record = self._records[plain]
        return replace(record, value=b"a lie") if kind == "forged" else record

    def _key(self, name: str) -> bytes:
        key = record_key(NAMESPACE, name.encode(), 0)
        self._keys[key] = name
        return key

    def _contact(self, name: str) -> msg.Contact:
        known = self._contacts.get(name)
        if known is None:
            number = len(self._contacts)
            peer = peer_named(number)
            nonce = make_stamp(peer, DIFFICULTY)
            if name.startswith("unstamped:"):
                nonce = next(
                    guess
                    for guess in (each.to_bytes(8, "big") for each in range(99))
                    if stamp_work(peer, guess) < DIFFICULTY
                )
            addr = Multiaddr.tcp(f"10.0.0.{number + 1}", 4001)
            known = self._contacts[name] = msg.Contact(peer, nonce, (addr,))
            self._names[peer] = name
        return known

    # What is printed.

    def _show(self, effect: ev.Effect) -> str:
        match effect:
            case Send(peer, data) | ev.SendIfConnected(peer, data):
                name = self._names[peer]
                envelope = msg.decode_untrusted(data)
                if isinstance(
                    envelope.body, msg.Ping | msg.FindNode | msg.FindValue | msg.Store
                ):
                    waiting = self._open.setdefault(name, {})
                    waiting[envelope.request_id] = type(envelope.body)
                how = "" if isinstance(effect, Send) else " (without a dial)"
                return f"send {name}: {self._show_body(envelope.body)}{how}"
            case AddAddrs(peer):
                return f"learn the address of {self._names[peer]}"
            case Penalise(peer, offence, reason):
                return f"penalise {self._names[peer]} {offence.points:g} points: {reason}"
            case ev.Joined(_, contacts):
                return f"joined, knowing {contacts}"
            case ev.Found(_, records):
                return f"found {self._show_records(records) or 'nothing'}"
            case ev.Written(_, copies):
                return f"written, {copies} copies"

    def _show_body(self, body: msg.Request | msg.Reply) -> str:
        match body:
            case msg.Ping() | msg.Pong():
                return type(body).__name__.lower()
            case msg.FindNode(target):
                ids = {contact.id: name for name, contact in self._contacts.items()}
                return f"find_node {ids.get(target) or self._keys.get(target, 'a random id')}"
            case msg.FindValue(key):
                return f"find_value {self._keys[key]}"
            case msg.Store(key, blob):
                record = decode_record_untrusted(blob)
                return f"store {self._keys[key]} with sequence number {record.seqno}"
            case msg.Nodes(contacts):
                return f"nodes {self._show_contacts(contacts)}"
            case msg.Values(blobs, contacts):
                records = tuple(decode_record_untrusted(blob) for blob in blobs)
                return f"values {self._show_records(records)} | {self._show_contacts(contacts)}"
            case msg.Stored(held):
                return "stored" if held else "refused"

    def _show_contacts(self, contacts: tuple[msg.Contact, ...]) -> str:
        return " ".join(self._names[contact.peer] for contact in contacts)

    def _show_records(self, records: tuple[Record, ...]) -> str:
        return ", ".join(
            f"{each.value.decode()} by {self._names[each.publisher]}" for each in records
        )

    def _state(self) -> dict[str, str]:
        core = self._core
        table = " ".join(name for peer, name in self._names.items() if core.contact_of(peer))
        return {"table": table or "empty", "records held": str(core.records)}
