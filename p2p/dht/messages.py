"""The messages of ``/shoal/kad/1.0.0`` (docs/protocols/kad.md).

Every message is ``[kind, request id, sender's contact, ...]`` in msgpack, and travels as one
message of `p2p.host.Host`, which authenticates the sender. Contacts and records are opaque byte
strings inside it, so that they are passed on unchanged and decoded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from p2p.dht.record import MAX_ADDRS, MAX_RECORD, read_addrs_untrusted
from p2p.dht.stamp import ID_BYTES, NONCE_BYTES, dht_id, stamp_work
from p2p.errors import BadMessage
from p2p.identity import PeerId, decode_peer_id_untrusted
from p2p.multiaddr import Multiaddr
from p2p.wire import KI, Codec, MessageTable, fields_untrusted, pack, unpack_untrusted

BUCKET_SIZE: Final = 20
"""Contacts per bucket and per reply: Kademlia's k, 20 as in the paper. That many contacts are
most unlikely to fail all within an hour."""
MAX_RECORDS: Final = 64
"""Maximum number of records in one reply: one for every publisher under a key."""
MAX_CONTACT: Final = KI
"""Maximum bytes of an encoded contact: id, nonce and four addresses. Two thirds of it are never
needed."""
MAX_VALUES_BYTES: Final = 64 * KI
"""Maximum bytes of records in one reply: those of all 64 publishers of a membership key at 1
KiB each."""
# Bytes of all contacts of a reply and of the sender's own, each behind three bytes of msgpack.
MAX_DATAGRAM: Final = MAX_VALUES_BYTES + MAX_RECORD + (BUCKET_SIZE + 1) * (MAX_CONTACT + 3) + KI
"""Maximum bytes of a message: a full reply with the longest contacts."""
MAX_REQUEST_ID: Final = 2**32 - 1
"""Maximum request id, of 32 bits. A node that makes a thousand requests a second uses none
twice in 49 days."""


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer and its place in the DHT. The addresses are hints: the node that answers there
    proves its PeerId."""

    peer: PeerId
    nonce: bytes
    addrs: tuple[Multiaddr, ...]
    id: bytes = field(init=False, repr=False, compare=False)
    """DHT id of 20 bytes."""
    number: int = field(init=False, repr=False, compare=False)
    """DHT id as a number, for distances."""
    work: int = field(init=False, repr=False, compare=False)
    """Number of leading zero bits of its stamp."""
    blob: bytes = field(init=False, repr=False, compare=False)
    """Encoded contact."""

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a stamp's nonce is {NONCE_BYTES} bytes, not {len(self.nonce)}")
        if len(self.addrs) > MAX_ADDRS:
            raise ValueError(f"a contact has at most {MAX_ADDRS} addresses")
        place = dht_id(self.peer, self.nonce)
        blob = pack([self.peer.digest, self.nonce, [addr.to_bytes() for addr in self.addrs]])
        object.__setattr__(self, "id", place)
        object.__setattr__(self, "number", int.from_bytes(place, "big"))
        object.__setattr__(self, "work", stamp_work(self.peer, self.nonce))
        object.__setattr__(self, "blob", blob)

    def __repr__(self) -> str:
        return f"Contact({self.peer.short} at {self.id.hex()[:8]})"


# Decoded contacts that are remembered (about 2 MiB): a node meets the same few hundred again
# and again, and decoding one costs two hashes and its addresses.
@lru_cache(maxsize=4 * KI)
def _decode_contact(blob: bytes) -> Contact:
    fields = fields_untrusted(unpack_untrusted(blob), bytes, bytes, list, what="contact")
    digest, nonce, addrs = fields
    if len(nonce) != NONCE_BYTES:
        raise BadMessage(f"a stamp's nonce is {NONCE_BYTES} bytes, not {len(nonce)}")
    return Contact(decode_peer_id_untrusted(digest), nonce, read_addrs_untrusted(addrs))


def decode_contact_untrusted(blob: object) -> Contact:
    """Decode a contact without checking its stamp.

    Raises:
        BadMessage: The value is not a contact. Nothing else is raised, whatever the value.
    """
    if not isinstance(blob, bytes) or len(blob) > MAX_CONTACT:
        raise BadMessage(f"a contact is at most {MAX_CONTACT} bytes")
    return _decode_contact(blob)


# The kind of a reply is its request's plus 16.


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks whether the receiver is there. The reply is `Pong`."""


@dataclass(frozen=True, slots=True)
class FindNode:
    """Asks for the contacts nearest to ``target``. The reply is `Nodes`."""

    target: bytes


@dataclass(frozen=True, slots=True)
class FindValue:
    """Asks for the records under ``key`` and the contacts nearest to it. The reply is
    `Values`."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Store:
    """Asks the receiver to hold the encoded ``record`` under ``key``. The reply is `Stored`."""

    key: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """Reply to `Ping`."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Reply to `FindNode`: the nearest contacts of the sender's table."""

    contacts: tuple[Contact, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Reply to `FindValue`: encoded records that the sender holds, and the nearest contacts of
    its table."""

    records: tuple[bytes, ...]
    contacts: tuple[Contact, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Reply to `Store`: ``held`` is True if the sender holds that record or a newer one."""

    held: bool


Request = Ping | FindNode | FindValue | Store
Reply = Pong | Nodes | Values | Stored


@dataclass(frozen=True, slots=True)
class Envelope:
    """Message with its request id, the contact that its sender claims, and its body."""

    request_id: int
    sender: Contact
    body: Request | Reply


def encode(request_id: int, sender: Contact, body: Request | Reply) -> bytes:
    """Return the bytes of a message."""
    kind, *fields = _TABLE.encode(body)
    return pack([kind, request_id, sender.blob, *fields])


def decode_untrusted(data: bytes) -> Envelope:
    """Decode a message.

    Raises:
        BadMessage: The bytes are not a DHT message. Nothing else is raised, whatever the bytes.
    """
    if len(data) > MAX_DATAGRAM:
        raise BadMessage(f"a DHT message has at most {MAX_DATAGRAM} bytes, not {len(data)}")
    fields = unpack_untrusted(data)
    if not isinstance(fields, list) or len(fields) < 3:
        raise BadMessage("a DHT message has at least 3 fields")
    kind, request_id, blob = fields_untrusted(fields[:3], int, int, bytes, what="DHT message")
    if not 0 <= request_id <= MAX_REQUEST_ID:
        raise BadMessage("a request id is out of range")
    body = _TABLE.decode_untrusted(kind, fields[3:])
    return Envelope(request_id, decode_contact_untrusted(blob), body)


def _key(data: bytes) -> bytes:
    if len(data) != ID_BYTES:
        raise BadMessage(f"a key is {ID_BYTES} bytes, not {len(data)}")
    return data


def _contacts(items: list[Any]) -> tuple[Contact, ...]:
    if len(items) > BUCKET_SIZE:
        raise BadMessage(f"an answer names at most {BUCKET_SIZE} contacts")
    return tuple(decode_contact_untrusted(item) for item in items)


def _records(items: list[Any]) -> tuple[bytes, ...]:
    if len(items) > MAX_RECORDS:
        raise BadMessage(f"an answer holds at most {MAX_RECORDS} records")
    if not all(isinstance(item, bytes) and len(item) <= MAX_RECORD for item in items):
        raise BadMessage(f"a record is at most {MAX_RECORD} bytes")
    return tuple(items)


_KEY: Final = Codec(bytes, decode=_key)
_CONTACTS: Final = Codec(list, lambda contacts: [each.blob for each in contacts], _contacts)
_TABLE: Final = MessageTable[Request | Reply](
    "DHT message",
    (0, Ping),
    (1, FindNode, _KEY),
    (2, FindValue, _KEY),
    (3, Store, _KEY, Codec(bytes)),
    (16, Pong),
    (17, Nodes, _CONTACTS),
    (18, Values, Codec(list, list, _records), _CONTACTS),
    (19, Stored, Codec(bool)),
)
