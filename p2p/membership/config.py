"""Timing and sizes of membership: `MembershipConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.door import check_fields
from p2p.membership.heartbeat import MAX_INTERVAL, MIN_INTERVAL
from p2p.membership.messages import MAX_HOPS


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Timing and sizes of membership. The defaults keep a node of 1,000 under 5 KB/s."""

    interval: float = 5.0
    """Seconds between our own heartbeats. With `expiry` a death is known in some 15 s; half the
    interval would nearly double what a quiet swarm sends."""
    active: int = 5
    """Neighbours aimed at, HyParView's active view. Two fewer are borne, two more accepted
    (`active_view.SLACK`): a graph of degree 5 stays whole when many die at once, and each
    further neighbour is one more copy of every heartbeat."""
    passive: int = 200
    """Other peers whose heartbeats are kept: 40 times the neighbours, from which lost ones are
    replaced. At 250 bytes a heartbeat it is 50 KB on the wire to fill."""
    direct: int = 4096
    """Peers that may send us heartbeats without being neighbours: a trainer hears its whole
    run."""
    sample: int = 15
    """Digests of random members that go with each heartbeat to a neighbour: in all, a hundred
    an interval."""
    hops: int = 3
    """Steps of the walk that finds a newcomer its neighbours: at degree 5 it may end at any of
    80 nodes (5 times 4 times 4), most of which its bootstrap does not know."""
    refresh: int = 16
    """Heartbeats asked for in an interval to keep old entries fresh; unknown peers may take 16
    times more."""
    expiry: float = 3.0
    """Intervals of silence after which a peer that sends us heartbeats is dead: two lost ones
    in a row are normal on a home line, three are a death."""
    stale: float = 120.0
    """Intervals without a newer heartbeat after which a peer known only through others is
    forgotten."""
    pace: float = 2.0
    """A peer's own interval counts for at most so many of ours, and for no less than ours
    divided by it. A peer that says 120 s would stay listed for four hours after its death, one
    that says 0.05 s would be suspected, and would refute, twenty times a second."""
    lifetime: float = 1800.0
    """Seconds for which a heartbeat is worth anything on paper. Wall clocks that differ by up
    to this much, less a few minutes, do no harm."""

    def paced(self, interval: float) -> float:
        """Return the effective value of a peer's own ``interval``."""
        return min(max(interval, self.interval / self.pace), self.interval * self.pace)

    @property
    def capacity(self) -> int:
        """Peers in a whole view, if no others send us heartbeats."""
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
        if not 3 <= self.active <= 64 or not 1 <= self.hops <= MAX_HOPS:
            raise ValueError(f"active is 3 to 64 and hops 1 to {MAX_HOPS}")
        smallest = min(self.passive, self.direct, self.refresh)
        if not 0 < self.sample <= 128 or smallest < 1:
            raise ValueError("sample is 1 to 128; passive, direct and refresh are at least 1")
        if not 1 <= self.pace <= 16:
            raise ValueError("pace is 1 to 16: how far a peer's interval may be from ours")
        if self.lifetime < 600:
            raise ValueError("lifetime must outlast clocks that are ten minutes off")
