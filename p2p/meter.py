"""One budget of answers for all peers that are no members.

Theory of operation
-------------------
Keys are free. A limit for each peer therefore bounds nothing for strangers: 32 fresh keys get
32 times as much. So what a node answers to peers that are no members is charged to one meter,
whichever protocol they ask by. The bytes count as upload, too, so that policies and strangers
together stay within what the owner lends (``[share] upload``).

Half of the meter is kept for the *door*: answers that a newcomer needs before it can be a
member, such as the run file. Who drains the meter by questions about ledgers or evidence keeps
nobody out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2p.bounded import TokenBucket
from p2p.identity import PeerId
from p2p.wire import KI, MIB
from p2p.world import World

BURST: Final = 2.0 * MIB
"""Bytes that all strangers together may get at once: four of the longest answers about ledgers,
and run files for many newcomers."""
RATE: Final = 64.0 * KI
"""Bytes a second after the burst, where the owner sets no limit to upload: half of a slow
home's line of 1 Mbit/s."""


class StrangerMeter:
    """Decides whether a peer that is no member gets an answer."""

    def __init__(
        self,
        world: World,
        is_member: Callable[[PeerId], bool] | None = None,
        upload: float = 0.0,
    ) -> None:
        """Start with a full meter.

        Args:
            world: For its clock.
            is_member: Says who is not metered; by default nobody.
            upload: Bytes a second that the owner lends, of which strangers get an eighth; 0 for
                no limit.
        """
        # 128 seconds of that eighth.
        burst = min(BURST, 16.0 * upload) if upload else BURST
        self._world = world
        self._is_member = is_member
        self._charge: Callable[[int], None] | None = None
        self._rate = upload / 8 if upload else RATE
        self._bucket = TokenBucket(burst, world.now())
        self.refused = 0
        """Number of answers that strangers did not get."""

    def begin(self, is_member: Callable[[PeerId], bool], charge: Callable[[int], None]) -> None:
        """Exempt peers for which ``is_member`` returns True from now on, and report the bytes
        of each answer, which are upload as well, to ``charge``.

        Until then every peer counts as a stranger: a node answers for its run before it knows a
        member.
        """
        self._is_member, self._charge = is_member, charge

    def allows(self, peer: PeerId, size: int, *, is_door: bool = False) -> bool:
        """Return True if ``peer`` may have an answer of ``size`` bytes, which is charged then.

        An answer at the door may put the meter into debt, as a run file may be longer than what
        is left. Any other must fit into the half that is not kept for the door.
        """
        if self._is_member is not None and self._is_member(peer):
            return True
        # Bytes that any answer counts for: it costs a stream and a turn.
        bucket, cost = self._bucket, max(size, 256)
        bucket.refill(self._world.now(), self._rate)
        if bucket.level <= 0 if is_door else bucket.level - cost < bucket.capacity / 2:
            self.refused += 1
            return False
        bucket.take(cost)
        if self._charge is not None:
            self._charge(cost)
        return True

    def allows_at_door(self, peer: PeerId, size: int) -> bool:
        """Return the result of `allows` for answers that a newcomer needs before it can be a
        member."""
        return self.allows(peer, size, is_door=True)
