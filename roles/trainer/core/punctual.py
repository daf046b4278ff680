"""Which validators leave work lying, by what they bring and by who waits for them.

The law: a lot that a validator does not honour goes to another one, and no stranger can take a
validator's lots away by complaining. So complaints count only of workers whose work has been
accepted before, a worker's count once however many it makes, and they are held against the
workers whose work the validator did bring meanwhile: one that serves half as many as wait for
it is here. What is decided lasts for a while and ends by itself; each time that the same
validator is found away again it lasts twice as long. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

LOOKS_BACK: Final = 300.0
"""Seconds after which a delivery, or a complaint, is forgotten: two submissions of a slow
worker."""
ENOUGH: Final = 2
"""Workers that must wait for a validator before it is passed over, where there are so many: one
may have a bad line."""
PER_SERVED: Final = 2
"""So many times as many workers must wait for it as it has served."""
AWAY_SECONDS: Final = 600.0
"""How long it is passed over for the first time."""
LONGEST: Final = 3_600.0
"""And at most: an hour after it has come back it has lots again."""
MAX_WORKERS: Final = 1_024
"""Workers remembered of each validator, those who were served and those who wait."""


@dataclass(slots=True)
class _Record:
    """What is known of one validator."""

    served: BoundedDict[PeerId, float] = field(default_factory=lambda: BoundedDict(MAX_WORKERS))
    """Whose work it has brought, and when last."""
    waiting: BoundedDict[PeerId, float] = field(
        default_factory=lambda: BoundedDict(MAX_WORKERS)
    )
    """Who has complained of it, and when last."""
    until: float = 0.0
    """It is passed over until then."""
    found: int = 0
    """How often it was."""

    def forget_before(self, then: float) -> None:
        """Both of what is older."""
        self.served.keep(lambda at: at >= then)
        self.waiting.keep(lambda at: at >= then)


class Punctuality:
    """The validators of a run, as its trainer sees them."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def note_served(self, validator: PeerId, worker: PeerId, now: float) -> None:
        """It has brought work of ``worker`` that a step can use."""
        self._of(validator).served.renew(worker, now)

    def note_complaint(self, validator: PeerId, worker: PeerId, now: float) -> None:
        """A worker, whose word counts, waits for it or was turned away without proof."""
        self._of(validator).waiting.renew(worker, now)

    def look(self, validators: Collection[PeerId], now: float) -> dict[PeerId, str]:
        """Who is passed over now, of the ``validators`` of the newest edition, and why."""
        for gone in [one for one in self._records if one not in validators]:
            del self._records[gone]
        for record in self._records.values():
            record.forget_before(now - LOOKS_BACK)
        workers = {one for record in self._records.values() for one in record.served}
        workers |= {one for record in self._records.values() for one in record.waiting}
        for record in self._records.values():
            if now >= record.until and self._is_away(record, min(ENOUGH, len(workers))):
                record.until = now + min(AWAY_SECONDS * 2**record.found, LONGEST)
                record.found += 1
                record.waiting.clear()
        return {
            one: f"workers waited for it in vain, {record.found} times"
            for one, record in self._records.items()
            if now < record.until
        }

    def _is_away(self, record: _Record, enough: int) -> bool:
        waiting = len(record.waiting)
        return waiting >= max(1, enough) and waiting > PER_SERVED * len(record.served)

    def _of(self, validator: PeerId) -> _Record:
        return self._records.setdefault(validator, _Record())
