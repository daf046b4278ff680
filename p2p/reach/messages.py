"""Messages of AutoNAT v2, as libp2p's protobufs have them.

Specification: libp2p/specs, autonat/autonat-v2.md.
Each travels behind its length in a varint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import ProtocolId
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.protobuf import (
    FieldBudget,
    as_bytes_untrusted,
    as_int_untrusted,
    field,
    fields_untrusted,
    fixed64,
)
from p2p.wire import KI

DIAL_REQUEST_ID: Final = ProtocolId("/libp2p/autonat/2/dial-request")
DIAL_BACK_ID: Final = ProtocolId("/libp2p/autonat/2/dial-back")
MAX_MESSAGE: Final = 8 * KI
"""Bytes: a piece of dial data has up to 4,096 and a few around them."""
DIAL_DATA: Final = 30_000
"""Bytes that a client sends before a server dials an address that is not the client's own: more
than the dial costs its target."""
MAX_DIAL_DATA: Final = 100_000
"""Most bytes that a client sends; a server that demands more gets nothing."""
_MAX_FIELDS: Final = 64


class ResponseStatus(IntEnum):
    """A server's answer to a request."""

    INTERNAL_ERROR = 0
    REQUEST_REJECTED = 100
    DIAL_REFUSED = 101
    OK = 200


class DialStatus(IntEnum):
    """Result of the server's dial."""

    UNUSED = 0
    DIAL_ERROR = 100
    DIAL_BACK_ERROR = 101
    OK = 200


@dataclass(frozen=True, slots=True)
class DialRequest:
    """The client's question: can one of these addresses be dialled?"""

    addrs: tuple[Multiaddr | None, ...]
    """Addresses in order of preference; None for one of a kind that is not dialled here."""
    nonce: int

    def encode(self) -> bytes:
        """The message without its length."""
        addrs = (field(1, addr.to_bytes()) for addr in self.addrs if addr is not None)
        return field(1, b"".join([*addrs, fixed64(2, self.nonce)]))


@dataclass(frozen=True, slots=True)
class DialResponse:
    """The server's answer."""

    status: int
    index: int = 0
    """Index of the address that was dialled."""
    dial: int = DialStatus.UNUSED

    def encode(self) -> bytes:
        """The message without its length."""
        parts = field(1, self.status) + field(2, self.index) + field(3, self.dial)
        return field(2, parts)


@dataclass(frozen=True, slots=True)
class DialDataRequest:
    """The server's demand for bytes before it dials a foreign address."""

    index: int
    size: int

    def encode(self) -> bytes:
        """The message without its length."""
        return field(3, field(1, self.index) + field(2, self.size))


@dataclass(frozen=True, slots=True)
class DialDataResponse:
    """Some of the bytes that the server demands."""

    data: bytes

    def encode(self) -> bytes:
        """The message without its length."""
        return field(4, field(1, self.data))


Message = DialRequest | DialResponse | DialDataRequest | DialDataResponse


def decode_untrusted(data: bytes) -> Message:
    """Decode a message of AutoNAT.

    Raises:
        BadMessage: The bytes are not such a message. Nothing else is raised, whatever the
            bytes.
    """
    budget = FieldBudget(_MAX_FIELDS)
    for number, value in fields_untrusted(data, budget):
        if number not in (1, 2, 3, 4):
            continue
        body = as_bytes_untrusted(value, "a message")
        if number == 1:
            return _request_untrusted(body, budget)
        if number == 4:
            return DialDataResponse(
                b"".join(
                    as_bytes_untrusted(inner, "dial data")
                    for key, inner in fields_untrusted(body, budget)
                    if key == 1
                )
            )
        numbers = {
            key: as_int_untrusted(inner, "a field of an answer")
            for key, inner in fields_untrusted(body, budget)
        }
        if number == 3:
            return DialDataRequest(numbers.get(1, 0), numbers.get(2, 0))
        return DialResponse(numbers.get(1, 0), numbers.get(2, 0), numbers.get(3, 0))
    raise BadMessage("an AutoNAT message is of no known kind")


def _request_untrusted(body: bytes, budget: FieldBudget) -> DialRequest:
    addrs, nonce = list[Multiaddr | None](), 0
    for number, value in fields_untrusted(body, budget):
        if number == 1 and len(addrs) < 10:
            try:
                addrs.append(decode_multiaddr_untrusted(value))
            except BadMessage:
                addrs.append(None)
        elif number == 2:
            nonce = as_int_untrusted(value, "a nonce")
    return DialRequest(tuple(addrs), nonce)


def encode_dial_back(nonce: int) -> bytes:
    """The first message on a dial-back's stream."""
    return fixed64(1, nonce)


def decode_dial_back_untrusted(data: bytes) -> int:
    """Return the nonce of a dial-back. Raise `BadMessage`, and nothing else."""
    for number, value in fields_untrusted(data, FieldBudget(_MAX_FIELDS)):
        if number == 1:
            return as_int_untrusted(value, "a nonce")
    raise BadMessage("a dial-back without a nonce")
