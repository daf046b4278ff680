"""One member, alive or dead, as a node remembers it, and the times that its silence may last.

The times, in the peer's own intervals since we first saw its newest heartbeat:

| peer | 1.5 | 2 | 2.8 | `expiry` (3) | `stale` (120) |
|---|---|---|---|---|---|
| sends us heartbeats | probed | suspected | dead, unless refuted | dead | |
| known through others | | | | | forgotten |
| suspected by another | dead after 0.8 more without a newer heartbeat | | | | |

A newer heartbeat makes a peer alive again, whichever node it came from. Two lost heartbeats in
a row are normal on a home connection: a suspicion is not yet a death, it asks all members, the
suspected one included, for a sign of life.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.identity import PeerId
from p2p.membership.core.prefix import prefix_of
from p2p.membership.heartbeat import SignedHeartbeat

PROBE: Final = 1.5
"""Intervals after which a silent peer is asked itself: SWIM's ping. A heartbeat that comes half
an interval late costs no message."""
SUSPECT: Final = 2.0
"""Intervals after which a suspicion is flooded: the second missing heartbeat is due now, and
the peer has had half an interval to answer the probe."""
CONFIRM: Final = 0.8
"""Intervals that a suspected peer has to speak up. With `SUSPECT` this makes 2.8: at 5 s a
death is known 14 s after the last heartbeat plus the time of the flood, within 15 s of the
death."""


class Liveness(Enum):
    """How far the judgement of a silent peer has come."""

    ALIVE = "alive"
    PROBED = "probed"
    SUSPECTED = "suspected"


@dataclass(slots=True)
class Watch:
    """How the silence of one peer is judged: of those that send us heartbeats, and of the
    suspected peer."""

    due: float = math.inf
    """When the judgement goes on."""
    waits_until: float = math.inf
    """When the view looks at it again, at the latest."""
    direct_at: float = -math.inf
    """When it last sent us a heartbeat itself; minus infinity if it does not."""
    direct_since: float = -math.inf
    """Since when we may expect that; its silence before that means nothing."""
    liveness: Liveness = Liveness.ALIVE
    suspected_at: float = math.inf
    was_asked: bool = False
    """Whether we asked it ourselves since it was suspected, in vain."""


@dataclass(slots=True)
class MemberState:
    """A living peer. There are hundreds in each view, of which few have a `watch`."""

    signed: SignedHeartbeat
    seen: float
    """First sight of its newest heartbeat."""
    introducer: PeerId | None
    """The peer that named it to us; None if it came itself."""
    interval: float
    """Seconds between its heartbeats, as it says, within `MembershipConfig.pace`."""
    since: float
    """First sight of the peer, at most an interval early: a number that many members share."""
    prefix: bytes | None = field(init=False)
    """The network that its addresses are in (`prefix.prefix_of`)."""
    peer: PeerId = field(init=False)
    seqno: int = field(init=False)
    """Of its newest heartbeat: what digests are compared with, thousands of times a second."""
    policy: int = field(init=False)
    """As its newest heartbeat says."""
    avoid_until: float = -math.inf
    """Until then it is not asked to be a neighbour: it refused, or could not be reached."""
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.peer = self.signed.heartbeat.peer
        self.prefix = prefix_of(self.signed.heartbeat.profile.addrs)
        self.record_heartbeat(self.signed, self.seen)

    def record_heartbeat(self, signed: SignedHeartbeat, now: float) -> None:
        """Its newest heartbeat has come."""
        heartbeat = signed.heartbeat
        self.signed, self.seen = signed, now
        self.seqno, self.policy = heartbeat.seqno, heartbeat.profile.policy
        watch = self.watch
        if watch is not None:
            watch.liveness, watch.suspected_at, watch.was_asked = (
                Liveness.ALIVE,
                math.inf,
                False,
            )

    @property
    def liveness(self) -> Liveness:
        """How far the judgement of its silence has come."""
        return Liveness.ALIVE if self.watch is None else self.watch.liveness

    @property
    def direct_at(self) -> float:
        """When it last sent us a heartbeat itself; minus infinity if it does not."""
        return -math.inf if self.watch is None else self.watch.direct_at

    @property
    def direct(self) -> bool:
        """Whether it sends us heartbeats itself."""
        return self.direct_at > -math.inf

    @property
    def is_watched(self) -> bool:
        """Whether its silence must be judged to the second."""
        watch = self.watch
        if watch is None:
            return False
        return watch.direct_at > -math.inf or watch.liveness is Liveness.SUSPECTED

    def watched(self) -> Watch:
        """Its watch, from now on."""
        if self.watch is None:
            self.watch = Watch()
        return self.watch

    def is_candidate(self, now: float) -> bool:
        """Whether it may be asked to be a neighbour."""
        return self.liveness is Liveness.ALIVE and self.avoid_until <= now

    def is_heard(self, now: float) -> bool:
        """Whether it sent us a heartbeat itself a moment ago: no suspicion can impress us."""
        return now - self.direct_at < PROBE * self.interval


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A peer that died or left."""

    signed: SignedHeartbeat
    when: float
    may_be_partitioned: bool
    """Whether it may live on the other side of a partition: it did not say good-bye."""
