"""Timing and sizes of membership: `MembershipConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.door import check_fields
from p2p.membership.heartbeat import MAX_INTERVAL, MIN_INTERVAL


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Timing and sizes of membership. The defaults keep a node of 1,000 under 5 KB/s."""

    interval: float = 5.0
    """Seconds between our own heartbeats. With `expiry`, a death is known after about 15 s.
    Half the interval would nearly double what a quiet swarm sends."""
    active: int = 5
    """Target number of neighbours: the size of HyParView's active view. A node acts when it has
    two fewer or two more. A graph of degree 5 stays connected when many nodes die at once, and
    each further neighbour adds one more copy of every heartbeat."""
    passive: int = 200
    """Number of other peers whose heartbeats are kept to replace lost neighbours: 40 times
    `active`. Filling the view takes 50 KB on the wire, at 250 bytes a heartbeat."""
    direct: int = 4096
    """Maximum number of peers that may send us heartbeats without being neighbours. A trainer
    hears its whole run."""
    refresh: int = 16
    """Heartbeats requested per interval to keep old entries fresh. Requests for unknown peers
    may take 16 times more."""
    expiry: float = 3.0
    """Intervals of silence after which a peer that sends us heartbeats is dead: two lost ones
    in a row are normal on a home line, three are a death."""
    stale: float = 120.0
    """Intervals without a newer heartbeat after which a peer known only through others is
    forgotten."""
    lifetime: float = 1800.0
    """Seconds until a heartbeat expires by wall clock. Wall clocks may differ by this much,
    less a few minutes, without harm."""

    def paced(self, interval: float) -> float:
        """Return a peer's own ``interval``, limited to half and to twice ours."""
        # Otherwise a peer that claims 120 s would stay listed for four hours after its death,
        # and one that claims 0.05 s would be suspected, and refute, twenty times a second.
        return min(max(interval, self.interval / 2), self.interval * 2)

    @property
    def capacity(self) -> int:
        """Number of peers in a full view when no others send us heartbeats."""
        return self.passive + self.active

    def __post_init__(self) -> None:
        check_fields(self)
        if not MIN_INTERVAL <= self.interval <= MAX_INTERVAL:
            raise ValueError(
                f"interval is {MIN_INTERVAL} to {MAX_INTERVAL} s, not {self.interval}"
            )
        if self.expiry < 3:
            raise ValueError("expiry must allow for two lost heartbeats (3 intervals)")
        if self.stale < 2 * self.expiry:
            raise ValueError("stale is at least twice the expiry: passive members renew slowly")
        if not 3 <= self.active <= 64:
            raise ValueError("active is 3 to 64")
        if min(self.passive, self.direct, self.refresh) < 1:
            raise ValueError("passive, direct and refresh are at least 1")
        if self.lifetime < 600:
            raise ValueError("lifetime must outlast clocks that are ten minutes off")
