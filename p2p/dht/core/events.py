"""Events and effects of `p2p.dht.core.core.DhtCore`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.dht.record import Record
from p2p.events import HostEffect, HostEvent
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

# Events: what the core is told.


@dataclass(frozen=True, slots=True)
class Moved:
    """This node has new addresses at which it can be dialled."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the swarm through these peers, and ask them again when this node is alone. The
    outcome is `Joined`."""

    token: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Read all records of a name. The outcome is `Found`."""

    token: int
    namespace: str
    name: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Publish a record now, and again until `Forget`. The outcome is `Written`."""

    token: int
    namespace: str
    name: bytes
    value: bytes
    lifetime: float
    wall: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop republishing a record."""

    namespace: str
    name: bytes


Event = HostEvent | Moved | Join | Get | Put | Forget


# Effects: what the driver is to do, beside those of `p2p.events`.


@dataclass(frozen=True, slots=True)
class SendIfConnected:
    """Send ``data`` to ``peer`` if there is a connection. Effects that a stranger causes are
    not worth a dial: the stranger may have gone, or may have claimed a third party's
    address."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """A `Join` has ended, and the table now holds ``contacts`` contacts."""

    token: int
    contacts: int


@dataclass(frozen=True, slots=True)
class Found:
    """A `Get` has ended with the newest record of each publisher, ordered by publisher."""

    token: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A `Put` has ended, and ``copies`` counts the other nodes that hold the record, over all
    its keys."""

    token: int
    copies: int


Outcome = Joined | Found | Written
OwnEffect = SendIfConnected | Outcome
Effect = HostEffect | OwnEffect
