"""What the core of every service may ask of its host; `p2p.driver.on_host` carries it out.

What only one service asks (to deliver, to write, to wake a caller) stands in the ``events`` of
its core.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.offence import Offence


@dataclass(frozen=True, slots=True)
class Send:
    """Send an encoded message of the service's protocol, connecting if need be."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class AddAddrs:
    """Remember where a peer may be dialled, with or without ``/p2p/`` and its id."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]
    source: AddrSource


@dataclass(frozen=True, slots=True)
class Penalise:
    """A peer did what no honest peer does; ``reason`` is for the log."""

    peer: PeerId
    offence: Offence
    reason: str


HostEffect = Send | AddAddrs | Penalise
