"""Validation of records: signature, stamp, key, lifetime, namespace.

A record is validated when it is stored and again when a holder returns it, since holders are
strangers. A forged record is a lie of the peer that passed it on; one that is out of date, or
that a namespace refuses, is not.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from p2p.dht import record as records
from p2p.dht.stamp import check_stamp
from p2p.door import check_fields, check_function, check_number
from p2p.errors import BadMessage
from p2p.identity import Verify
from p2p.multiaddr import Multiaddr

PRIVATE: Final = "private"
"""Group of all private addresses, for a node with a public address."""
NAMED: Final = "dns"
"""Group of all DNS names. A name costs nothing, and is not resolved for a stranger."""


# Number of addresses whose group is remembered, 1 MiB at most. A node meets those of a few
# hundred contacts again and again.
@lru_cache(4096)
def _group(addr: Multiaddr) -> str:
    kind, value = addr.parts[0]
    if kind == "memory":
        return PRIVATE
    if kind not in {"ip4", "ip6"}:
        return NAMED
    place = ipaddress.ip_address(value)
    if isinstance(place, ipaddress.IPv6Address) and place.ipv4_mapped is not None:
        place = place.ipv4_mapped
    if not place.is_global:
        return PRIVATE
    # Bits: what one customer rents at once. go-libp2p-kad-dht and Bitcoin Core group by /16 to
    # /24.
    # Bits: what a provider gives one site (RFC 6177 lets it be a /48 to a /56), so that one
    # customer's 65,536 networks count as one.
    bits = 24 if place.version == 4 else 48
    return str(ipaddress.ip_network((place, bits), strict=False))


def is_public(addrs: Iterable[Multiaddr]) -> bool:
    """Return True if one of ``addrs`` is an IP address of the public internet."""
    return any(_group(addr) not in {PRIVATE, NAMED} for addr in addrs)


def prefixes(addrs: Iterable[Multiaddr], *, among_public: bool) -> tuple[str, ...]:
    """Return the groups that ``addrs`` count against, each once.

    Public prefixes if there are any. Loopback, private and memory addresses count as one group
    for a node that is itself on the public internet (``among_public``), which cannot dial them,
    and not at all for others: a laboratory, a home network and every test live in one private
    prefix.
    """
    groups = dict.fromkeys(_group(addr) for addr in addrs)
    public = tuple(group for group in groups if group not in {PRIVATE, NAMED})
    if public:
        return public
    if NAMED in groups:
        return (NAMED,)
    return (PRIVATE,) if groups and among_public else ()


CLOCK_TOLERANCE: Final = 300.0
"""Seconds by which two honest wall clocks may differ, such as that of a laptop that missed its
time server."""


class PublisherKind(Enum):
    """Relation of a record's publisher to this node, which determines its place under the
    key."""

    OFFICER = "officer"
    """The publisher always has a place."""
    MEMBER = "member"
    UNKNOWN = "unknown"
    """This node cannot tell, because the record is about another run."""
    STRANGER = "stranger"
    """The publisher may not publish under this key: its records are neither held nor
    believed."""


@dataclass(frozen=True, slots=True)
class RecordPriority:
    """Priority of a record when a key has more publishers than places
    (`p2p.dht.core.store`)."""

    reserved: bool = False
    """True if the publisher always has a place."""
    groups: tuple[str, ...] = ()
    """Address prefixes that the record counts against (`prefixes`)."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Rules for the records of a namespace.

    The callables are given well-signed records; `kind_of` and `places` get only ones that are
    `valid`. They must not raise.
    """

    name: str
    valid: Callable[[records.Record], bool]
    """Returns True if publisher, name and value fit together."""
    salts: int = 3
    """Number of keys under which a record is stored. An attacker must surround three places of
    the id space to hide it. With 8 replicas each and half of all nodes dead or lying, one key
    in 256 is lost, and all three keys of one name in 16 million."""
    max_lifetime: float = 24 * 3600.0
    """Maximum lifetime of a record in seconds. The record of a publisher that is gone
    disappears within a day, whichever nodes store it again."""
    kind_of: Callable[[records.Record], PublisherKind] = lambda _: PublisherKind.UNKNOWN
    """Returns the relation of a publisher to this node."""
    places: Callable[[records.Record], tuple[Multiaddr, ...]] = lambda _: ()
    """Returns the addresses of a record's publisher. One address prefix gets few places under a
    key."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("valid", "kind_of", "places"):
            check_function(f"Namespace({name})", getattr(self, name), 1)
        check_number("Namespace(salts)", self.salts, 1)
        check_number("Namespace(max_lifetime)", self.max_lifetime, 1, math.inf, int, float)


def _is_own_address(record: records.Record) -> bool:
    if record.name != record.publisher.digest:
        return False
    try:
        records.decode_addrs_untrusted(record.value)
    except BadMessage:
        return False
    return True


ADDRESSES: Final = Namespace(
    records.ADDR_NAMESPACE, _is_own_address, salts=1, max_lifetime=records.MAX_ADDR_LIFETIME
)
"""Rules for address records. They have one key only: an attacker that hides it hides one peer,
whose address is also in heartbeats and contacts."""


_ANY: Final = Namespace("any", lambda _: True)
"""Rules of a namespace that this node does not know: any value of any publisher."""


@dataclass(frozen=True, slots=True)
class RecordValidator:
    """Validates the records of all namespaces."""

    verify: Verify
    difficulty: int
    namespaces: dict[str, Namespace]

    def rules(self, namespace: str) -> Namespace:
        """Return the rules for the records of ``namespace``."""
        return self.namespaces.get(namespace, _ANY)

    def keys(self, namespace: str, name: bytes) -> tuple[bytes, ...]:
        """Return all keys of a name."""
        salts = range(self.rules(namespace).salts)
        return tuple(records.record_key(namespace, name, salt) for salt in salts)

    def validate(self, record: records.Record, key: bytes, wall: float) -> bool:
        """Return True if ``record`` may be held and used under ``key`` at time ``wall``, and
        False if its time is over or its namespace refuses it.

        Raises:
            BadMessage: The record is forged, or does not belong under ``key``. No honest peer
                sends it.
        """
        if key not in self.keys(record.namespace, record.name):
            raise BadMessage("a DHT record is under a key that is not its own")
        rules, left = self.rules(record.namespace), record.expires - wall
        if not -CLOCK_TOLERANCE < left <= rules.max_lifetime + CLOCK_TOLERANCE:
            return False
        if not check_stamp(record.publisher, record.nonce, self.difficulty) or not self.verify(
            record.publisher, records.PROTOCOL_ID, record.payload, record.signature
        ):
            raise BadMessage("a DHT record is forged")
        return rules.valid(record) and self.is_admitted(record)

    def is_admitted(self, record: records.Record) -> bool:
        """Return True if the publisher of ``record``, which is otherwise valid, may publish
        under its key now."""
        return self.rules(record.namespace).kind_of(record) is not PublisherKind.STRANGER

    def priority(self, record: records.Record, *, among_public: bool) -> RecordPriority:
        """Return the priority of a valid record in a store."""
        rules = self.rules(record.namespace)
        reserved = rules.kind_of(record) is PublisherKind.OFFICER
        groups = prefixes(rules.places(record), among_public=among_public)
        return RecordPriority(reserved, groups)
