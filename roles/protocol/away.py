"""What a node hears of the validators that its run's trainer passes over, on gossip.

As `roles.protocol.demand`: one for a node, only the trainer that the newest edition names is
heard, and what it said holds for as long as it goes on saying something. In a run without
appeals nothing is heard. A validator whose ledger tells two stories is passed over by whoever
has the proof, without a word of the trainer's: nothing that it signs counts.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import trio

from p2p.concurrency import Notifier
from p2p.gossip import Gossip, Validity
from p2p.identity import PeerId
from p2p.ledger import Entry, LedgerFork
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.assignment import validator_of
from roles.protocol.core.away import REMEMBERED, Away, away_topic, decode_away_untrusted
from roles.protocol.core.lots import Lot, judges_now
from roles.protocol.demand import HOLDS
from roles.run import Run, run_of

logger = logging.getLogger(__name__)

SETTLING: Final = 60.0
"""Seconds after a node's start in which it takes nobody for away of whom no heartbeat came: of
a member that lives twelve come in that time."""

_NOBODY: Final[frozenset[PeerId]] = frozenset()


class HeardAway:
    """Who is passed over, as far as this node has heard."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._said: tuple[PeerId, int] | None = None
        """Author and number of the newest statement."""
        self._away = _NOBODY
        self._before: deque[frozenset[PeerId]] = deque([_NOBODY], maxlen=REMEMBERED)
        """What held before that, the newest last."""
        self._until = math.inf
        self._forked = frozenset(node.ledgers.forks)
        """Who has told two stories."""
        self._changed = Notifier()
        node.ledgers.on_news(self._hear_news)
        self._since = node.world.now()
        if run_of(node).terms.appeals:
            node.gossip.subscribe(away_topic(node.run.id), self._judge, _taken_when_judged)

    @property
    def number(self) -> int:
        """Of the newest statement."""
        return 0 if self._said is None else self._said[1]

    @property
    def validators(self) -> frozenset[PeerId]:
        """Those that are passed over now."""
        if self._away and self._node.world.now() >= self._until:
            self._hold(_NOBODY)
        return self._away | self._liars

    def absent(self, validators: Sequence[PeerId]) -> list[PeerId]:
        """Of whom no word is waited for: those that are passed over, and those of which there
        is no heartbeat. A trainer that has just started knows nobody, and waits."""
        passed, now = self.validators, self._node.world.now()
        here = {member.peer for member in self._node.membership.find("validator")}
        is_new = now < self._since + SETTLING
        return [one for one in validators if one in passed or not (is_new or one in here)]

    def judge_of(self, run: Run, node: PeerId, version: PolicyVersion) -> PeerId:
        """Who judges ``node`` under ``version`` now, by an edition of the run."""
        return validator_of(run, node, version, self.validators)

    def judges_of(self, run: Run, node: PeerId, version: PolicyVersion) -> Iterator[PeerId]:
        """Who does, or did by an earlier statement."""
        for away in self.statements():
            yield validator_of(run, node, version, away)

    def statements(self) -> Iterator[frozenset[PeerId]]:
        """Who is passed over now, and who was by each statement that is remembered."""
        yield self.validators
        yield from self._before

    def checks(self, run: Run, lot: Lot, place: int) -> list[PeerId]:
        """Who is to check a drawn place now."""
        return self._checks(run, lot, place, self.validators)

    def may_check(self, run: Run, lot: Lot, place: int, validator: PeerId) -> bool:
        """Whether it does, or did by an earlier statement."""
        return any(
            validator in self._checks(run, lot, place, away) for away in self.statements()
        )

    def _checks(self, run: Run, lot: Lot, place: int, away: frozenset[PeerId]) -> list[PeerId]:
        terms = run.terms
        return judges_now(lot, place, terms.validators, terms.lots.validators, away)

    async def wait_change(self) -> frozenset[PeerId]:
        """Return what held before, once others are passed over."""
        held = self.validators
        while self.validators == held:
            left = self._until - self._node.world.now() if self._away else math.inf
            with trio.move_on_after(max(0.0, left)):
                await self._changed.wait()
        return held

    def hear(self, author: PeerId, away: Away) -> bool:
        """Whether it is news; wakes those who wait."""
        known = self._said
        if known is not None and known[0] == author and known[1] >= away.number:
            return False
        self._said = author, away.number
        self._until = self._node.world.now() + HOLDS
        self._hold(frozenset(away.validators))
        return True

    @property
    def _liars(self) -> frozenset[PeerId]:
        return self._forked.intersection(run_of(self._node).terms.validators)

    def _hold(self, away: frozenset[PeerId]) -> None:
        if away != self._away:
            self._before.append(self._away | self._liars)
            self._away = away
            self._changed.notify_all()

    def _hear_news(self, news: Entry | LedgerFork) -> None:
        if isinstance(news, LedgerFork) and news.culprit not in self._forked:
            self._before.append(self._away | self._liars)
            self._forked |= {news.culprit}
            self._changed.notify_all()

    def _judge(self, author: PeerId, data: bytes) -> Validity:
        away = decode_away_untrusted(data)
        if author != run_of(self._node).terms.trainers[0]:
            logger.info("away_ignored author=%s: it is not this run's trainer", author.short)
            return Validity.IGNORE
        return Validity.ACCEPT if self.hear(author, away) else Validity.IGNORE


def _taken_when_judged(_: PeerId, __: bytes) -> None:
    """It was heard when it was judged."""


_HEARD: Final[WeakKeyDictionary[Gossip, HeardAway]] = WeakKeyDictionary()
"""By the gossip of a node, so that its roles share one."""


def away_of(node: Node) -> HeardAway:
    """What ``node`` hears; it listens from the first call on."""
    heard = _HEARD.get(node.gossip)
    if heard is None:
        heard = _HEARD[node.gossip] = HeardAway(node)
    return heard
