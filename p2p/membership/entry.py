"""What a node remembers of one living or dead peer, and how long its silence may last.

How the silence of a peer is judged, in its own intervals since we first saw its newest heartbeat:

| peer | 1.5 | 2 | 2.8 | `expiry` (3) | `stale` (120) |
|---|---|---|---|---|---|
| beats to us | asked itself | accused to all | dead, unless refuted | dead | |
| known through others | | | | | forgotten |
| accused by another | dead after 0.8 more without a newer heartbeat | | | | |

A newer heartbeat, from whomever, makes a peer fresh again. Two lost heartbeats in a row are normal on a
home connection: an accusation only asks everybody, the accused included, for a sign of life.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.identity import PeerId
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.membership.prefix import prefix_of

PROBE: Final = 1.5
"""Intervals after which a silent peer is asked itself. One heartbeat may come half an interval late."""
ACCUSE: Final = 2.0
"""Intervals after which everybody is asked: a second heartbeat is due now."""
CONFIRM: Final = 0.8
"""Intervals an accused peer has to speak up. With `ACCUSE` this makes 2.8: at 5 s a death is known 14 s
after the last heartbeat plus the time of the flood, within 15 s of the death."""


class Stage(Enum):
    """How far the judgement of a silent peer has come."""

    FRESH = "fresh"
    PROBED = "probed"
    ACCUSED = "accused"


@dataclass(slots=True)
class Watch:
    """How the silence of one peer is judged: of those that beat to us, and of the accused."""

    due: float = math.inf
    """When the judgement goes on."""
    waits_until: float = math.inf
    """When the view looks at it again, at the latest."""
    direct_at: float = -math.inf
    """When it last beat to us itself; minus infinity if it does not."""
    direct_since: float = -math.inf
    """Since when we may expect that; its silence before that means nothing."""
    stage: Stage = Stage.FRESH
    accused_at: float = math.inf
    was_asked: bool = False
    """Whether we asked it ourselves since it was accused, in vain."""


@dataclass(slots=True)
class Entry:
    """A living peer. There are hundreds in each view, of which few have a `watch`."""

    signed: SignedHeartbeat
    seen: float
    """First sight of its newest heartbeat."""
    introducer: PeerId | None
    """Who named it to us; None if it came itself."""
    interval: float
    """Seconds between its heartbeats, as it says, within `events.MembershipConfig.pace`."""
    since: float
    """First sight of the peer, at most an interval early: a number that many entries share."""
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
        self.hear(self.signed, self.seen)

    def hear(self, signed: SignedHeartbeat, now: float) -> None:
        """Its newest heartbeat has come."""
        heartbeat = signed.heartbeat
        self.signed, self.seen = signed, now
        self.seqno, self.policy = heartbeat.seqno, heartbeat.profile.policy
        watch = self.watch
        if watch is not None:
            watch.stage, watch.accused_at, watch.was_asked = Stage.FRESH, math.inf, False

    @property
    def stage(self) -> Stage:
        """How far the judgement of its silence has come."""
        return Stage.FRESH if self.watch is None else self.watch.stage

    @property
    def direct_at(self) -> float:
        """When it last beat to us itself; minus infinity if it does not."""
        return -math.inf if self.watch is None else self.watch.direct_at

    @property
    def direct(self) -> bool:
        """Whether it beats to us itself."""
        return self.direct_at > -math.inf

    @property
    def is_watched(self) -> bool:
        """Whether its silence must be judged to the second."""
        watch = self.watch
        return watch is not None and (watch.direct_at > -math.inf or watch.stage is Stage.ACCUSED)

    def watched(self) -> Watch:
        """Its watch, from now on."""
        if self.watch is None:
            self.watch = Watch()
        return self.watch

    def is_heard(self, now: float) -> bool:
        """Whether it beat to us itself a moment ago: no accusation can impress us."""
        return now - self.direct_at < PROBE * self.interval


@dataclass(frozen=True, slots=True)
class Grave:
    """A peer that died or left."""

    signed: SignedHeartbeat
    when: float
    healable: bool
    """Whether it may live on the other side of a partition: it did not say good-bye."""
