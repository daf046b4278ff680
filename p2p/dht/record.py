"""Signed records: what the DHT holds, who may say it, and for how long.

A record says "publisher P states V about NAME until T", typed by its namespace. The key it lives under
follows from namespace and name, so a holder can check that it belongs there; the signature covers
everything else, so a holder can hide a record but neither change nor prolong it. Under one key there is
one record per publisher: the one with the highest sequence number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Final

from p2p.dht.core.diversity import prefixes
from p2p.dht.stamp import ID_BYTES, NONCE_BYTES, check_stamp
from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, PeerId, ProtocolId, Signer, Verify, decode_peer_id_untrusted
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted

PROTOCOL_ID: Final = ProtocolId("/shoal/kad/1.0.0")

SALTS: Final = 3
"""Keys under which an important record lives: whoever wants it gone must surround three places."""
MAX_VALUE: Final = 1200
"""Bytes of a value: addresses, a policy head, a membership entry have 50 to 600. Larger things go to
SHARDCAST, and what is said here is their digest."""
MAX_NAMESPACE: Final = 32
MAX_NAME: Final = 64
"""Bytes: a digest of 32 or a PeerId of 38, with room for a suffix."""
MAX_RECORD: Final = MAX_VALUE + MAX_NAMESPACE + MAX_NAME + SIGNATURE_BYTES + 38 + NONCE_BYTES + 40
"""Bytes of an encoded record; the last 40 are two numbers and msgpack's headers."""
MAX_SEQNO: Final = 2**63 - 1
CLOCK_TOLERANCE: Final = 300.0
"""Seconds by which two honest wall clocks may differ: a laptop that missed its time server."""
MAX_LIFETIME: Final = 24 * 3600.0
"""Seconds. A record of somebody who is gone is forgotten within a day, whoever replicates it."""

MAX_ADDRS: Final = 4
"""Addresses of one peer: IPv4 and IPv6, inside and outside."""
ADDR_NAMESPACE: Final = "addr"
"""Where a peer can be dialled. Name and publisher are the peer itself."""


class Judgement(Enum):
    """What a record is worth."""

    VALID = "valid"
    STALE = "stale"
    """Expired, or dated beyond what may be stored: clocks differ, nobody has lied."""
    REFUSED = "refused"
    """Well signed, but not what this namespace holds, as far as we know it."""
    FORGED = "forged"
    """Signature, stamp or key do not fit. Whoever passed it on has not checked it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One signed statement. ``expires`` is in wall seconds, ``nonce`` the publisher's work stamp."""

    namespace: str
    name: bytes
    publisher: PeerId
    nonce: bytes
    seqno: int
    expires: int
    value: bytes
    signature: bytes

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """What wins among records of one publisher. Ties, a publisher's doing, end alike everywhere."""
        return (self.seqno, self.expires, self.signature)

    @property
    def payload(self) -> bytes:
        """What is signed."""
        return pack(
            [
                self.namespace,
                self.name,
                self.publisher.digest,
                self.nonce,
                self.seqno,
                self.expires,
                self.value,
            ]
        )

    def encode(self) -> bytes:
        """The bytes that travel and are stored."""
        return pack([self.payload, self.signature])

    def __repr__(self) -> str:
        return f"Record({self.namespace}/{self.name.hex()[:8]} by {self.publisher.short} #{self.seqno})"


def record_key(namespace: str, name: bytes, salt: int) -> bytes:
    """The place of a record: ``sha256([namespace, name, salt])[:20]``, the three as canonical msgpack."""
    return sha256(pack([namespace, name, salt])).digest()[:ID_BYTES]


def sign_record(unsigned: Record, signer: Signer) -> Record:
    """``unsigned`` with the publisher's signature in place of whatever was there."""
    signature = signer.sign(PROTOCOL_ID, unsigned.payload)
    return Record(
        unsigned.namespace,
        unsigned.name,
        unsigned.publisher,
        unsigned.nonce,
        unsigned.seqno,
        unsigned.expires,
        unsigned.value,
        signature,
    )


def decode_record_untrusted(data: object) -> Record:
    """Raise `BadMessage`, and nothing else, whatever ``data`` is. The signature is not judged here."""
    if not isinstance(data, bytes) or len(data) > MAX_RECORD:
        raise BadMessage(f"a record is at most {MAX_RECORD} bytes")
    payload, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="signed record")
    fields = fields_untrusted(
        unpack_untrusted(payload), str, bytes, bytes, bytes, int, int, bytes, what="record"
    )
    namespace, name, publisher, nonce, seqno, expires, value = fields
    record = Record(
        namespace, name, decode_peer_id_untrusted(publisher), nonce, seqno, expires, value, signature
    )
    check_shape(record)
    if record.payload != payload:
        raise BadMessage("a record is not canonically encoded")
    return record


def check_shape(record: Record) -> None:
    """Raise `BadMessage` naming the first field that is out of bounds."""
    if not 0 < len(record.namespace) <= MAX_NAMESPACE or not record.namespace.isascii():
        raise BadMessage(f"a namespace is 1 to {MAX_NAMESPACE} ASCII characters")
    if len(record.name) > MAX_NAME:
        raise BadMessage(f"a name is at most {MAX_NAME} bytes")
    if len(record.value) > MAX_VALUE:
        raise BadMessage(f"a value is at most {MAX_VALUE} bytes, not {len(record.value)}")
    if len(record.nonce) != NONCE_BYTES or len(record.signature) != SIGNATURE_BYTES:
        raise BadMessage("a record's stamp or signature has the wrong length")
    if not 0 <= record.seqno <= MAX_SEQNO or not 0 <= record.expires <= MAX_SEQNO:
        raise BadMessage("a record's numbers are out of range")


class PublisherKind(Enum):
    """What this node knows about who has published a record, for a place under the record's key."""

    OFFICER = "officer"
    """Has a place whatever others do."""
    MEMBER = "member"
    UNKNOWN = "unknown"
    """We cannot tell: the record is about something that we take no part in."""
    STRANGER = "stranger"
    """Has no business under this key: neither held nor believed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What speaks for a record when more want to be held than there are places."""

    reserved: bool = False
    """Gives way to nobody."""
    groups: tuple[str, ...] = ()
    """The address prefixes it counts against (`p2p.dht.core.diversity`)."""


def _of_anybody(_: Record) -> PublisherKind:
    return PublisherKind.UNKNOWN


def _nowhere(_: Record) -> tuple[Multiaddr, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What one kind of record may be. Namespaces nobody has described hold any value, by anybody.

    The callables are given well-signed records; `kind_of` and `places` only ones that are `valid`. They
    must not raise.
    """

    name: str
    valid: Callable[[Record], bool]
    """Whether publisher, name and value fit."""
    salts: int = SALTS
    """Keys the record lives under."""
    max_lifetime: float = MAX_LIFETIME
    """Seconds."""
    kind_of: Callable[[Record], PublisherKind] = _of_anybody
    """Who the publisher is to us."""
    places: Callable[[Record], tuple[Multiaddr, ...]] = _nowhere
    """Where the record says that its publisher is; one address prefix gets few places under a key."""


def _is_own_address(record: Record) -> bool:
    if record.name != record.publisher.digest:
        return False
    try:
        decode_addrs_untrusted(record.value)
    except BadMessage:
        return False
    return True


def encode_addrs(addrs: tuple[Multiaddr, ...]) -> bytes:
    """The value of an address record: the newest `MAX_ADDRS` places."""
    return pack([addr.transport.to_bytes() for addr in addrs[:MAX_ADDRS]])


def decode_addrs_untrusted(data: bytes) -> tuple[Multiaddr, ...]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    return read_addrs_untrusted(unpack_untrusted(data))


def read_addrs_untrusted(items: object) -> tuple[Multiaddr, ...]:
    """A list of at most `MAX_ADDRS` binary addresses that name no peer. Raise `BadMessage`."""
    if not isinstance(items, list) or len(items) > MAX_ADDRS:
        raise BadMessage(f"a list of addresses has at most {MAX_ADDRS}")
    addrs = tuple(decode_multiaddr_untrusted(item) for item in items)
    if any(addr.parts[-1][0] == "p2p" for addr in addrs):
        raise BadMessage("a contact's address repeats its peer")
    return addrs


ADDRESSES: Final = Namespace(ADDR_NAMESPACE, _is_own_address, salts=1, max_lifetime=2 * 3600.0)
"""One key is enough: who hides it hides one peer, which heartbeats and contacts name as well."""


@dataclass(frozen=True, slots=True)
class RecordJudge:
    """Judges records: on store, and again on return, since holders are strangers."""

    verify: Verify
    difficulty: int
    namespaces: dict[str, Namespace]

    def salts(self, namespace: str) -> int:
        """How many keys records of ``namespace`` live under."""
        known = self.namespaces.get(namespace)
        return SALTS if known is None else known.salts

    def keys(self, namespace: str, name: bytes) -> tuple[bytes, ...]:
        """The keys themselves."""
        return tuple(record_key(namespace, name, salt) for salt in range(self.salts(namespace)))

    def judge(self, record: Record, key: bytes, wall: float) -> Judgement:
        """What ``record`` is worth under ``key`` when our clock says ``wall``. Cheap checks come first."""
        if key not in self.keys(record.namespace, record.name):
            return Judgement.FORGED
        known = self.namespaces.get(record.namespace)
        lifetime = MAX_LIFETIME if known is None else known.max_lifetime
        if not -CLOCK_TOLERANCE < record.expires - wall <= lifetime + CLOCK_TOLERANCE:
            return Judgement.STALE
        if not check_stamp(record.publisher, record.nonce, self.difficulty):
            return Judgement.FORGED
        if not self.verify(record.publisher, PROTOCOL_ID, record.payload, record.signature):
            return Judgement.FORGED
        if known is not None and not known.valid(record):
            return Judgement.REFUSED
        return Judgement.VALID if self.is_welcome(record) else Judgement.REFUSED

    def is_welcome(self, record: Record) -> bool:
        """Whether the publisher of ``record``, which is valid otherwise, may say such things now."""
        known = self.namespaces.get(record.namespace)
        return known is None or known.kind_of(record) is not PublisherKind.STRANGER

    def standing(self, record: Record, *, among_public: bool) -> Standing:
        """What speaks for ``record``, which is valid, when places are few."""
        known = self.namespaces.get(record.namespace)
        if known is None:
            return Standing()
        reserved = known.kind_of(record) is PublisherKind.OFFICER
        return Standing(reserved, prefixes(known.places(record), among_public=among_public))
