"""Address prefixes, so that one machine with many names gets few places.

go-libp2p calls this peer diversity. A contact's addresses are its own claim, and which address
a connection really came from only the host knows. So this stops an attacker that has many keys
and tells the truth about where they are, as one that wants to be dialled must; an attacker that
invents prefixes holds contacts that fail when they are dialled.

Two nodes at 81.2.3.4 and 81.2.3.250 count against one group, ``81.2.3.0/24``, and a third in it
finds both of the places taken that a bucket has for it (`p2p.dht.core.table.PER_BUCKET`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from p2p.multiaddr import Multiaddr

IPV4_PREFIX: Final = 24
"""Bits: what one customer rents at once. go-libp2p-kad-dht and Bitcoin Core group by /16 to
/24."""
IPV6_PREFIX: Final = 48
"""Bits: what a provider gives one site (RFC 6177 lets it be a /48 to a /56), so that one
customer's 65,536 networks count as one."""
PRIVATE: Final = "private"
"""The group of all addresses that are valid in their own network only, for a node that is
outside of it."""
NAMED: Final = "dns"
"""The group of all DNS names: a name costs nothing, and is not resolved for a stranger."""
_MEMO: Final = 4096
"""Addresses whose group is remembered, 1 MiB at most: a node meets those of a few hundred
contacts again and again."""


@lru_cache(_MEMO)
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
    bits = IPV4_PREFIX if place.version == 4 else IPV6_PREFIX
    return str(ipaddress.ip_network((place, bits), strict=False))


def is_public(addrs: Iterable[Multiaddr]) -> bool:
    """Whether one of ``addrs`` is an IP address of the public internet."""
    return any(_group(addr) not in {PRIVATE, NAMED} for addr in addrs)


def prefixes(addrs: Iterable[Multiaddr], *, among_public: bool) -> tuple[str, ...]:
    """The groups that ``addrs`` count against, each once.

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
