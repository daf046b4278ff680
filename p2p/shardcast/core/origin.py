"""Which of our own versions is being handed out, and which comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Policy
from p2p.shardcast.core.handout import HandOut
from p2p.shardcast.core.statements import Known
from p2p.shardcast.core.upload import Relay, news_of
from p2p.shardcast.forest import plant
from p2p.shardcast.messages import INLINE_INDEX, Blame, Credit

_OVERTIME: Final = 4
"""Shortest patiences without a chunk given away after which a hand-out no longer delays the next: its
roots are all dead or stuck, and a newer version is worth more to whoever still listens."""


class Origin:
    """One version at a time: the next starts when the one before has left, those in between never."""

    def __init__(self, known: Known, relay: Relay, is_gone: Callable[[PeerId], bool], stall: float) -> None:
        self._known = known
        self._relay = relay
        self._is_gone = is_gone
        self._overtime = _OVERTIME * stall
        self._pending: Policy | None = None
        self._again = False

    def publish(self, policy: Policy, *, again: bool) -> None:
        """``policy`` is next, whatever was; ``again`` if an earlier life began to hand it out."""
        self._pending, self._again = policy, again

    def start(self, now: float) -> Iterator[ev.Effect]:
        """Announce and hand out what is pending, if it is its turn."""
        policy, handouts = self._pending, self._relay.handouts
        busy = any(not h.exhausted and now < h.progress + self._overtime for h in handouts.values())
        if policy is None or busy:
            return
        self._pending = None
        yield ev.Gossip(news_of(policy, INLINE_INDEX))
        roster = self._known.roster(policy.manifest.trainer)
        if roster is None:
            return
        forest = plant(roster, policy.manifest.version)
        handout = HandOut(policy.count, forest, now, policy.patience, again=self._again)
        for peer in forest.roots:
            if self._is_gone(peer):
                handout.lose(peer)
        handouts[policy.manifest.digest] = handout

    def hear(self, peer: PeerId, message: Credit | Blame, now: float) -> bool:
        """What roots and their children say about a hand-out. False if it cannot be true."""
        handout = self._relay.handouts.get(message.policy)
        if handout is None:
            return True
        if isinstance(message, Credit):
            return handout.credit(peer, message.received, message.granted, now)
        handout.blame(message.peer, peer)
        return True

    def expire(self, now: float) -> None:
        """Give again what roots have not confirmed in time."""
        for handout in self._relay.handouts.values():
            handout.expire(now)

    @property
    def next_deadline(self) -> float:
        """When `expire` or `start` next has something to do."""
        handouts = self._relay.handouts.values()
        due = [handout.next_deadline for handout in handouts]
        if self._pending is not None:
            turns = [handout.progress + self._overtime for handout in handouts if not handout.exhausted]
            due.append(max(turns, default=math.inf))  # `start` waits for every one of them
        return min(due, default=math.inf)
