"""Self-describing addresses: ``/ip4/1.2.3.4/tcp/4001/p2p/12D3Koo…`` or ``/memory/7``.

A peer behind a router may have ``/ip4/…/tcp/…/p2p/RELAY/p2p-circuit``: through that relay
(`p2p.circuit`). A circuit over a circuit is no address, so no loop can be written down.

The subset of multiformats' multiaddr that this stack can dial; ``/memory`` is within
one process. An address from a peer is only a hint: the peer that answers must prove the id
(`p2p.transport`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple

from p2p.door import check, check_number
from p2p.errors import BadMessage, ConfigError
from p2p.identity import PeerId
from p2p.wire import decode_varint_untrusted, encode_varint

MAX_MULTIADDR: Final = 512
"""Most bytes or characters of an address. The longest that can be dialled, a DNS name of 253
with port and id, has about 320."""

_CIRCUIT: Final = "p2p-circuit"


class _Kind(NamedTuple):
    """A protocol in an address."""

    code: int
    """Its number in multiformats."""
    size: int | None
    """Bytes of a value; None if they follow a varint."""
    pack: Callable[[str], bytes]
    """Returns a value's bytes. Raises `ValueError` if the text is no value."""
    text: Callable[[bytes], str]


def _number(code: int, size: int, most: int) -> _Kind:
    def pack(value: str) -> bytes:
        if not (value.isascii() and value.isdigit()) or len(value) > 20 or int(value) > most:
            raise ValueError(f"not a number from 0 to {most}")
        return int(value).to_bytes(size, "big")

    return _Kind(code, size, pack, lambda data: str(int.from_bytes(data, "big")))


def _pack_name(value: str) -> bytes:
    if not re.fullmatch("[A-Za-z0-9._-]{1,253}", value):
        raise ValueError("no host name")
    return value.encode()


def _pack_nothing(value: str) -> bytes:
    if value:
        raise ValueError("it has no value")
    return b""


_KINDS: Final = {
    "ip4": _Kind(
        4, 4, lambda text: IPv4Address(text).packed, lambda data: str(IPv4Address(data))
    ),
    "tcp": _number(6, 2, 0xFFFF),
    "ip6": _Kind(
        41, 16, lambda text: IPv6Address(text).packed, lambda data: str(IPv6Address(data))
    ),
    "memory": _number(777, 8, 2**63 - 1),
    "p2p": _Kind(421, None, PeerId.from_base58, lambda data: str(PeerId(data))),
    _CIRCUIT: _Kind(290, 0, _pack_nothing, bytes.decode),
} | {
    name: _Kind(code, None, _pack_name, lambda data: data.decode("ascii"))
    for name, code in (("dns", 53), ("dns4", 54), ("dns6", 55), ("dnsaddr", 56))
}
_NAMES: Final = {kind.code: name for name, kind in _KINDS.items()}
_PLACES = {(host, "tcp") for host in ("ip4", "ip6", "dns", "dns4", "dns6")} | {("memory",)}
_PLACES |= {(*place, "p2p", _CIRCUIT) for place in _PLACES}
_PLACES |= {("dnsaddr",)}
"""The protocol sequences of all addresses that can be dialled."""


class AddrSource(Enum):
    """Source of an address, which decides how it may be used.

    A stranger who may make us dial what it names uses us as its weapon, so hearsay is kept
    apart, pushed out first, never resolved as a DNS name, and never names a private address
    from a public one.
    """

    OWNER = "owner"
    """This node's operator or the embedding program named the address, such as a bootstrap
    address. Only its DNS names are resolved."""
    SIGNED = "signed"
    """The peer itself named the address, in a statement whose signature was verified: a
    member's heartbeat or a DHT record."""
    HEARSAY = "hearsay"
    """A stranger named its own address (identify), or any peer named a third party's (DHT
    contacts)."""


@dataclass(frozen=True, slots=True, order=True)
class Multiaddr:
    """Address of a peer, with the id behind ``/p2p/`` that must answer.

    ``parts`` are (protocol, value) pairs, checked at birth; `ValueError` names what is wrong.
    What is not a whole place (a TCP port on a host, or a number in memory) is no address:
    nothing that is done with an address later on can fail for what a stranger wrote into it.
    """

    parts: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check("parts", self.parts, tuple)
        if not self.parts:
            raise ValueError("an address is empty; write for example /ip4/127.0.0.1/tcp/4001")
        for name, value in self.parts:
            if name not in _KINDS:
                known = ", ".join(sorted(_KINDS))
                raise ValueError(f"/{name} is no address protocol that Shoal knows ({known})")
            try:
                _KINDS[name].pack(value)
            except ValueError as error:
                raise ValueError(f"/{name}/{value} is no address: {error}") from None
        names = tuple(name for name, _ in self.parts)
        if "p2p" in names[:-1] and _CIRCUIT not in names:
            raise ValueError(f"/p2p/ must come last in {self}")
        if names == ("p2p",):
            raise ValueError(f"{self} names a peer but no place to dial")
        if names[: -1 if names[-1] == "p2p" else None] not in _PLACES:
            raise ValueError(
                f"{self} is no place to dial; write for example /ip4/127.0.0.1/tcp/4001"
            )

    @classmethod
    def parse(cls, text: str) -> Multiaddr:
        """Parse an address. Raise a `ValueError` that names what is wrong in ``text``."""
        check("text", text, str)
        if len(text) > MAX_MULTIADDR:
            raise ValueError(
                f"an address of {len(text)} characters is too long (at most {MAX_MULTIADDR})"
            )
        words = text.split("/")
        if _CIRCUIT in words:  # which has no value
            words.insert(words.index(_CIRCUIT) + 1, "")
        if words[0] or len(words) < 3 or len(words) % 2 == 0:
            raise ValueError(
                f"{text!r} is no address; write for example /ip4/127.0.0.1/tcp/4001"
            )
        return cls(tuple(zip(words[1::2], words[2::2], strict=True)))

    @classmethod
    def tcp(cls, host: str, port: int) -> Multiaddr:
        """Return the address of a TCP port on an IP address."""
        check("host", host, str)
        check_number("port", port, 0, 0xFFFF)
        family = "ip6" if ":" in host else "ip4"
        return cls(((family, host), ("tcp", str(port))))

    @property
    def peer_id(self) -> PeerId | None:
        """Id of the peer that must answer, if the address names one."""
        name, value = self.parts[-1]
        return PeerId.from_base58(value) if name == "p2p" else None

    @property
    def transport(self) -> Multiaddr:
        """The address without ``/p2p/…``."""
        return self if self.parts[-1][0] != "p2p" else _shared(self.parts[:-1])

    def with_peer(self, peer: PeerId) -> Multiaddr:
        """Return the same place with ``peer`` as the peer that must answer."""
        check("peer", peer, PeerId)
        return _shared((*self.transport.parts, ("p2p", str(peer))))

    @property
    def relay(self) -> Multiaddr | None:
        """Address of the relay, with its id, if this is a place behind a relay."""
        place = self.transport.parts
        return _shared(place[:-1]) if place[-1][0] == _CIRCUIT else None

    @property
    def through(self) -> Multiaddr:
        """Return the place behind this relay, whose address must name its peer."""
        return Multiaddr((*self.parts, (_CIRCUIT, "")))

    @property
    def host_port(self) -> tuple[str, int]:
        """Host and port of a TCP address. Raises `ValueError` for another kind of address."""
        place = self.transport.parts
        if len(place) != 2:
            raise ValueError(f"{self} is not a TCP address")
        return place[0][1], int(place[1][1])

    def to_bytes(self) -> bytes:
        """Return the binary form (multiformats/multiaddr)."""
        out = bytearray()
        for name, value in self.parts:
            kind = _KINDS[name]
            data = kind.pack(value)
            out += encode_varint(kind.code)
            if kind.size is None:
                out += encode_varint(len(data))
            out += data
        return bytes(out)

    def __str__(self) -> str:
        return "".join(
            f"/{name}/{value}" if value else f"/{name}" for name, value in self.parts
        )

    def __repr__(self) -> str:
        return f"Multiaddr({self})"


# Addresses that are cached, so that all who hold one share it; 4 MiB at most.
@functools.lru_cache(4096)
def _shared(parts: tuple[tuple[str, str], ...]) -> Multiaddr:
    return Multiaddr(parts)


def decode_multiaddr_untrusted(data: object) -> Multiaddr:
    """Decode the binary form. Raise `BadMessage`, and nothing else, whatever ``data`` is."""
    if not isinstance(data, bytes) or not 0 < len(data) <= MAX_MULTIADDR:
        raise BadMessage(f"an address must be 1 to {MAX_MULTIADDR} bytes")
    parts = []
    offset = 0
    while offset < len(data):
        code, offset = _take_varint(data, offset)
        name = _NAMES.get(code)
        if name is None:
            raise BadMessage(f"address protocol {code} is unknown")
        kind = _KINDS[name]
        length = kind.size
        if length is None:
            length, offset = _take_varint(data, offset)
        if offset + length > len(data):
            raise BadMessage("an address is cut off")
        try:
            parts.append((name, kind.text(data[offset : offset + length])))
        except ValueError as error:
            raise BadMessage(f"bad /{name} in an address: {error}") from None
        offset += length
    try:
        return Multiaddr(tuple(parts))
    except ValueError as error:
        raise BadMessage(str(error)) from None


def _take_varint(data: bytes, offset: int) -> tuple[int, int]:
    taken = decode_varint_untrusted(data, offset)
    if taken is None:
        raise BadMessage("an address is cut off")
    return taken


def as_multiaddr(addr: Multiaddr | str, purpose: str) -> Multiaddr:
    """Return ``addr``, parsed if it is text. Raises a `ConfigError` that says for what it was
    to be used: ``dial``, ``listen``."""
    check("addr", addr, Multiaddr, str)
    try:
        return addr if isinstance(addr, Multiaddr) else Multiaddr.parse(addr)
    except ValueError as error:
        raise ConfigError(f"cannot {purpose}: {error}") from None
