"""Who is checked how much, and whose work may be learnt from unseen.

Theory of operation
-------------------
An identity costs a key, so what is known of one counts only for what it cost. An identity
*earns* a place with each one that stood: the lot could have fallen on it, and no lie was found.
With ``probation`` of them it is *proven*. Before, all of its places are checked, and nothing of
it is learnt from, not even what was accepted: otherwise many names could be tried and only the
best one's first work handed in. Ask `is_proven` when a window is committed, and again when its
last verdict is in; what was not proven both times is not learnt from.

A rejection, and a drawn place that does not come, end standing at once. So does a second window
left out among `MISSES_APART`: who computes a window, looks at what it earns and does not commit
it, selects. Windows are numbered by time (by their policy, which all windows under it share),
and each names in advance the number of the next that will come, so a slow worker leaves nothing
out and nobody chooses afterwards (`roles.trainer.core.promises`). A gap counts once, however
long: machines are switched off.

A *doubt* (a place on which no validator could decide, a window left out) has everything checked
until a window's worth of places has stood.

What was earned halves with each `HALF_LIFE` of silence. An identity stays proven down to half
of ``probation``, so that one which was just proven is not lost by a short pause.

Only what stood makes a record, so strangers fill no table with refused work. Newcomers and
proven ones have a table each. Where that of newcomers is full, the one that handed in nothing
for the longest goes; where that of proven ones is, the one that earned least, and only for one
that earned more: so one that pauses gives way, and one that works never does. No I/O; ``now``
is wall time, since records are kept over restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.wire import fields_untrusted
from roles.run.core.trust import TrustTerms

__all__ = ["Standings", "TrustTerms"]

MAX_PROVEN: Final = 16_384
"""Identities in standing that are remembered: 100 bytes each, and more workers than any run
has. One more needs to have earned more than the least of them."""
MAX_NEWCOMERS: Final = 4_096
"""Identities in probation. Each cost its owner a place of work, and us its check: an attacker
that fills the table has paid for a hundred identities in standing."""
HALF_LIFE: Final = 12 * 3600.0
"""Seconds of silence in which half of what was earned is forgotten: what a name has proved is
about a machine and its owner, and names are sold. A night off costs no standing, a weekend
does."""
MOST_EARNED: Final = 2
"""What counts at most, in probations: so that a year's work is forgotten in days as well."""
MISSES_APART: Final = 32
"""Windows between two that may be left out. Who leaves out the worst of 32 windows of 16
places raises the mean reward of its work by 0.7 % (docs/trust.md)."""


FEWER: Final = 16
"""One in so many places may be missing under a policy, of those under the one before: a machine
gets slower by and by. One always may."""


def usual_places(before: int, lasted: float, lasts: float) -> int:
    """How many a worker fills under a policy that ``lasts`` so many seconds, by what it did
    ``before``, under one that ``lasted`` so many. No more than that: a trainer may rest."""
    return int(before * min(1.0, lasts / lasted)) if lasted > 0 else 0


def least_places(usual: int) -> int:
    """How many it has to fill where so many are usual."""
    return max(1, usual - max(1, usual // FEWER))


@dataclass(slots=True)
class _Record:
    """What is known of one identity."""

    earned: float = 0.0
    """Places that stood, as of `seen`."""
    seen: float = 0.0
    """When it last did something."""
    doubt: int = 0
    """Places that have to stand before fewer than all are checked again."""
    last: int = -1
    """Its newest window; -1 before the first."""
    due: int = -1
    """The window that it said would be next; -1 where none is."""
    since_miss: int = MISSES_APART
    """Windows that came since it left one out; the first that it leaves out costs little."""

    def earned_at(self, now: float) -> float:
        """What is left of it after the silence until ``now``."""
        return float(self.earned * 0.5 ** (max(now - self.seen, 0.0) / HALF_LIFE))


class Standings:
    """The standing of every worker of a run."""

    def __init__(self, terms: TrustTerms, *, most: int = MAX_PROVEN) -> None:
        """``most`` identities are proven at a time."""
        self._terms = terms
        self._most = most
        self._proven: dict[PeerId, _Record] = {}
        self._newcomers: BoundedDict[PeerId, _Record] = BoundedDict(MAX_NEWCOMERS)

    def is_proven(self, identity: PeerId, now: float) -> bool:
        """Whether work of this identity that nobody checked may be learnt from."""
        record = self._proven.get(identity)
        return record is not None and self._is_enough(record.earned_at(now))

    def share_of(self, identity: PeerId, now: float) -> float:
        """With which chance a place of it is to be checked."""
        if not self.is_proven(identity, now) or self._proven[identity].doubt:
            return 1.0
        return self._terms.share

    def earned(self, identity: PeerId, now: float) -> float:
        """The places that stood, as far as they count now; for people."""
        record = self._find(identity)
        return record.earned_at(now) if record else 0.0

    def note_accepted(self, identity: PeerId, places: int, now: float) -> None:
        """So many places of a settled window stood: none that was drawn was found wanting."""
        if places <= 0:
            return
        record = self._touch(identity, now) or _Record(seen=now)
        record.earned = min(record.earned + places, MOST_EARNED * self._terms.probation)
        record.doubt = max(record.doubt - places, 0)
        if identity in self._proven:
            return
        if record.earned >= self._terms.probation and self._make_room(record, now):
            self._newcomers.pop(identity, None)
            self._proven[identity] = record
        else:
            self._newcomers.renew(identity, record)

    def note_rejected(self, identity: PeerId) -> None:
        """A lie was found, or a drawn place did not come: it is a newcomer again. Whether it is
        banned is not decided here."""
        self._proven.pop(identity, None)
        self._newcomers.pop(identity, None)

    def note_doubt(self, identity: PeerId) -> None:
        """None of a place's validators could tell whether it is honest."""
        record = self._find(identity)
        if record is not None:
            record.doubt = self._terms.window

    def note_window(
        self, identity: PeerId, number: int, now: float, due: int | None = None
    ) -> bool:
        """A window was committed; ``due`` is the number of the next, by its word (left out: the
        one that follows).

        Returns whether it counts: not if a newer one came before. A window other than the one
        that was due says that this one was left out.
        """
        record = self._touch(identity, now)
        if record is None:
            return True
        if number <= record.last:
            return False
        if record.due not in (-1, number):
            self.note_missed(identity, record.due)
        record.last, record.due = number, max(number + 1, due or 0)
        record.since_miss += 1
        return True

    def note_missed(self, identity: PeerId, number: int) -> None:
        """The window that was due did not come: doubt, or the end of its standing. Told twice,
        it counts once."""
        record = self._find(identity)
        if record is None or record.due != number:
            return
        if record.since_miss < MISSES_APART:
            self.note_rejected(identity)
        record.since_miss, record.due = 0, -1
        self.note_doubt(identity)

    def __contains__(self, identity: PeerId) -> bool:
        """Whether anything is known of it."""
        return self._find(identity) is not None

    def promise(self, identity: PeerId) -> tuple[int, int]:
        """Its newest window, and the one that it said would be next; -1 where none is."""
        record = self._find(identity)
        return (-1, -1) if record is None else (record.last, record.due)

    def overdue(self, number: int) -> list[tuple[PeerId, int]]:
        """Whose window with this number, or an earlier one, was due and has not come, and
        which."""
        return [
            (name, one.due)
            for table in (self._proven, self._newcomers)
            for name, one in table.items()
            if 0 <= one.due <= number
        ]

    def forgive(self, identity: PeerId) -> None:
        """The window that was due need not come."""
        record = self._find(identity)
        if record is not None:
            record.due = -1

    def to_list(self) -> list[list[object]]:
        """All records, of types that JSON has; `restore` reads them."""
        return [
            [str(name), table is self._proven, *(getattr(one, key) for key in one.__slots__)]
            for table in (self._proven, self._newcomers)
            for name, one in table.items()
        ]

    def restore(self, rows: object) -> None:
        """Take up what `to_list` gave an earlier life. Raises `BadMessage`."""
        if not isinstance(rows, list):
            raise BadMessage("standings are a list")
        number = (int, float)
        for row in rows:
            name, proven, *values = fields_untrusted(
                row, str, bool, number, number, int, int, int, int, what="standing"
            )
            try:
                identity = PeerId.from_base58(name)
            except ValueError as error:
                raise BadMessage(str(error)) from None
            if not all(math.isfinite(value) for value in values):
                raise BadMessage("a number of a standing is none")
            (self._proven if proven else self._newcomers)[identity] = _Record(*values)

    def _find(self, identity: PeerId) -> _Record | None:
        return self._proven.get(identity) or self._newcomers.get(identity)

    def _is_enough(self, earned: float) -> bool:
        return 2 * earned >= self._terms.probation

    def _touch(self, identity: PeerId, now: float) -> _Record | None:
        """The record, once the silence before ``now`` has taken its part of it."""
        record = self._find(identity)
        if record is not None:
            record.earned, record.seen = record.earned_at(now), max(now, record.seen)
            if identity in self._proven and not self._is_enough(record.earned):
                self._newcomers.renew(identity, self._proven.pop(identity))
        return record

    def _make_room(self, record: _Record, now: float) -> bool:
        """Whether one more may be proven; one that earned less makes room."""
        if len(self._proven) < self._most:
            return True
        least = min(self._proven, key=lambda one: self._proven[one].earned_at(now))
        if self._proven[least].earned_at(now) >= record.earned:
            return False
        del self._proven[least]
        return True
