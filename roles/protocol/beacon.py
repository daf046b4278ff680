"""What a node hears of the beacon of its run's trainer, on gossip.

One for a node, whichever of its roles asks for it. Only the trainer that the newest edition
names is heard: nothing that another peer publishes is hashed. That it has pledged twice may be
found here, or come with a validator's ledger.
"""

from __future__ import annotations

import logging
from typing import Final
from weakref import WeakKeyDictionary

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.gossip import Gossip, Validity
from p2p.identity import PeerId
from p2p.ledger import Entry, LedgerFork
from p2p.node.node import Node
from roles.protocol.core.beacon import (
    HeardLinks,
    Reveal,
    TwoPledges,
    beacon_topic,
    decode_reveal_untrusted,
    decode_two_pledges_untrusted,
)
from roles.protocol.core.statements import PLEDGES_KIND
from roles.run import run_of

logger = logging.getLogger(__name__)


class HeardBeacon:
    """The links that a node has heard of, and how to wait for others."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = Notifier()
        self._anew()
        node.gossip.subscribe(beacon_topic(node.run.id), self._judge, _taken_when_judged)
        node.ledgers.on_news(self._hear_statement)

    def _anew(self) -> None:
        node, terms = self._node, run_of(self._node).terms
        self._trainer = terms.trainers[0]
        self._links = HeardLinks(node.run.id, self._trainer, terms.lots.beacon)
        for officer in node.run.officers:
            for entry in node.ledgers.statements(officer, PLEDGES_KIND):
                self._hear_statement(entry)

    def _hear_statement(self, news: Entry | LedgerFork) -> None:
        """A ledger may prove what was not heard here. It needs no trust in its author."""
        if not isinstance(news, Entry) or news.kind != PLEDGES_KIND:
            return
        try:
            proof = decode_two_pledges_untrusted(news.body, self._node.world.verify)
        except BadMessage as error:
            logger.warning("pledges_void author=%s: %s", news.author, error)
            return
        if self._links.convict(proof):
            self._tell(proof)

    def _tell(self, proof: TwoPledges) -> None:
        logger.error(
            "beacon_forked trainer=%s chain=%d: it has pledged two ends, so no lot of it"
            " counts, and everything is checked",
            proof.first.trainer,
            proof.first.chain,
        )
        self._changed.notify_all()

    @property
    def links(self) -> HeardLinks:
        """Of the trainer that the newest edition names."""
        if run_of(self._node).terms.trainers[0] != self._trainer:
            self._anew()
        return self._links

    async def wait_forked(self) -> TwoPledges:
        """Return the proof, once there is one."""
        while self.links.forked is None:
            await self._changed.wait()
        return self.links.forked

    @property
    def is_live(self) -> bool:
        """Whether lots fall in this run, now."""
        is_on = run_of(self._node).terms.has_lots
        return is_on and self.links.is_live(self._node.world.now())

    async def wait_change(self, seconds: float) -> None:
        """Return when there is another link, or after ``seconds``."""
        with trio.move_on_after(seconds):
            await self._changed.wait()

    def hear(self, reveal: Reveal) -> bool:
        """Whether it is news; wakes those who wait. Raises `BadMessage`."""
        links, was_forked = self.links, self.links.forked
        is_news = links.hear(reveal, self._node.world.now())
        if links.forked is not None and was_forked is None:
            self._tell(links.forked)
        if is_news:
            self._changed.notify_all()
        return is_news

    def _judge(self, author: PeerId, data: bytes) -> Validity:
        if author != run_of(self._node).terms.trainers[0]:
            return Validity.IGNORE
        reveal = decode_reveal_untrusted(data, self._node.world.verify)
        return Validity.ACCEPT if self.hear(reveal) else Validity.IGNORE


def _taken_when_judged(_: PeerId, __: bytes) -> None:
    """It was heard when it was judged."""


_HEARD: Final[WeakKeyDictionary[Gossip, HeardBeacon]] = WeakKeyDictionary()
"""By the gossip of a node, so that its roles share one."""


def beacon_of(node: Node) -> HeardBeacon:
    """What ``node`` hears; it listens from the first call on."""
    heard = _HEARD.get(node.gossip)
    if heard is None:
        heard = _HEARD[node.gossip] = HeardBeacon(node)
    return heard
