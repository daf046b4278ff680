"""Whether to believe a heartbeat, and whose fault it is if not.

A forgery is the sender's fault, whoever it names: every honest node verifies before it passes on. A clock
that lies, or an old heartbeat from a third party, is nobody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from p2p.identity import PeerId, Verify
from p2p.membership.events import Penalise
from p2p.membership.heartbeat import PROTOCOL_ID, SignedHeartbeat

CLOCK_TOLERANCE: Final = 300.0
"""Seconds by which an expired heartbeat may be late: clocks lie."""
FORGED_POINTS: Final = 25.0
MALFORMED_POINTS: Final = 25.0
REPLAYED_POINTS: Final = 1.0
FLOOD_POINTS: Final = 1.0
"""Points of penalty: four forgeries are an enemy, a hundred replays or dropped messages a broken peer."""


class Judge:
    """Checks heartbeats, counts what is dropped, penalises whose fault it is."""

    __slots__ = ("_lifetime", "_penalise", "_verify", "_wall", "counters", "may")

    def __init__(
        self,
        verify: Verify,
        may: Callable[[PeerId], bool],
        wall: Callable[[], float],
        lifetime: float,
        penalise: Callable[[Penalise], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        """What was dropped, by reason."""
        self.may: Final = may
        self._verify = verify
        self._wall = wall
        self._lifetime = lifetime
        self._penalise = penalise

    def is_genuine(self, signed: SignedHeartbeat, source: PeerId) -> bool:
        """Whether to believe a heartbeat that ``source`` sent."""
        ahead = signed.heartbeat.expires - self._wall()
        if ahead < -CLOCK_TOLERANCE:
            self.counters["expired"] += 1
        elif ahead > 2 * self._lifetime:
            self.counters["far future"] += 1
            if source == signed.peer:
                self._penalise(Penalise(source, REPLAYED_POINTS, "far future"))
        elif not self.may(signed.peer):
            self.counters["unadmitted"] += 1
        elif not self.is_signed(signed):
            self.refuse("forged", source, FORGED_POINTS)
        else:
            return True
        return False

    def is_signed(self, signed: SignedHeartbeat) -> bool:
        """Whether the signature is good."""
        return self._verify(signed.peer, PROTOCOL_ID, signed.body, signed.signature)

    def refuse(self, reason: str, peer: PeerId, points: float, detail: str = "") -> None:
        """Count and penalise."""
        self.counters[reason] += 1
        self._penalise(Penalise(peer, points, f"{reason}: {detail}" if detail else reason))
