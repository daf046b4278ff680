"""Tells the workers how much work is wanted (`roles.trainer.core.demand`), on gossip."""

from __future__ import annotations

from typing import Final

import trio

from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.demand import (
    MAX_GROUPS_WANTED,
    MAX_SHARE,
    Demand,
    demand_topic,
    lot_of,
    share_for,
)
from roles.protocol.demand import demand_of
from roles.rl.recipe import Recipe
from roles.run import run_of
from roles.trainer.core.buffer import GroupBuffer
from roles.trainer.core.demand import DemandRule

EVERY: Final = 20.0
"""Seconds between two statements at most: a worker that has just come waits for one. Each is
100 bytes, and reaches every node some four times."""
NEWS: Final = 1.1
"""How many times the last share another one is that is told before its time, or a part of it:
each arrival changes it a little."""
WORKER: Final = "inference"
"""The role of those that are asked."""


class DemandTeller:
    """Says what this run's trainer wants, while it works."""

    def __init__(self, node: Node, recipe: Recipe, buffer: GroupBuffer) -> None:
        self._node = node
        self._buffer = buffer
        self._rule = DemandRule(recipe.groups, recipe.submission, recipe.lag)
        self._heard = demand_of(node)
        self._authors: dict[PeerId, PolicyVersion] = {}
        """Whose work has come lately, and the newest policy that it was under."""
        self._lag = recipe.lag
        self._version: PolicyVersion | None = None
        self._policy = b""
        self._waited = 0.0
        """Seconds since the last policy."""
        self._late = 0
        """Submissions that came too late for any step."""
        self._lost = 0
        """What had gone stale when the last policy was published."""
        self._waits_since: float | None = None
        self._is_limited = False
        """Whether workers are held back: not before some of their work was lost."""
        self._told = -1

    async def tell_forever(self) -> None:
        """Say it again now and then, until cancelled."""
        while True:
            with trio.move_on_after(EVERY):
                await self._heard.wait_change()
                continue
            self._tell(is_due=True)

    def publish(self, version: PolicyVersion) -> None:
        """A policy is out."""
        now = self._node.world.now()
        self._version = version
        self._policy = self._node.shardcast.manifest(version).weights_digest
        stale = self._buffer.counts.stale + self._late
        self._rule.publish(
            version,
            len(self._workers()),
            now,
            waited=self._waited,
            has_lost=stale > self._lost,
        )
        self._is_limited = self._is_limited or stale > self._lost
        self._waited, self._lost = 0.0, stale
        self._authors = {
            author: newest
            for author, newest in self._authors.items()
            if newest >= version - self._lag
        }
        self._tell(is_due=True, is_new=True)

    def finish(self) -> None:
        """Nothing more is wanted."""
        if self._version is not None:
            self._send(self._version, 0, 0)
            self._version = None

    def arrive(self, author: PeerId, version: PolicyVersion, teaching: int | None) -> None:
        """A submission has come, with so many groups that teach; None: too late."""
        self._authors[author] = max(version, self._authors.get(author, version))
        self._late += teaching is None
        self._rule.arrive(version, teaching, self._node.world.now())
        if self._waits_since is not None:
            self._tell()

    def wait_begins(self) -> None:
        """The trainer stands still."""
        if self._waits_since is None:
            self._waits_since = self._node.world.now()
            self._tell()

    def wait_ends(self) -> None:
        """It has enough groups for a step."""
        if self._waits_since is not None:
            self._waited += self._node.world.now() - self._waits_since
            self._waits_since = None

    def _tell(self, *, is_due: bool = False, is_new: bool = False) -> None:
        version, world = self._version, self._node.world
        if version is None:
            return
        waits = 0.0 if self._waits_since is None else world.now() - self._waits_since
        if waits > self._rule.patience:  # who has filled its share waits for this trainer, too
            self._is_limited = False
        share = self._share(version, is_new=is_new) if self._is_limited else MAX_SHARE
        is_other = not self._told / NEWS <= share <= self._told * NEWS
        if is_due or is_other:
            self._send(version, min(share, MAX_SHARE), self._rule.still_wanted(version))

    def _share(self, version: PolicyVersion, *, is_new: bool) -> int:
        workers = self._workers()
        places = self._rule.places(
            version,
            len(self._buffer),
            len(workers),
            self._node.world.now(),
            is_waiting=self._waits_since is not None,
            is_new=is_new,
        )
        run = self._node.run.id
        return share_for(places, (lot_of(run, peer, self._policy) for peer in workers))

    def _workers(self) -> dict[PeerId, None]:
        """Those that are known to work, and whose work has come of late."""
        trainers = run_of(self._node).terms.trainers
        known = (member.peer for member in self._node.membership.find(WORKER))
        return dict.fromkeys(peer for peer in (*known, *self._authors) if peer not in trainers)

    def _send(self, version: PolicyVersion, share: int, groups: int) -> None:
        number = int(self._node.world.wall() * 1000)
        newest = self._heard.shares.newest
        if newest is not None and newest.version == version:
            number = max(number, newest.number + 1)
        demand = Demand(version, number, share, min(groups, MAX_GROUPS_WANTED))
        self._told = share
        self._heard.hear(demand)
        self._node.gossip.publish(demand_topic(self._node.run.id), demand.to_bytes())
        self._node.world.trace("demand", version=int(version), share=share, groups=groups)
