"""Verification of heartbeats, and blame for false ones.

A forgery is the fault of the peer that sent it, whichever peer it names: every honest node
verifies before it passes on. A wrong clock, or an old heartbeat of a third party, is no fault
of the sender.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Final

from p2p.bounded import BoundedDict
from p2p.events import Penalise
from p2p.identity import SIGNATURE_BYTES, PeerId, Verify
from p2p.membership.core.events import ClockOff
from p2p.membership.heartbeat import PROTOCOL_ID, SignedHeartbeat
from p2p.offence import Offence


class HeartbeatVerifier:
    """Verifies heartbeats, counts dropped ones, and penalises the peer at fault."""

    def __init__(
        self,
        verify: Verify,
        may: Callable[[PeerId], bool],
        wall: Callable[[], float],
        lifetime: float,
        penalise: Callable[[Penalise], None],
        is_stamped: Callable[[PeerId, bytes], bool] | None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """Dropped heartbeats, by reason."""
        self.may: Final = may
        self._verify = verify
        self._wall = wall
        self._lifetime = lifetime
        self._penalise = penalise
        self._is_stamped = is_stamped
        self.asks_stamps: Final = is_stamped is not None
        """True if peers must show a stamp, as in an open run."""
        # Peers remembered that have shown their stamp: as many as `KeyedQuotas` counts.
        self._stamped: BoundedDict[PeerId, bytes] = BoundedDict(8192)
        """Accepted credentials of peers, oldest first."""
        self._clocks: dict[PeerId, float] = {}
        """Maps each peer whose heartbeats were refused because of the time to our clock's lead
        over its own."""

    def is_genuine(self, signed: SignedHeartbeat, source: PeerId) -> bool:
        """Return True if a heartbeat from `source` is timely, stamped, admitted and signed;
        else count the reason."""
        ahead = signed.heartbeat.expires - self._wall()
        # Seconds by which an expired heartbeat may be late: clocks lie. A heartbeat is good for
        # 30 minutes (`MembershipConfig.lifetime`), so a clock may be 35 behind ours.
        if not -300.0 <= ahead <= 2 * self._lifetime:
            self._refuse_clock(signed, source, ahead)
        elif self._is_stamped is not None and not self._shows_stamp(signed, self._is_stamped):
            self.refuse_stamp(signed.peer)
        elif not self.may(signed.peer):
            self.counters["unadmitted"] += 1
        elif not self.is_signed(signed):
            self.refuse("forged", source, Offence.FORGED)
        else:
            if self._clocks:
                self._clocks.pop(signed.peer, None)
            return True
        return False

    def is_signed(self, signed: SignedHeartbeat) -> bool:
        """Return True if the signature is good."""
        wire = signed.wire
        return self._verify(
            signed.heartbeat.peer, PROTOCOL_ID, wire[:-SIGNATURE_BYTES], wire[-SIGNATURE_BYTES:]
        )

    def has_stamp(self, peer: PeerId) -> bool:
        """Return True if ``peer`` has shown its stamp, or needs none."""
        is_stamped = self._is_stamped
        if is_stamped is None or (peer in self._stamped and self.may(peer)):
            return True
        return is_stamped(peer, b"")

    def refuse_stamp(self, peer: PeerId) -> None:
        """Count a heartbeat that is ignored for lack of a stamp or an admission."""
        self.counters["no stamp" if self.may(peer) else "unadmitted"] += 1

    def refuse(self, reason: str, peer: PeerId, offence: Offence, detail: str = "") -> None:
        """Count a dropped message and penalise the peer at fault."""
        self.counters[reason] += 1
        self._penalise(Penalise(peer, offence, f"{reason}: {detail}" if detail else reason))

    def clock_off(self, believed: int) -> ClockOff | None:
        """Return by how much our clock is wrong, or None. It is wrong if more peers disagree
        with it than the ``believed``, who agree."""
        if len(self._clocks) <= believed:
            return None
        return ClockOff(statistics.median(self._clocks.values()), len(self._clocks))

    def _shows_stamp(
        self, signed: SignedHeartbeat, is_stamped: Callable[[PeerId, bytes], bool]
    ) -> bool:
        """Return True if a heartbeat's stamp, or an earlier one of its author, is accepted.
        Checking costs a hash, or two signatures for an invite, before the heartbeat's signature
        is verified. A new stamp that fails does not void an accepted one."""
        peer, shown = signed.peer, signed.heartbeat.profile.stamp
        known = self._stamped.get(peer)
        if known == shown and self.may(peer):
            return True
        if is_stamped(peer, shown):
            self._stamped[peer] = shown
            return True
        return known is not None and self.may(peer)

    def _refuse_clock(self, signed: SignedHeartbeat, source: PeerId, ahead: float) -> None:
        """Drop a heartbeat with a wrong time. If its author sent it, note the difference of the
        clocks."""
        reason = "expired" if ahead < 0 else "far future"
        self.counters[reason] += 1
        if source != signed.peer:
            return
        if ahead > 0:
            self._penalise(Penalise(source, Offence.REPLAYED, reason))
        is_known = source in self._clocks
        # Peers remembered whose clocks are not ours: enough for a median, which no minority of
        # liars moves beyond the honest.
        has_room = len(self._clocks) < 64
        if is_known or (has_room and self.is_signed(signed)):
            self._clocks[source] = self._lifetime - ahead
