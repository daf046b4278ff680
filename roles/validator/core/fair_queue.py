"""Whose submission is judged next: fair between nodes, by the scorer's time that each has had.

Theory of operation
-------------------
There is one scorer, and work for it costs a sender nothing to invent. So what stands in the
queue is not the work but the node: each waiting node has its turn, and the one that had least
of the scorer's time is first (start-time fair queueing). Among nodes that had nearly the same,
the oldest policy goes first: weights are loaded seldom then, and nothing goes stale.

There are two lines. In one stand the nodes whose work was accepted, and none rejected of late;
in the other all others, which get `STRANGERS_SHARE` of the time while both wait, newcomers
before nodes in debt. A rejection is a debt of one, halved every `DEBT_HALF_LIFE`: one puts a
node behind for a minute, eight for four. One among many acceptances is none: a run's limits are
drawn so that they refuse an honest submission in 1,000 to 10,000, a cheat is refused nearly
each time. So `EARNS` acceptances earn a pardon, up to `PARDONS` of them, and a rejection uses
one up before it is a debt. The third within 64 acceptances is the first that counts: at one in
1,000 an honest node meets that once in 500,000 submissions (the chance of two more within 64 is
0.002). Of ten in a row eight count, and of a newcomer's the first. Work of nodes in debt is
scored a group first (`roles.validator.replay`), so that their share finds out several times as
much. What the scorer has to spare, because the trainer takes nothing more, is for nodes in
debt: most of their work needs no trainer. What of it is accepted overtakes those who wait for
the trainer, so the next such turn comes when the share of its line covers it (`note_accepted`).
Before that, a node that handed in a bad submission every 40 s and good ones otherwise had 176
of 245 acceptances of a slow trainer, and its three honest neighbours 69.

Nodes in debt, all together, get no more than `REJECTIONS` of them before earlier ones are
forgiven: each is a turn of the scorer, and of a node that has worked an entry of the ledger for
ever; one identity that handed in empty submissions as fast as they were judged filled 4.7 GB of
disk a day. Newcomers are not held up by that: they have no debt, and leave no entry.

Bounded: `QUEUE` submissions, `PER_NODE` of each node, half of all for the second line. When
that is full, the newest of the node that stands worst goes (its worker is told to ask again: no
verdict). No I/O: the caller knows the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from p2p.swarm.core.limits import FadingCounts

T = TypeVar("T")

QUEUE: Final = 64
"""Submissions that wait for the scorer; each sender has four, and one scorer serves a dozen
senders."""
PER_NODE: Final = 8
"""Of one node: the four that an honest one has under way, and as many of an earlier life."""
STRANGERS_SHARE: Final = 1 / 16
"""Share of the scorer's time for nodes without accepted work, while others wait. With less a
newcomer waits for long; with more a crowd of invented ones is felt: honest work may lose a
tenth."""
DEBT_HALF_LIFE: Final = 60.0
"""Seconds in which half of a node's rejections is forgiven: ten are, down to `IN_DEBT`, after
4.3 minutes. The demo's cheat, with 1.4 a second, stands at 120."""
EARNS: Final = 64
"""Acceptances that earn the pardon of one rejection: an honest node of which one submission in
1,000 is refused earns sixteen for each that it needs."""
PARDONS: Final = 2.0
"""Pardons that a node may have saved up."""
IN_DEBT: Final = 0.5
"""Debt from which a node stands behind: one rejection, for a minute."""
REJECTIONS: Final = 128
"""Rejections not yet forgiven, of all nodes together, beyond which nodes in debt wait: with the
half-life above 1.5 a second, 64 MB of ledger a day. The demo's cheat hands in 1.4 a second."""
CHEAPEST_TURN: Final = 1 / 8
"""Of what one submission of the first line takes: what a turn in the second costs at least.
What fails a cheap check takes the scorer no time, but an entry of the ledger. With turns that
cost a whole submission each, the cheat of the language-model demo was judged 3 times in 13
minutes, though a group of its eight was enough to find it out."""
ROUND: Final = 4.0
"""Submissions' worth of the scorer's time within which two nodes count as served alike, and the
older policy goes first."""
PARDONED: Final = 10_000
"""Nodes whose pardons are remembered, as many as have a record (`roles.validator.stats`); the
one accepted longest ago goes first."""
REMEMBERED: Final = 1024
"""Nodes whose share of the scorer's time is remembered: one that is forgotten begins again
where its line is (`_clock`), which forgives what it had beyond that. None that waits is
forgotten."""


@dataclass(slots=True, eq=False)
class _Queued(Generic[T]):
    version: PolicyVersion
    number: int
    item: T

    @property
    def rank(self) -> tuple[int, int]:
        return self.version, self.number


class FairQueue(Generic[T]):
    """What waits for the scorer."""

    def __init__(self, has_worked: Callable[[PeerId], bool]) -> None:
        """``has_worked`` says of whom work was accepted."""
        self._has_worked = has_worked
        self._waiting: dict[PeerId, list[_Queued[T]]] = {}
        self._numbers = itertools.count()
        self._debts = FadingCounts(DEBT_HALF_LIFE)
        self._rejections = FadingCounts(DEBT_HALF_LIFE)
        self._pardons: BoundedDict[PeerId, float] = BoundedDict(PARDONED)
        self._served: dict[PeerId, float] = {}
        """Seconds of the scorer that a node has had, counted from the clock of its line."""
        self._clock = {True: 0.0, False: 0.0}
        """By line: what the node had that was served last."""
        self._spent = {True: 0.0, False: 0.0}
        """By line: seconds of the scorer, over the line's share."""
        self._typical = 0.0
        """Seconds that one submission of the first line takes."""
        self._serving: tuple[PeerId, bool] | None = None
        self._overtook = 0.0
        """Submissions of nodes in debt that were accepted while others waited for the trainer,
        less the second line's share of what was accepted in turn since."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_proven(self, node: PeerId, now: float) -> bool:
        """Whether the node stands in the first line."""
        return self._has_worked(node) and not self.is_in_debt(node, now)

    def is_in_debt(self, node: PeerId, now: float) -> bool:
        """Whether work of the node was rejected of late."""
        return self.debt(node, now) >= IN_DEBT

    def debt(self, node: PeerId, now: float) -> float:
        """Rejections of the node that are not forgiven yet."""
        return self._debts.count(node.digest.hex(), now)

    def praise(self, node: PeerId) -> None:
        """Work of the node was accepted."""
        earned = min(self._pardons.get(node, 0.0) + 1 / EARNS, PARDONS)
        self._pardons.renew(node, earned)

    def pardon(self, node: PeerId) -> bool:
        """Whether the node had a pardon, which is used up by this rejection."""
        left = self._pardons.get(node, 0.0)
        if left >= 1.0:
            self._pardons[node] = left - 1.0
        return left >= 1.0

    def blame(self, node: PeerId, now: float, *, by_head: bool = False) -> None:
        """Work of the node was rejected: a debt, unless it is pardoned. ``by_head``: without a
        turn."""
        if not self.pardon(node):
            self._debts.add(node.digest.hex(), now)
        if not by_head:
            self._rejections.add("", now)

    def is_weary(self, now: float) -> bool:
        """Whether so much was rejected of late that nodes in debt wait."""
        return self._rejections.count("", now) >= REJECTIONS

    def has_work(self, now: float) -> bool:
        """Whether `pop` may be called."""
        return len(self._waiting) > 0 and (
            not self.is_weary(now) or not all(self._debtors(now).values())
        )

    def _debtors(self, now: float) -> dict[PeerId, bool]:
        """Whether they are in debt, of the nodes that wait."""
        return {node: self.is_in_debt(node, now) for node in self._waiting}

    def has_room(self, node: PeerId, now: float) -> bool:
        """Whether `push` would take another of the node."""
        return len(self._waiting.get(node, ())) < PER_NODE and (
            not self._is_full(node, now) or self._worst(node, now) is not None
        )

    def push(
        self, node: PeerId, version: PolicyVersion, item: T, now: float
    ) -> tuple[bool, T | None]:
        """Whether ``item`` has a place in the queue, and what must leave it for that."""
        if not self.has_room(node, now):
            return False, None
        gone = None
        if self._is_full(node, now):
            worst = self._worst(node, now)
            assert worst is not None
            gone = self._take(worst, max(self._waiting[worst], key=lambda one: one.rank))
        if node not in self._waiting:
            line = self.is_proven(node, now)
            self._served[node] = max(self._served.get(node, 0.0), self._clock[line])
        self._waiting.setdefault(node, []).append(_Queued(version, next(self._numbers), item))
        return True, gone

    def has_debtor(self, now: float) -> bool:
        """Whether `pop` may be called for nodes in debt."""
        if self._overtook > 0 or self.is_weary(now):
            return False
        return any(self._debtors(now).values())

    def note_accepted(self, *, of_debtors: bool) -> None:
        """What was taken last was accepted, in turn or among nodes in debt alone."""
        due = 1.0 if of_debtors else -STRANGERS_SHARE
        self._overtook = max(0.0, self._overtook + due)

    def pop(self, now: float, *, of_debtors: bool = False) -> T:
        """The next in turn, or in turn among nodes in debt; `charge` must follow.

        `has_work`, or `has_debtor`, has said that there is one.
        """
        lines: dict[bool, list[PeerId]] = {True: [], False: []}
        is_weary = self.is_weary(now)
        for node, is_debtor in self._debtors(now).items():
            if is_debtor if of_debtors else not (is_debtor and is_weary):
                lines[self.is_proven(node, now)].append(node)
        line = self._line(lines)
        nodes = lines[line]
        if not line:
            debts = {node: round(self.debt(node, now)) for node in nodes}
            least = min(debts.values())
            nodes = [node for node in nodes if debts[node] == least]
        floor = min(self._served[node] for node in nodes)
        alike = [node for node in nodes if self._served[node] <= floor + ROUND * self._typical]
        node = min(alike, key=lambda one: min(waiting.rank for waiting in self._waiting[one]))
        self._clock[line] = max(self._clock[line], floor)
        self._serving = node, line
        return self._take(node, min(self._waiting[node], key=lambda one: one.rank))

    def charge(self, seconds: float) -> None:
        """What was taken last has cost the scorer ``seconds``; a turn costs no less than is
        usual, or in the second line `CHEAPEST_TURN` of it."""
        assert self._serving is not None
        node, line = self._serving
        if line:
            self._typical = (
                seconds if not self._typical else 0.9 * self._typical + 0.1 * seconds
            )
        cost = max(seconds, self._typical * (1.0 if line else CHEAPEST_TURN))
        self._served[node] = self._served.pop(node, self._clock[line]) + cost
        self._spent[line] += cost / (1 - STRANGERS_SHARE if line else STRANGERS_SHARE)
        if len(self._served) > REMEMBERED:
            del self._served[next(one for one in self._served if one not in self._waiting)]

    def _line(self, lines: Mapping[bool, list[PeerId]]) -> bool:
        """Which line has its turn; one that is empty saves nothing up."""
        for line in (True, False):
            if not lines[not line]:
                self._spent[not line] = max(self._spent.values())
                return line
        return self._spent[True] <= self._spent[False]

    def _is_full(self, node: PeerId, now: float) -> bool:
        if len(self) >= QUEUE:
            return True
        if len(self) < QUEUE // 2 or self.is_proven(node, now):
            return False
        others = sum(
            len(held) for one, held in self._waiting.items() if not self.is_proven(one, now)
        )
        return others >= QUEUE // 2

    def _standing(self, node: PeerId, count: int, now: float) -> tuple[bool, int, int]:
        """What is compared when one must leave: the greater goes."""
        return not self.is_proven(node, now), round(self.debt(node, now)), count

    def _worst(self, asker: PeerId, now: float) -> PeerId | None:
        """The node that stands worst, if it is worse than ``asker`` with one more."""
        own = self._standing(asker, len(self._waiting.get(asker, ())) + 1, now)
        ranks = {
            node: self._standing(node, len(held), now) for node, held in self._waiting.items()
        }
        worst = max(ranks, key=ranks.__getitem__)
        return worst if worst != asker and ranks[worst] > own else None

    def _take(self, node: PeerId, waiting: _Queued[T]) -> T:
        held = self._waiting[node]
        held.remove(waiting)
        if not held:
            del self._waiting[node]
        return waiting.item
