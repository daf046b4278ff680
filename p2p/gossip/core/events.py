"""What goes into the gossip core and what comes out of it, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2p.identity import PeerId
from p2p.wire import KI, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """The numbers of gossipsub v1.1, with its own defaults where it has any."""

    interval: float = 1.0
    """Seconds between two looks at the mesh (gossipsub's heartbeat)."""
    degree: int = 6
    """Mesh peers aimed at in each topic (D)."""
    low: int = 4
    """Fewer are topped up (D_lo)."""
    high: int = 12
    """More are cut back (D_hi)."""
    outbound: int = 2
    """Mesh peers that are to be peers that we dialled, and seats kept for them (D_out)."""
    lazy: int = 6
    """Peers outside the mesh that are told ids in each interval, or a quarter of them if that is more."""
    history: int = 5
    """Intervals for which messages are kept to be asked for (mcache)."""
    history_gossip: int = 3
    """Of these, how many newest are told of."""
    fanout: float = 60.0
    """Seconds for which peers of a topic that we only publish to are remembered."""
    seen: float = 120.0
    """Seconds for which ids are remembered as seen."""
    backoff: float = 60.0
    """Seconds after a prune before a graft may be tried again."""
    promise: float = 3.0
    """Seconds in which a message must come that was announced to us and asked for."""
    rate: float = 256.0 * KI
    """Units a second that one peer may cost us for long (`p2p.gossip.core.peer_scores`): bytes, and work."""
    burst: float = 4.0 * MIB
    """Units at once: a host's whole outbox."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.degree <= self.high <= 64:
            raise ValueError("the degrees must be 0 < low <= degree <= high <= 64")
        if not 0 <= self.outbound <= self.degree / 2:
            raise ValueError("outbound is 0 to half the degree")
        if not 0 < self.history_gossip <= self.history <= 64 or self.lazy < 0:
            raise ValueError("history_gossip is 1 to history, history at most 64, lazy not negative")
        if self.interval <= 0 or self.seen < self.interval * self.history:
            raise ValueError("seen must outlast the history, or old messages come back")
        if self.rate <= 0 or self.burst < MIB:
            raise ValueError("rate must be positive, and burst hold the largest RPC (1 MiB)")


class Validity(Enum):
    """What a validator says of a message."""

    ACCEPT = "accept"
    """Good: deliver it and pass it on."""
    IGNORE = "ignore"
    """No news here, though it may be news elsewhere (an old version, an author not known yet): drop it. The
    peer that sent it pays for our work out of its quota, and is not penalised."""
    REJECT = "reject"
    """No honest peer passes this on, whatever else it knows (malformed, a false signature in the data): drop
    it and penalise the peer that did. Never for what a peer with other news may take for good."""


# Events: what the core is told.


@dataclass(frozen=True, slots=True)
class Received:
    """An RPC came from an authenticated peer."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a connection to a peer."""

    peer: PeerId
    dialled: bool = False
    """Whether we chose the peer and dialled it."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to a peer ended."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Hear a topic from now on."""

    topic: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Hear it no more."""

    topic: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell all who hear ``topic``."""

    topic: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Validated:
    """The answer to `Validate`."""

    id: bytes
    validity: Validity


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline` has come."""


Event = Received | Connected | Disconnected | Subscribe | Unsubscribe | Publish | Validated | Tick


# Effects: what the driver is to do.


@dataclass(frozen=True, slots=True)
class Send:
    """Send an RPC."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Validate:
    """Judge a message whose signature is good; nothing is passed on before `Validated`."""

    id: bytes
    topic: str
    author: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message that was accepted."""

    topic: str
    author: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Penalise:
    """A peer did what no honest peer does."""

    peer: PeerId
    points: float
    reason: str


Effect = Send | Validate | Deliver | Penalise
