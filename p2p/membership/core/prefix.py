"""The network prefix of a peer: what a stranger cannot mint as it mints keys."""

from __future__ import annotations

import functools
import ipaddress
from typing import Final

from p2p.multiaddr import Multiaddr

IPV4_BYTES: Final = 3
"""A /24: the least that is routed on its own."""
IPV6_BYTES: Final = 6
"""A /48: what one site gets, however many addresses it fills it with."""

_MEMO: Final = 4096
"""Address lists remembered: those of as many peers as profiles are (`heartbeat`); 1 MiB at
most."""


@functools.lru_cache(_MEMO)
def prefix_of(addrs: tuple[Multiaddr, ...]) -> bytes | None:
    """The network of the first public address among ``addrs``; None if there is none.

    Loopback, private and memory addresses name no network: a laboratory, a home and a
    simulation are one place each, and a peer that is in them was let in. Names are not resolved
    for strangers, and do not count; nor do circuits, whose network is the relay's.
    """
    for addr in addrs:
        kind, value = addr.parts[0]
        if kind in ("ip4", "ip6") and addr.relay is None:
            ip = ipaddress.ip_address(value)
            if ip.is_global:
                return ip.packed[: IPV4_BYTES if kind == "ip4" else IPV6_BYTES]
    return None
