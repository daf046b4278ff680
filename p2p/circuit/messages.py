"""Messages of circuit relay v2 and DCUtR, as libp2p's protobufs have them.

Specifications: libp2p/specs, relay/circuit-v2.md and relay/DCUtR.md. Each message travels
behind its length in a varint; after the answer `HopStatus.OK` the stream itself is the circuit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from p2p.errors import BadMessage
from p2p.identity import FOREIGN, PeerId, ProtocolId, Signer, decode_peer_id_untrusted, verify
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.protobuf import (
    FieldBudget,
    as_bytes_untrusted,
    as_int_untrusted,
    field,
    fields_untrusted,
)
from p2p.wire import KI, encode_varint

HOP_ID: Final = ProtocolId("/libp2p/circuit/relay/0.2.0/hop")
STOP_ID: Final = ProtocolId("/libp2p/circuit/relay/0.2.0/stop")
DCUTR_ID: Final = ProtocolId("/libp2p/dcutr")
MAX_MESSAGE: Final = 4 * KI
MAX_ADDRS: Final = 4
"""Addresses that are taken from one message, and dialled: a bound on the SYNs that a peer
can make us send."""
_MAX_FIELDS: Final = 64
_VOUCHER_TYPE: Final = b"\x03\x02"


class HopType(IntEnum):
    """Kinds of `HopMessage`."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """Kinds of `StopMessage`."""

    CONNECT = 0
    STATUS = 1


class PunchType(IntEnum):
    """Kinds of `HolePunch`."""

    CONNECT = 100
    SYNC = 300


class HopStatus(IntEnum):
    """A relay's answer."""

    UNUSED = 0
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of one circuit; 0 means unlimited."""

    seconds: int = 0
    bytes: int = 0
    """Bytes in each direction."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A relay's promise to accept circuits for a peer."""

    expires: int
    """Seconds since 1970."""
    addrs: tuple[Multiaddr, ...] = ()
    """Addresses of the relay, according to itself."""
    voucher: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopMessage:
    """A message between a relay and the peer that asks it for something."""

    kind: HopType
    peer: PeerId | None = None
    reservation: Reservation | None = None
    limit: Limit = Limit()
    status: int = HopStatus.UNUSED

    def encode(self) -> bytes:
        """The message without its length."""
        made = b""
        if self.reservation is not None:
            one = self.reservation
            addrs = b"".join(field(2, addr.to_bytes()) for addr in one.addrs)
            voucher = field(3, one.voucher) if one.voucher else b""
            made = field(3, field(1, one.expires) + addrs + voucher)
        head = field(1, self.kind) + _encode_peer(self.peer) + made
        return head + _encode_limit(4, self.limit) + _encode_status(5, self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """A message between a relay and the peer to which it brings a circuit."""

    kind: StopType
    peer: PeerId | None = None
    limit: Limit = Limit()
    status: int = HopStatus.UNUSED

    def encode(self) -> bytes:
        """The message without its length."""
        head = field(1, self.kind) + _encode_peer(self.peer)
        return head + _encode_limit(3, self.limit) + _encode_status(4, self.status)


@dataclass(frozen=True, slots=True)
class HolePunch:
    """DCUtR's only message."""

    kind: PunchType
    addrs: tuple[Multiaddr, ...] = ()
    """The sender's addresses as others have seen them."""

    def encode(self) -> bytes:
        """The message without its length."""
        addrs = (field(2, addr.to_bytes()) for addr in self.addrs)
        return b"".join([field(1, self.kind), *addrs])


def _encode_peer(peer: PeerId | None) -> bytes:
    return b"" if peer is None else field(2, field(1, peer))


def _encode_limit(number: int, limit: Limit) -> bytes:
    if limit == Limit():
        return b""
    return field(number, field(1, limit.seconds) + field(2, limit.bytes))


def _encode_status(number: int, status: int) -> bytes:
    return field(number, status) if status else b""


def decode_hop_untrusted(data: bytes) -> HopMessage:
    """Decode a message of the hop protocol.

    Raises:
        BadMessage: The bytes are not such a message. Nothing else is raised, whatever the
            bytes.
    """
    return HopMessage(**_circuit_untrusted(data, HopType, reservation=3, limit=4, status=5))


def decode_stop_untrusted(data: bytes) -> StopMessage:
    """Decode a message of the stop protocol.

    Raises:
        BadMessage: The bytes are not such a message. Nothing else is raised, whatever the
            bytes.
    """
    return StopMessage(**_circuit_untrusted(data, StopType, limit=3, status=4))


def _circuit_untrusted(
    data: bytes, kinds: type[HopType | StopType], **numbers: int
) -> dict[str, Any]:
    """Return the fields of a message by name. ``numbers`` are those of the fields that the two
    protocols number differently."""
    names = {1: "kind", 2: "peer", **{number: name for name, number in numbers.items()}}
    found: dict[str, Any] = {"kind": -1}
    budget = FieldBudget(_MAX_FIELDS)
    for number, value in fields_untrusted(data, budget):
        match names.get(number):
            case "peer":
                found["peer"] = _peer_untrusted(value, budget)
            case "reservation":
                found["reservation"] = _reservation_untrusted(value, budget)
            case "limit":
                found["limit"] = _limit_untrusted(value, budget)
            case str(name):
                found[name] = as_int_untrusted(value, f"a circuit's {name}")
    try:
        found["kind"] = kinds(found["kind"])
    except ValueError:
        raise BadMessage("a message about a circuit has no known type") from None
    return found


def decode_punch_untrusted(data: bytes) -> HolePunch:
    """Decode a message of DCUtR. Addresses of kinds that we do not dial are left out.

    Raises:
        BadMessage: The bytes are not such a message. Nothing else is raised, whatever the
            bytes.
    """
    kind, addrs = -1, list[Multiaddr]()
    for number, value in fields_untrusted(data, FieldBudget(_MAX_FIELDS)):
        if number == 1:
            kind = as_int_untrusted(value, "a punch's type")
        elif number == 2:
            _add_addr(addrs, as_bytes_untrusted(value, "an observed address"))
    try:
        return HolePunch(PunchType(kind), tuple(addrs))
    except ValueError:
        raise BadMessage("a hole punch has no known type") from None


def _add_addr(addrs: list[Multiaddr], data: bytes) -> None:
    """Append the address, unless its kind is not dialled here or the list is full."""
    if len(addrs) < MAX_ADDRS:
        try:
            addrs.append(decode_multiaddr_untrusted(data))
        except BadMessage:
            return


def _peer_untrusted(value: int | bytes, budget: FieldBudget) -> PeerId:
    for number, inner in fields_untrusted(as_bytes_untrusted(value, "a peer"), budget):
        if number == 1:
            return decode_peer_id_untrusted(inner)
    raise BadMessage("a peer without an id")


def _limit_untrusted(value: int | bytes, budget: FieldBudget) -> Limit:
    found = {1: 0, 2: 0}
    for number, inner in fields_untrusted(as_bytes_untrusted(value, "a limit"), budget):
        if number in found:
            found[number] = as_int_untrusted(inner, "a limit's value")
    return Limit(found[1], found[2])


def _reservation_untrusted(value: int | bytes, budget: FieldBudget) -> Reservation:
    expires, voucher, addrs = 0, b"", list[Multiaddr]()
    for number, inner in fields_untrusted(as_bytes_untrusted(value, "a reservation"), budget):
        if number == 1:
            expires = as_int_untrusted(inner, "an expiry")
        elif number == 2:
            _add_addr(addrs, as_bytes_untrusted(inner, "a relay's address"))
        elif number == 3:
            voucher = as_bytes_untrusted(inner, "a voucher")
    return Reservation(expires, tuple(addrs), voucher)


def sign_voucher(signer: Signer, peer: PeerId, expires: int) -> bytes:
    """Return the relay's signed statement that ``peer`` has a reservation (libp2p's
    envelope)."""
    payload = field(1, signer.peer_id) + field(2, peer) + field(3, expires)
    signature = signer.sign(FOREIGN, _signed(payload))
    key = field(1, 1) + field(2, signer.peer_id.public_key)
    return field(1, key) + field(2, _VOUCHER_TYPE) + field(3, payload) + field(5, signature)


def check_voucher_untrusted(voucher: bytes, relay: PeerId, peer: PeerId) -> None:
    """Check that ``relay`` signed that ``peer`` may have circuits. Raise `BadMessage`
    otherwise, and nothing else."""
    key = payload = signature = b""
    budget = FieldBudget(_MAX_FIELDS)
    for number, value in fields_untrusted(voucher, budget):
        if number == 1:
            key = as_bytes_untrusted(value, "a key")
        elif number == 3:
            payload = as_bytes_untrusted(value, "a voucher's payload")
        elif number == 5:
            signature = as_bytes_untrusted(value, "a signature")
    named = {number: value for number, value in fields_untrusted(payload, budget)}
    if key != field(1, 1) + field(2, relay.public_key):
        raise BadMessage("a voucher was signed by somebody else")
    if named.get(1) != relay or named.get(2) != peer:
        raise BadMessage("a voucher names other peers")
    if not verify(relay, FOREIGN, _signed(payload), signature):
        raise BadMessage("a voucher's signature is wrong")


def _signed(payload: bytes) -> bytes:
    parts = (b"libp2p-relay-rsvp", _VOUCHER_TYPE, payload)
    return b"".join(encode_varint(len(part)) + part for part in parts)
