"""The configuration of gossip: gossipsub v1.1's parameters and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2p.door import check_fields
from p2p.wire import KI, MIB

LAZY: Final = 6
"""Peers outside the mesh that get an IHAVE in each heartbeat (D_lazy), or a quarter of them if
that is more (the gossip factor of 0.25)."""
HISTORY: Final = 5
"""Heartbeats for which a message can be asked for (mcache_len): two more than it is advertised
for, so that an IWANT that was under way finds it."""
HISTORY_GOSSIP: Final = 3
"""Recent heartbeats whose messages IHAVE advertises (mcache_gossip)."""
FANOUT: Final = 60.0
"""Seconds for which the fanout of a topic is kept after the last publication (fanout_ttl)."""
BACKOFF: Final = 60.0
"""Seconds after a PRUNE before a GRAFT may be tried again (prune_backoff)."""
PROMISE: Final = 3.0
"""Seconds in which a message must come that was asked for by IWANT (iwant_followup_time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """Mesh degrees, times in seconds, and what one peer may cost. Each field names its
    parameter of the specification."""

    interval: float = 1.0
    """Seconds between two heartbeats, in which meshes are maintained and ids gossiped."""
    degree: int = 6
    """Mesh peers aimed at in each topic (D). gossipsub's 6: a message reaches 10,000 nodes in
    about six hops, and each gets it about six times at worst."""
    low: int = 4
    """A mesh of fewer is topped up to ``degree`` (D_lo). gossipsub's: below 4 a few losses cut
    a node off between two heartbeats."""
    high: int = 12
    """A mesh of more is cut back to ``degree`` (D_hi). gossipsub's: each peer above it is a
    further copy of every message."""
    outbound: int = 2
    """Mesh peers that are to be outbound, that is dialled by us; as many of the ``high`` places
    are closed to inbound peers (D_out)."""
    seen: float = 120.0
    """Seconds for which a message id is known as seen (seen_ttl), or a message that comes late
    would be delivered twice. One that waits in each cache for its five seconds takes twenty
    hops in less."""
    rate: float = 256.0 * KI
    """Units a second that one peer may cost us for long (`p2p.gossip.core.quotas`): 1.3 % of a
    core, or 2 Mbit/s of bytes. A trainer's announcements cost 1 Ki."""
    burst: float = 4.0 * MIB
    """Units at once: a host's whole outbox (4 MiB), which a peer that was stopped for a while
    finds full and sends in one go."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.low <= self.degree <= self.high <= 64:
            raise ValueError("the degrees must be 0 < low <= degree <= high <= 64")
        if not 0 <= self.outbound <= self.degree / 2:
            raise ValueError("outbound is 0 to half the degree")
        if self.interval <= 0 or self.seen < self.interval * HISTORY:
            raise ValueError("seen must outlast the history, or old messages come back")
        if self.rate <= 0 or self.burst < MIB:
            raise ValueError("rate must be positive, and burst hold the largest RPC (1 MiB)")
