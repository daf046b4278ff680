"""The configuration of gossip: gossipsub v1.1's parameters and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2p.door import check_fields
from p2p.wire import KI, MIB

RATE: Final = 256.0 * KI
"""Units a second that one peer may cost us in the long run (`p2p.gossip.core.quotas`): 1.3
% of a core, or 2 Mbit/s of bytes. A trainer's announcements cost 1 Ki."""
BURST: Final = 4.0 * MIB
"""Units that one peer may cost us at once: a host's whole outbox (4 MiB), which a peer that
was stopped for a while sends in one go."""
BACKOFF: Final = 60.0
"""Seconds after a PRUNE before a GRAFT may be tried again (prune_backoff)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """Degrees of the meshes, and times in seconds. Each field names its parameter in the
    specification."""

    interval: float = 1.0
    """Seconds between two heartbeats, which maintain the meshes and gossip ids."""
    degree: int = 6
    """Target number of mesh peers in each topic (D), 6 as in gossipsub. A message reaches
    10,000 nodes in about six hops, and each gets it about six times at worst."""
    low: int = 4
    """Minimum size of a mesh; a smaller one is filled up to ``degree`` (D_lo). With fewer than
    gossipsub's 4, a few losses cut a node off between two heartbeats."""
    high: int = 12
    """Maximum size of a mesh; a larger one is cut back to ``degree`` (D_hi), as in gossipsub.
    Each further peer means one more copy of every message."""
    outbound: int = 2
    """Minimum number of outbound peers, which we dialled, in a mesh (D_out). As many of the
    ``high`` places are closed to inbound peers."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.low <= self.degree <= self.high <= 64:
            raise ValueError("the degrees must be 0 < low <= degree <= high <= 64")
        if not 0 <= self.outbound <= self.degree / 2:
            raise ValueError("outbound is 0 to half the degree")
        if self.interval <= 0:
            raise ValueError("the interval is positive")
