"""What a node hears of the demand of its run's trainer, on gossip.

One for a node, whichever of its roles asks for it: a topic has one handler. Only the trainer
that the newest edition names is heard. What another peer publishes is ignored, not rejected: a
later edition, which has not come here yet, may name it.

What was said holds for as long as the trainer goes on saying something. Its clock may have been
set back, so that its numbers are no news; it may have become one that says nothing, or be
another; its words may find no way. "Nothing more is wanted" would stand for ever, and the
trainer would wait for the work that it forbids.
"""

from __future__ import annotations

import logging
import math
from typing import Final
from weakref import WeakKeyDictionary

import trio

from p2p.concurrency import Notifier
from p2p.gossip import Gossip, Validity
from p2p.identity import PeerId
from p2p.node.node import Node
from roles.protocol.core.demand import (
    Demand,
    HeardShares,
    decode_demand_untrusted,
    demand_topic,
)
from roles.run import run_of

logger = logging.getLogger(__name__)

HOLDS: Final = 300.0
"""Seconds after which the last statement holds no longer: 15 of those that a trainer makes, one
every 20 s (`roles.trainer.demand.EVERY`)."""


class HeardDemand:
    """The shares that a node has heard of, and how to wait for others."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shares = HeardShares(node.run.id)
        self._trainer = run_of(node).terms.trainers[0]
        self._until = 0.0
        """When the last statement ceases to hold."""
        self._changed = Notifier()
        node.gossip.subscribe(demand_topic(node.run.id), self._judge, _taken_when_judged)

    @property
    def shares(self) -> HeardShares:
        """What holds now, of the trainer that the newest edition names."""
        trainer = run_of(self._node).terms.trainers[0]
        if trainer != self._trainer:
            self._trainer, self._shares = trainer, HeardShares(self._node.run.id)
        elif self._node.world.now() >= self._until:
            self._shares.lapse()
        return self._shares

    async def wait_change(self) -> None:
        """Return when the trainer has said something else, or its last word has lapsed."""
        left = math.inf
        if self.shares.newest is not None:
            left = self._until - self._node.world.now()
        with trio.move_on_after(left):
            await self._changed.wait()

    def hear(self, demand: Demand) -> bool:
        """Whether it is news; wakes those who wait."""
        is_news = self.shares.hear(demand)
        if is_news:
            self._until = self._node.world.now() + HOLDS
            self._changed.notify_all()
        return is_news

    def _judge(self, author: PeerId, data: bytes) -> Validity:
        demand = decode_demand_untrusted(data)
        if author != run_of(self._node).terms.trainers[0]:
            logger.info("demand_ignored author=%s: it is not this run's trainer", author.short)
            return Validity.IGNORE
        return Validity.ACCEPT if self.hear(demand) else Validity.IGNORE


def _taken_when_judged(_: PeerId, __: bytes) -> None:
    """It was heard when it was judged."""


_HEARD: Final[WeakKeyDictionary[Gossip, HeardDemand]] = WeakKeyDictionary()
"""By the gossip of a node, so that its roles share one."""


def demand_of(node: Node) -> HeardDemand:
    """What ``node`` hears; it listens from the first call on."""
    heard = _HEARD.get(node.gossip)
    if heard is None:
        heard = _HEARD[node.gossip] = HeardDemand(node)
    return heard
