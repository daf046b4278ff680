"""This node's own heartbeat: what it says, when the next is due, and which peers get it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from p2p.identity import PeerId, Signer
from p2p.membership.config import MembershipConfig
from p2p.membership.heartbeat import Heartbeat, Profile, SignedHeartbeat, sign_heartbeat


class LocalHeartbeat:
    """Signs and counts our heartbeats, and knows which peers get the next one."""

    def __init__(
        self, signer: Signer, config: MembershipConfig, wall: Callable[[], float], seqno: int
    ) -> None:
        self.peer: Final = signer.peer_id
        self.next_beat = -math.inf
        """Time at which the next heartbeat is due."""
        self.refute_at = math.inf
        """Time at which peers that suspect us get a sign of life, unless a heartbeat is due
        earlier; infinite if no peer waits for one."""
        self.beats = 0
        """Number of heartbeats that were due so far."""
        self._signer = signer
        self._config = config
        self._wall = wall
        self.seqno = seqno - 1
        """Last sequence number used."""
        self._profile = Profile()
        self._newest: SignedHeartbeat | None = None
        self._last_beat = -math.inf
        self._interest: dict[PeerId, None] = {}
        self._backed_off: dict[PeerId, float] = {}
        self._suspecters: dict[PeerId, None] = {}

    def newest(self) -> SignedHeartbeat:
        """Return our newest heartbeat, or a new one if our profile has changed since."""
        newest, profile = self._newest, self._profile
        said = None if newest is None else newest.heartbeat.profile
        if newest is None or (said is not profile and said != profile):
            newest = self._newest = self._sign(leaving=False)
        return newest

    def beat(self, now: float) -> SignedHeartbeat:
        """Sign a new heartbeat and schedule the next in one interval."""
        self._newest = self._sign(leaving=False)
        self.beats += 1
        self._last_beat, self.next_beat = now, now + self._config.interval
        return self._newest

    def beat_soon(self, now: float) -> None:
        """Send the next heartbeat as soon as the minimum gap allows."""
        self.next_beat = min(self.next_beat, self._earliest(now))

    def refute(self, now: float) -> SignedHeartbeat:
        """Sign a new heartbeat for suspecting peers alone. The schedule of the others stays:
        with a heartbeat to all neighbours for each suspicion, they and we sent four times as
        much."""
        self._newest = self._sign(leaving=False)
        self._last_beat, self.refute_at = now, math.inf
        return self._newest

    def farewell(self) -> SignedHeartbeat:
        """Sign our last heartbeat, a good-bye."""
        self.next_beat = math.inf
        return self._sign(leaving=True)

    def set_profile(self, profile: Profile, now: float) -> None:
        """Set the content of our heartbeats. It is sent soon if others should know."""
        before, self._profile = self._profile, profile
        if differs(before, profile):
            self.beat_soon(now)

    def continue_from(self, seqno: int, now: float) -> None:
        """Continue numbering from ``seqno``. Peers have a newer heartbeat of ours than we do,
        so our disk or our clock was lost."""
        self.seqno = max(self.seqno, seqno)
        self.beat_soon(now)

    def set_interest(self, peers: Iterable[PeerId]) -> None:
        """Set the peers that get our heartbeats besides the neighbours."""
        # Peers that get our heartbeats without being neighbours; at 5 s that is 150 KB/s, more
        # than enough.
        self._interest = dict.fromkeys(list(peers)[:4096])
        self._backed_off.clear()

    def back_off(self, peer: PeerId, now: float) -> None:
        """Send no heartbeats to an unreachable peer of the interest set for a while."""
        if peer in self._interest:
            # Intervals for which an interested peer that could not be reached is spared.
            self._backed_off[peer] = now + 6.0 * self._config.interval

    def interested(self, now: float) -> list[PeerId]:
        """Return the peers besides the neighbours that get our heartbeat now."""
        return [peer for peer in self._interest if self._backed_off.get(peer, now) <= now]

    def add_suspecter(self, peer: PeerId, now: float) -> None:
        """Note that ``peer`` waits for a sign of life."""
        # Suspecting peers answered in person with our next heartbeat; the others hear of it by
        # flood.
        if len(self._suspecters) < 32:
            self._suspecters[peer] = None
        self.refute_at = min(self.refute_at, self._earliest(now))

    def take_suspecters(self) -> list[PeerId]:
        """Return and clear the peers that wait for a sign of life."""
        peers = list(self._suspecters)
        self._suspecters.clear()
        self.refute_at = math.inf
        return peers

    def _earliest(self, now: float) -> float:
        """Return the earliest time at which our next heartbeat may follow the last."""
        # Intervals that lie at least between two of our heartbeats, however many reasons there
        # are for one.
        return max(now, self._last_beat + 0.25 * self._config.interval)

    def _sign(self, *, leaving: bool) -> SignedHeartbeat:
        self.seqno += 1
        heartbeat = Heartbeat(
            peer=self._signer.peer_id,
            seqno=self.seqno,
            expires=round(self._wall() + self._config.lifetime),
            interval=self._config.interval,
            leaving=leaving,
            profile=self._profile,
        )
        return sign_heartbeat(heartbeat, self._signer)


def differs(before: Profile, after: Profile) -> bool:
    """Return True if others should hear of a change soon; changes of load can wait."""
    old = (before.addrs, before.roles, before.run, before.policy, before.version)
    return old != (after.addrs, after.roles, after.run, after.policy, after.version)
