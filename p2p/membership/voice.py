"""What a node says of itself, when, and to whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from p2p.identity import PeerId, Signer
from p2p.membership.events import MembershipConfig
from p2p.membership.heartbeat import Heartbeat, Profile, SignedHeartbeat, sign_heartbeat

SEQNO_BLOCK: Final = 4096
"""Sequence numbers reserved on disk at a time: five hours at one heartbeat in 5 s."""
EARLY: Final = 0.25
"""Intervals that lie at least between two of our heartbeats, however many reasons there are for one."""
SPARE: Final = 6.0
"""Intervals for which an interested peer that could not be reached is spared."""
MAX_INTEREST: Final = 4096
"""Peers that get our heartbeats without being neighbours; at 5 s that is 150 KB/s, more than enough."""
MAX_OWED: Final = 32
"""Accusers answered in person with our next heartbeat; the others hear of it by rumour."""


class Voice:
    """Signs our heartbeats, counts them, and knows who is to hear the next one."""

    __slots__ = (
        "_ceiling", "_config", "_interest", "_last_beat", "_newest", "_owed", "_profile", "_seqno",
        "_signer", "_spared", "_wall", "answer_at", "beats", "next_beat", "peer",
    )  # fmt: skip

    def __init__(
        self, signer: Signer, config: MembershipConfig, wall: Callable[[], float], seqno: int
    ) -> None:
        self.peer: Final = signer.peer_id
        self.next_beat = -math.inf
        """When the next heartbeat is due."""
        self.answer_at = math.inf
        """When the accusers that wait for a sign of life get it, if not with the next heartbeat."""
        self.beats = 0
        """Heartbeats that were due so far."""
        self._signer = signer
        self._config = config
        self._wall = wall
        self._seqno = seqno - 1
        self._ceiling = seqno - 1 + SEQNO_BLOCK
        self._profile = Profile()
        self._newest: SignedHeartbeat | None = None
        self._last_beat = -math.inf
        self._interest: dict[PeerId, None] = {}
        self._spared: dict[PeerId, float] = {}
        self._owed: dict[PeerId, None] = {}

    @property
    def seqno(self) -> int:
        """The last number used."""
        return self._seqno

    def newest(self) -> SignedHeartbeat:
        """Our newest heartbeat; a new one, if it does not say any more what we are."""
        newest, profile = self._newest, self._profile
        said = None if newest is None else newest.heartbeat.profile
        if newest is None or (said is not profile and said != profile):
            newest = self._newest = self._sign(leaving=False)
        return newest

    def beat(self, now: float) -> SignedHeartbeat:
        """A new heartbeat; the next is due in an interval."""
        self._newest = self._sign(leaving=False)
        self.beats += 1
        self._last_beat, self.next_beat = now, now + self._config.interval
        return self._newest

    def beat_soon(self, now: float) -> None:
        """There is a reason not to wait for the next interval."""
        self.next_beat = min(self.next_beat, max(now, self._last_beat + EARLY * self._config.interval))

    def answer(self, now: float) -> SignedHeartbeat:
        """A new heartbeat for our accusers alone. Neighbours wait for the next that is due: with a beat to
        all of them for each accusation, accusations made them and us talk four times as much."""
        self._newest = self._sign(leaving=False)
        self._last_beat, self.answer_at = now, math.inf
        return self._newest

    def farewell(self) -> SignedHeartbeat:
        """Our last heartbeat."""
        self.next_beat = math.inf
        return self._sign(leaving=True)

    def describe(self, profile: Profile, now: float) -> None:
        """Say this of us from now on; soon, if others should hear of it."""
        before, self._profile = self._profile, profile
        if differs(before, profile):
            self.beat_soon(now)

    def count_on_from(self, seqno: int, now: float) -> None:
        """Others have newer words of ours than we: our disk or our clock was lost."""
        self._seqno = max(self._seqno, seqno)
        self.beat_soon(now)

    def reserve(self) -> int | None:
        """A new ceiling to write down, when half of the reserved numbers are used."""
        if self._seqno + SEQNO_BLOCK // 2 <= self._ceiling:
            return None
        self._ceiling = self._seqno + SEQNO_BLOCK
        return self._ceiling

    def interest(self, peers: Iterable[PeerId]) -> None:
        """Beat to ``peers`` too; replaces the set before."""
        self._interest = dict.fromkeys(list(peers)[:MAX_INTEREST])
        self._spared.clear()

    def spare(self, peer: PeerId, now: float) -> None:
        """An interested peer cannot be reached: let it be for a while."""
        if peer in self._interest:
            self._spared[peer] = now + SPARE * self._config.interval

    def interested(self, now: float) -> list[PeerId]:
        """Who is to get our heartbeat now without being a neighbour."""
        return [peer for peer in self._interest if self._spared.get(peer, now) <= now]

    def owe(self, peer: PeerId, now: float) -> None:
        """``peer`` waits for a sign of life."""
        if len(self._owed) < MAX_OWED:
            self._owed[peer] = None
        self.answer_at = min(self.answer_at, max(now, self._last_beat + EARLY * self._config.interval))

    def take_owed(self) -> list[PeerId]:
        """Who waits for a sign of life; they are told now."""
        peers = list(self._owed)
        self._owed.clear()
        self.answer_at = math.inf
        return peers

    def _sign(self, *, leaving: bool) -> SignedHeartbeat:
        self._seqno += 1
        heartbeat = Heartbeat(
            peer=self._signer.peer_id,
            seqno=self._seqno,
            expires=round(self._wall() + self._config.lifetime),
            interval=self._config.interval,
            leaving=leaving,
            profile=self._profile,
        )
        return sign_heartbeat(heartbeat, self._signer)


def differs(before: Profile, after: Profile) -> bool:
    """Whether others should hear of it soon: not for every change of load."""
    old = (before.addrs, before.roles, before.run, before.policy, before.version)
    return old != (after.addrs, after.roles, after.run, after.policy, after.version)
