"""Events of the host that every core receives, and effects that every core may ask for.

`p2p.driver.Driver` brings the events and carries out the effects. What only one service knows
(to deliver, to write, to wake a caller) stands in the ``events`` of its core. Those of which
every message makes one are not frozen: that takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.offence import Offence


@dataclass(slots=True)
class Received:
    """A message arrived from ``peer``, which the host has authenticated. ``wall`` is the wall
    clock, for cores that judge expiry dates."""

    peer: PeerId
    data: bytes
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A connection to ``peer`` exists; ``dialled`` is True if this node opened it."""

    peer: PeerId
    dialled: bool = False


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The last connection to ``peer`` is gone. With ``unreachable``, none could be made."""

    peer: PeerId
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """The core's `next_deadline` has come."""

    wall: float = 0.0


HostEvent = Received | PeerUp | PeerDown | Tick


@dataclass(slots=True)
class Send:
    """Send an encoded message of the service's protocol, connecting if need be."""

    peer: PeerId
    data: bytes


@dataclass(slots=True)
class AddAddrs:
    """Remember addresses of a peer, with or without ``/p2p/`` and its id."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]
    source: AddrSource


@dataclass(frozen=True, slots=True)
class Penalise:
    """Lower the score of a peer that did what no honest peer does; ``reason`` is for the
    log."""

    peer: PeerId
    offence: Offence
    reason: str


HostEffect = Send | AddAddrs | Penalise
