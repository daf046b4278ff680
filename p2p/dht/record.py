"""Signed records: the one thing that the DHT holds, and its bytes.

A record says "publisher P states V about NAME until T", typed by its namespace. The key it
lives under follows from namespace and name, so a holder can check that it belongs there; the
signature covers everything else, so a holder can hide a record but neither change nor prolong
it. Under one key there is one record per publisher: the one with the highest sequence number.
Whether a record is to be believed is decided in `p2p.dht.core.validation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from p2p.dht.stamp import ID_BYTES, NONCE_BYTES
from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, PeerId, ProtocolId, Signer, decode_peer_id_untrusted
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted

PROTOCOL_ID: Final = ProtocolId("/shoal/kad/1.0.0")

MAX_VALUE: Final = 1200
"""Maximum bytes of a value. Addresses, a policy head or a membership entry have 50 to 600.
Larger data goes to SHARDCAST, and its digest into a record."""
MAX_NAMESPACE: Final = 32
"""Maximum ASCII characters of a namespace's name, a word chosen by an application. Ours have 3
and 4."""
MAX_NAME: Final = 64
"""Maximum bytes of a record's name: a digest of 32 or a PeerId of 38, with room for a
suffix."""
MAX_RECORD: Final = (
    MAX_VALUE + MAX_NAMESPACE + MAX_NAME + SIGNATURE_BYTES + 38 + NONCE_BYTES + 40
)
"""Maximum bytes of an encoded record: value, namespace, name, signature, PeerId, stamp, and 40
for two numbers and the headers of msgpack."""
MAX_SEQNO: Final = 2**63 - 1
"""Maximum sequence number of a record: the largest number that every msgpack reader takes as a
signed integer."""

MAX_ADDRS: Final = 4
"""Maximum number of addresses of one peer: IPv4 and IPv6, public and private."""
ADDR_NAMESPACE: Final = "addr"
"""Namespace of address records, whose name and publisher are the peer itself."""
MAX_ADDR_LIFETIME: Final = 2 * 3600.0
"""Maximum lifetime of an address record in seconds: twice a node's default. After that no node
dials a machine at an address that it has left."""


@dataclass(frozen=True, slots=True)
class Record:
    """Signed record. ``expires`` is in wall seconds, and ``nonce`` is the publisher's work
    stamp."""

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
        """Order among the records of one publisher; the highest wins. Two records with one
        sequence number, which only their publisher can make, are ordered alike by every
        node."""
        return (self.seqno, self.expires, self.signature)

    @property
    def payload(self) -> bytes:
        """Bytes that are signed."""
        place = [self.namespace, self.name, self.publisher.digest, self.nonce]
        return pack([*place, self.seqno, self.expires, self.value])

    def encode(self) -> bytes:
        """Return the bytes on the wire and in a store."""
        return pack([self.payload, self.signature])

    def __repr__(self) -> str:
        name = f"{self.namespace}/{self.name.hex()[:8]}"
        return f"Record({name} by {self.publisher.short} #{self.seqno})"


def record_key(namespace: str, name: bytes, salt: int) -> bytes:
    """Return the key of a record: ``sha256([namespace, name, salt])[:20]``, with the three as
    canonical msgpack."""
    return sha256(pack([namespace, name, salt])).digest()[:ID_BYTES]


def sign_record(unsigned: Record, signer: Signer) -> Record:
    """Return ``unsigned`` with the publisher's signature in place of its own."""
    return replace(unsigned, signature=signer.sign(PROTOCOL_ID, unsigned.payload))


def decode_record_untrusted(data: object) -> Record:
    """Decode a record without checking its signature.

    Raises:
        BadMessage: The value is not a record. Nothing else is raised, whatever the value.
    """
    if not isinstance(data, bytes) or len(data) > MAX_RECORD:
        raise BadMessage(f"a record is at most {MAX_RECORD} bytes")
    signed = unpack_untrusted(data)
    payload, signature = fields_untrusted(signed, bytes, bytes, what="signed record")
    fields = fields_untrusted(
        unpack_untrusted(payload), str, bytes, bytes, bytes, int, int, bytes, what="record"
    )
    fields[2] = decode_peer_id_untrusted(fields[2])
    fields.append(signature)
    record = Record(*fields)
    check_content(record.namespace, record.name, record.value, BadMessage)
    if len(record.nonce) != NONCE_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadMessage("a record's stamp or signature has the wrong length")
    if not 0 <= record.seqno <= MAX_SEQNO or not 0 <= record.expires <= MAX_SEQNO:
        raise BadMessage("a record's numbers are out of range")
    if record.payload != payload:
        raise BadMessage("a record is not canonically encoded")
    return record


def check_content(namespace: str, name: bytes, value: bytes, error: type[Exception]) -> None:
    """Raise ``error`` if a part of what a publisher says is empty or too long."""
    if not 0 < len(namespace) <= MAX_NAMESPACE or not namespace.isascii():
        raise error(f"a namespace is 1 to {MAX_NAMESPACE} ASCII characters")
    if len(name) > MAX_NAME:
        raise error(f"a name is at most {MAX_NAME} bytes")
    if len(value) > MAX_VALUE:
        raise error(f"a value is at most {MAX_VALUE} bytes, not {len(value)}")


def encode_addrs(addrs: tuple[Multiaddr, ...]) -> bytes:
    """Return the value of an address record with the first `MAX_ADDRS` of ``addrs``."""
    return pack([addr.transport.to_bytes() for addr in addrs[:MAX_ADDRS]])


def decode_addrs_untrusted(data: bytes) -> tuple[Multiaddr, ...]:
    """Decode the value of an address record.

    Raises:
        BadMessage: The bytes are not such a value. Nothing else is raised, whatever the bytes.
    """
    return read_addrs_untrusted(unpack_untrusted(data))


def read_addrs_untrusted(items: object) -> tuple[Multiaddr, ...]:
    """Read a list of at most `MAX_ADDRS` binary addresses that name no peer.

    Raises:
        BadMessage: The value is not such a list.
    """
    if not isinstance(items, list) or len(items) > MAX_ADDRS:
        raise BadMessage(f"a list of addresses has at most {MAX_ADDRS}")
    addrs = tuple(decode_multiaddr_untrusted(item) for item in items)
    if any(addr.parts[-1][0] == "p2p" for addr in addrs):
        raise BadMessage("a contact's address repeats its peer")
    return addrs
