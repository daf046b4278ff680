"""What goes into and what comes out of `p2p.dht.core.DhtCore`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.dht.record import Record
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr


@dataclass(frozen=True, slots=True)
class Received:
    """A peer, proven by the host, has sent a message. ``wall`` is our clock, which judges records."""

    peer: PeerId
    data: bytes
    wall: float


@dataclass(frozen=True, slots=True)
class Tick:
    """`DhtCore.next_deadline` has come."""

    wall: float


@dataclass(frozen=True, slots=True)
class PeerUp:
    """There is a connection to a peer."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection to a peer is gone; with ``unreachable``, none could be made."""

    peer: PeerId
    unreachable: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """We can be dialled at other addresses than before."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the swarm through these peers, and come back to them when alone. Ends in `Joined`."""

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
    """Publish now and renew until `Forget`. Ends in `Written`."""

    token: int
    namespace: str
    name: bytes
    value: bytes
    lifetime: float
    wall: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop renewing a record."""

    namespace: str
    name: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this operation any more."""

    token: int


Event = Received | Tick | PeerUp | PeerDown | Moved | Join | Get | Put | Forget | Cancel


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a message to a peer."""

    peer: PeerId
    data: bytes
    dial: bool = True
    """Whether it is worth a connection. What a stranger has caused is not: it may have gone, and have said
    before that it can be dialled at a third party's address."""


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember where a peer is said to be; a `Send` to it follows."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class Penalise:
    """A peer has lied or sent garbage."""

    peer: PeerId
    points: float
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A `Join` has ended; ``contacts`` is how many nodes we know now."""

    token: int
    contacts: int


@dataclass(frozen=True, slots=True)
class Found:
    """A `Get` has ended: each publisher's newest record, in order of publishers."""

    token: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A `Put` has ended; ``copies`` is how many other nodes hold the record, over all its keys."""

    token: int
    copies: int


Effect = Send | Learn | Penalise | Joined | Found | Written
