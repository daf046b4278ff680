"""Bans of other officers that wait to be repeated: whose turn it is, and when.

Theory of operation
-------------------
Two laws. Silence is no refutation: of a source that is away, or too busy, the case comes up
again later, twice as late each time, for as long as the ban lasts. And no author takes more
than its turn: authors go round, and one whose evidence did not come, or did not bear its ban
out, is passed over for a while. No I/O: the caller knows the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from roles.protocol.core.bans import Ban

MAX_CASES: Final = 256
"""Of one author: as many bans of it as are kept (`p2p.ledger.core.shelf.MAX_LASTING`)."""
FIRST_PAUSE: Final = 30.0
"""Seconds until evidence that did not come is asked for again; doubles."""
LONGEST_PAUSE: Final = 3600.0
MISSED: Final = 20.0
"""Seconds for which an author is passed over whose evidence did not come: as long as it made a
task wait, so that others have half of all the time at least."""
REFUTED: Final = 600.0
"""And one that banned without reason: it has cost a replay."""


@dataclass(slots=True)
class Case:
    """One ban, and what became of it so far."""

    author: PeerId
    ban: Ban
    tries: int = 0
    due: float = -math.inf


class Docket:
    """All cases of one validator."""

    def __init__(self) -> None:
        self._cases: dict[PeerId, dict[PeerId, Case]] = {}
        """By author, the one whose turn it is first, and culprit."""
        self._passed: dict[PeerId, float] = {}
        """Until when an author is passed over."""

    def __len__(self) -> int:
        return sum(map(len, self._cases.values()))

    def add(self, author: PeerId, ban: Ban) -> None:
        """A ban was heard. Of two by one author against one worker the newer counts."""
        cases = self._cases.setdefault(author, {})
        if ban.culprit in cases or len(cases) < MAX_CASES:
            cases[ban.culprit] = Case(author, ban)

    def take(self, now: float) -> Case | None:
        """The next case that is due."""
        for author, cases in self._cases.items():
            if now < self._passed.get(author, -math.inf):
                continue
            due = [one for one in cases.values() if one.due <= now]
            if due:
                self._cases[author] = self._cases.pop(author)  # others come first now
                return cases.pop(due[0].ban.culprit)
        return None

    def next_due(self) -> float:
        """When there may be one; infinity without any."""
        return min(
            (
                max(one.due, self._passed.get(author, -math.inf))
                for author, cases in self._cases.items()
                for one in cases.values()
            ),
            default=math.inf,
        )

    def put_back(self, case: Case, now: float, wall: float) -> None:
        """Its evidence did not come."""
        self._passed[case.author] = now + MISSED
        case.due = now + min(FIRST_PAUSE * 2.0**case.tries, LONGEST_PAUSE)
        case.tries += 1
        if case.ban.until > wall:
            self._cases.setdefault(case.author, {}).setdefault(case.ban.culprit, case)

    def doubt(self, author: PeerId, now: float) -> None:
        """A replay finds that a ban of ``author`` is not borne out."""
        self._passed[author] = now + REFUTED
