"""Presence of members: who is heard, leaves or wants to join, by the reports of most members.

Theory of operation
-------------------
A member that beats to some and not to others would have each plan refused by somebody: those
that hear it want it in, the others want it out, and each such plan costs a view. So every
`Beat` says whom its author hears, and a member counts what it and all that it hears itself say.
Members that hear each other count the same reports, and so come to the same answer, whatever
the one in question does.

Reports are unsigned, and a liar may report one thing here and another there. What it says of
itself does not count, so one liar divides nobody. Several that report of each other may cost
views, but no more: who is heard by half of the reports, and by a member itself, is not left out
with that member's consent, and nobody is taken in, or taken to leave, on less than half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2p.identity import PeerId


@dataclass(frozen=True, slots=True)
class Report:
    """One member's statement about the others: which it hears, which leave, which want to
    join.
    """

    of: Sequence[PeerId]
    """The members that it speaks of."""
    heard: frozenset[PeerId]
    leaving: frozenset[PeerId]
    joiners: frozenset[PeerId] | None
    """Peers that hold the newest state and want to join; None if it speaks of another step."""


@dataclass(slots=True)
class Tally:
    """Counts of reports."""

    asked: Counter[PeerId] = field(default_factory=Counter)
    """Maps each member to the number of reports about it."""
    heard: Counter[PeerId] = field(default_factory=Counter)
    leaving: Counter[PeerId] = field(default_factory=Counter)
    on_joiners: int = 0
    """Number of reports that name joiners."""
    joiners: Counter[PeerId] = field(default_factory=Counter)

    @classmethod
    def of(cls, reports: Iterable[tuple[PeerId, Report]]) -> Tally:
        """Count reports by author, without what authors report of themselves."""
        made = cls()
        for author, report in reports:
            others = [peer for peer in report.of if peer != author]
            made.asked.update(others)
            made.heard.update(peer for peer in others if peer in report.heard)
            made.leaving.update(peer for peer in others if peer in report.leaving)
            if report.joiners is not None:
                made.on_joiners += 1
                made.joiners.update(report.joiners)
        return made

    def is_heard(self, peer: PeerId) -> bool:
        """Return True if at least half of the reports about ``peer`` say that it is heard."""
        return 2 * self.heard[peer] >= self.asked[peer] > 0

    def leaves(self, peer: PeerId) -> bool:
        """Return True if more than half of the reports say that ``peer`` wants to leave."""
        return 2 * self.leaving[peer] > self.asked[peer]

    def wants_to_join(self, peer: PeerId) -> bool:
        """Return True if more than half of the reports say that ``peer`` wants to join."""
        return 2 * self.joiners[peer] > self.on_joiners
