"""What leaves this node in bulk: chunks given away, forwarded, and asked for; and the credit for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Policy, bits
from p2p.shardcast.core.handout import CREDIT, HandOut
from p2p.shardcast.core.queue import Lane
from p2p.shardcast.core.statements import Known
from p2p.shardcast.forest import Forest, plant
from p2p.shardcast.messages import (
    NO_STRIPE,
    ChunkHeader,
    Credit,
    PolicyNews,
    RosterNews,
    Skipped,
    mask_of,
)

MAX_OWED: Final = 16
"""Chunks that one peer may have asked for and not got: more than it has reason to, four times."""
LANE_MOST: Final = 4
"""Chunks that may wait for one child before it is told to get further ones elsewhere: twice what a child
that keeps up has waiting, and with eight parents less than a slow line needs a minute for."""
LANE_ROOM: Final = 2
"""Chunks of a hand-out that may wait for one root at the origin."""


def news_of(policy: Policy, max_index: float = math.inf) -> PolicyNews:
    """A policy's manifest, with its index unless that is unknown or longer than ``max_index``."""
    data = policy.index.data if policy.index is not None else b""
    return PolicyNews(policy.manifest.encode(), data if len(data) <= max_index else b"")


class Relay:
    """Lanes, hand-outs and forwarding of one node."""

    def __init__(
        self, local: PeerId, known: Known, policies: dict[bytes, Policy], is_gone: Callable[[PeerId], bool]
    ) -> None:
        self.handouts: dict[bytes, HandOut] = {}
        self._local = local
        self._known = known
        self._policies = policies
        self._is_gone = is_gone
        self._lanes: dict[PeerId, Lane] = {}
        self._dirty: dict[PeerId, None] = {}

    def forest(self, policy: Policy, epoch: int) -> Forest | None:
        """The forest that chunks of ``policy`` under a roster's ``epoch`` travel along, if we know it."""
        roster = self._known.roster(policy.manifest.trainer, epoch)
        return plant(roster, policy.manifest.version) if roster is not None else None

    def pass_on(self, policy: Policy, header: ChunkHeader, sender: PeerId, now: float) -> None:
        """A chunk has come: forward it, along the stripe that should have brought it if none did."""
        parent, bare = policy.bare.pop(header.index, (sender, header))
        self.forward(policy, *((header, sender) if header.stripe != NO_STRIPE else (bare, parent)), now)

    def take_over(self, parent: PeerId, policy: Policy, skipped: Skipped, now: float) -> None:
        """``parent`` does not push us chunks of a stripe: forward what is here, the rest when it comes."""
        forest = self.forest(policy, skipped.epoch)
        if forest is None or not forest.feeds(skipped.stripe, parent, self._local):
            return
        for index in bits(mask_of(skipped.ranges)):
            header = ChunkHeader(skipped.policy, index, skipped.epoch, skipped.stripe)
            if policy.verified >> index & 1:
                self.forward(policy, header, parent, now)
            else:
                policy.bare[index] = (parent, header)
                policy.abandoned(index, parent, now)

    def forward(self, policy: Policy, header: ChunkHeader, sender: PeerId, now: float) -> None:
        """Queue a chunk that came along a stripe for our children in it."""
        forest = self.forest(policy, header.epoch) if header.stripe != NO_STRIPE else None
        if forest is None or not forest.feeds(header.stripe, sender, self._local):
            return
        children = forest.children(header.stripe, self._local, self._is_gone)
        usual = self._usual_rate(children)
        for child in children:
            if child != sender:
                self._offer(child, header, policy, now, usual)
        if sender == forest.roster.origin:
            policy.fresh += 1
            policy.children = children

    def _usual_rate(self, children: tuple[PeerId, ...]) -> float:
        """Chunks per second that a child's lane carries in the mean."""
        lanes = [lane for child in children if (lane := self._lanes.get(child)) is not None and lane.rate]
        return sum(lane.rate for lane in lanes) / len(lanes) if lanes else 0.0

    def _offer(
        self, child: PeerId, header: ChunkHeader, policy: Policy, now: float, usual: float = 0.0
    ) -> None:
        """Queue a chunk for a child that needs it and keeps up; else leave it the stripe's further course."""
        needed = policy.needs(child, header.index)
        lane = self.lane(child)
        room = LANE_MOST * min(1.0, lane.rate / usual) if lane.rate and usual else LANE_MOST
        if needed and lane.backlog < max(1.0, room):
            self._queue(child, header)
        else:
            self._pass_over(child, header, policy, now, needed)

    def _pass_over(
        self, child: PeerId, header: ChunkHeader, policy: Policy, now: float, needed: bool = False
    ) -> None:
        forest = self.forest(policy, header.epoch)
        if forest is not None and (needed or forest.relays(header.stripe, child)):
            policy.skip(child, header, now)

    def _queue(self, peer: PeerId, header: ChunkHeader) -> None:
        self.lane(peer).queue.append(header)
        self._dirty[peer] = None

    def lane(self, peer: PeerId) -> Lane:
        """The lane to ``peer``."""
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = Lane()
        return lane

    def serve(self, peer: PeerId, policy: Policy, chunk: int) -> None:
        """Queue a chunk that ``peer`` asked for, if it is here and ``peer`` is not owed too many.

        One that is queued for it already goes to the front instead: it must not be sent twice.
        """
        lane, name = self.lane(peer), policy.manifest.digest
        if lane.hurry(name, chunk):
            return
        if policy.verified >> chunk & 1 and lane.owed < MAX_OWED and policy.serve(peer):
            policy.taken[peer] = policy.taken.get(peer, 0) & ~(1 << chunk)
            lane.owed += 1
            self._queue(peer, ChunkHeader(name, chunk))

    def credit(self, policy: Policy) -> Iterator[ev.Effect]:
        """Confirm what the origin gave us to relay; ask for more unless our children lag."""
        if not policy.fresh:
            return
        lags = self._lag(policy.children)
        granted = policy.granted if lags else policy.fresh + CREDIT
        state = (policy.fresh, max(policy.granted, granted))
        if state != policy.confirmed:
            policy.confirmed = state
            policy.granted = state[1]
            yield ev.Send(policy.manifest.trainer, Credit(policy.manifest.digest, *state))

    def _lag(self, children: tuple[PeerId, ...]) -> bool:
        """Whether more than half of the children that are there have `CREDIT` chunks waiting."""
        lanes = [lane for child in children if (lane := self._lanes.get(child)) is not None]
        return 2 * sum(lane.backlog >= CREDIT for lane in lanes) > len(lanes)

    def sent(self, peer: PeerId, now: float) -> Policy | None:
        """The chunk under way to ``peer`` has left; returns its policy if that is still known."""
        lane = self._lanes.get(peer)
        header = lane.sent(now) if lane is not None else None
        if header is None:
            return None
        self._dirty[peer] = None
        self._left(peer, header)
        handout = self.handouts.get(header.policy)
        if handout is not None and header.stripe != NO_STRIPE:
            handout.sent(peer, now)
        return self._policies.get(header.policy)

    def _left(self, peer: PeerId, header: ChunkHeader) -> None:
        if header.stripe == NO_STRIPE:
            lane = self.lane(peer)
            lane.owed = max(0, lane.owed - 1)

    def give(self, now: float) -> None:
        """Give away what roots have credit for."""
        for name, handout in self.handouts.items():
            policy = self._policies.get(name)
            while policy is not None and (gift := handout.give(self._has_room, now)) is not None:
                peer, stripe, chunk = gift
                self._queue(peer, ChunkHeader(name, chunk, handout.epoch, stripe))

    def _has_room(self, peer: PeerId) -> bool:
        lane = self._lanes.get(peer)
        return not self._is_gone(peer) and (lane is None or lane.backlog < LANE_ROOM)

    def pump(self, now: float) -> Iterator[ev.Effect]:
        """Put the next chunk of every free lane under way, behind the news that explain it."""
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            lane = self._lanes.get(peer)
            if lane is None or not lane.next(
                now,
                lambda header, peer=peer: self._wanted(peer, header),  # type: ignore[misc]
                lambda header, peer=peer: self._passed(peer, header, now),  # type: ignore[misc]
            ):
                continue
            header = lane.busy
            if header is not None:
                yield from self._explain(peer, lane, header)
                yield ev.Push(peer, header)

    def _passed(self, peer: PeerId, header: ChunkHeader, now: float) -> None:
        """A queued chunk is not pushed, since ``peer`` got it elsewhere meanwhile."""
        self._left(peer, header)
        policy = self._policies.get(header.policy)
        if policy is not None and header.stripe != NO_STRIPE:
            self._pass_over(peer, header, policy, now)

    def _wanted(self, peer: PeerId, header: ChunkHeader) -> bool:
        policy = self._policies.get(header.policy)
        if policy is None or not policy.verified >> header.index & 1:
            return False
        return policy.needs(peer, header.index)

    def _explain(self, peer: PeerId, lane: Lane, header: ChunkHeader) -> Iterator[ev.Effect]:
        policy = self._policies[header.policy]
        forest = self.forest(policy, header.epoch) if header.stripe != NO_STRIPE else None
        if forest is not None and lane.tell(forest.roster.name):
            yield ev.Push(peer, RosterNews(forest.roster.encode()))
        if lane.tell(header.policy):
            yield ev.Push(peer, news_of(policy))

    def lose(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: serve its children in its place, with what it may not have forwarded."""
        for handout in self.handouts.values():
            handout.lose(peer)
        lane = self._lanes.pop(peer, None)
        if lane is None:
            return
        waiting = [*([lane.busy] if lane.busy is not None else []), *lane.queue]
        for header in [*lane.recent, *waiting]:
            policy = self._policies.get(header.policy)
            if policy is not None and header.stripe != NO_STRIPE and header.policy not in self.handouts:
                self._adopt_children(policy, header, peer, now)

    def _adopt_children(self, policy: Policy, header: ChunkHeader, peer: PeerId, now: float) -> None:
        forest = self.forest(policy, header.epoch)
        if forest is None or not forest.feeds(header.stripe, self._local, peer):
            return
        for child in forest.children(header.stripe, peer, self._is_gone):
            if child != self._local:
                self._offer(child, header, policy, now)

    def forget(self, name: bytes) -> None:
        """Drop what is queued of a policy."""
        self.handouts.pop(name, None)
        for lane in self._lanes.values():
            for header in lane.queue:
                if header.policy == name and header.stripe == NO_STRIPE:
                    lane.owed = max(0, lane.owed - 1)
            lane.purge(name)
