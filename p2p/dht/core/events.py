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
    """This node can be dialled at other addresses than before."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the swarm through these peers, and ask them again when alone. Ends in `Joined`."""

    token: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Read all records of a name. Ends in `Found`."""

    token: int
    namespace: str
    name: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Publish now and republish until `Forget`. Ends in `Written`."""

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


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller of this operation has gone: it ends without an effect."""

    token: int


Command = Join | Get | Put | Forget | Cancel
Event = HostEvent | Moved | Command


# Effects: what the driver is to do, beside those of `p2p.events`.


@dataclass(frozen=True, slots=True)
class SendIfConnected:
    """Send ``data`` to ``peer`` unless that takes a dial. What a stranger has caused is not
    worth one: the stranger may have gone, and have claimed before that it can be dialled at a
    third party's address."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """A `Join` has ended; ``contacts`` is how many contacts the table holds now."""

    token: int
    contacts: int


@dataclass(frozen=True, slots=True)
class Found:
    """A `Get` has ended: each publisher's newest record, in order of publishers."""

    token: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A `Put` has ended; ``copies`` is how many other nodes hold the record, over all its
    keys."""

    token: int
    copies: int


Outcome = Joined | Found | Written
OwnEffect = SendIfConnected | Outcome
Effect = HostEffect | OwnEffect
