"""What the trainer knows of each window: its lot, what came of its drawn places, how it ended.

Theory of operation
-------------------
A window is *open* from when its witness, or its worker, tells of it. It is *settled* when every
judge that its lot names for a drawn place, and that the trainer sees, has said something, at
least one has accepted each place, and none has rejected any. Only then may its content be
learnt from. A rejection makes it *void*. So does silence: a drawn place that nobody was shown
is the one that its worker did not want to show.

Silence has an excuse: if the policy went stale within `PROMPT` seconds after the lot fell,
nobody could have judged the place in time. Nothing of such a window is learnt from, so it is no
way to slip a lie through, and it comes too seldom to be a way to escape a lot.

A settled window *owes* the places that it was said to teach by. Who brings only those that earn
much selects: a window that is forgotten with places owed says so (`Ending.LEFT_OUT`). No I/O:
the caller knows the time, and who is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.protocol.core.beacon import HeardLinks
from roles.protocol.core.lots import Lot, WitnessedWindow, judges_now, lot_of

DUE: Final = 600.0
"""Seconds after its lot in which a window must be settled: a worker that is started again, or a
judge, takes some of them. Nothing of it is learnt from before."""
PROMPT: Final = 30.0
"""Seconds in which a worker can be expected to have had its drawn places judged. A window whose
policy goes stale sooner blames nobody."""
BLOCKS: Final = 60.0
"""Seconds after its lot from which an open window keeps later ones of its worker from being
settled: what it holds back is not to be forgotten over what it shows."""


class WindowState(Enum):
    """How far a window is."""

    OPEN = "open"
    SETTLED = "settled"
    VOID = "void"


@dataclass(slots=True)
class WindowRecord:
    """One window."""

    witnessed: WitnessedWindow
    was_proven: bool
    """Whether its worker was in standing when it committed: else nothing is learnt from it."""
    since: float
    state: WindowState = WindowState.OPEN
    lot: Lot | None = None
    lot_at: float = 0.0
    verdicts: dict[tuple[int, PeerId], Verdict] = field(default_factory=dict)
    settled_at: float = 0.0
    owed: dict[int, None] = field(default_factory=dict)
    """Places that are to be learnt from and were not offered yet."""

    @property
    def node(self) -> PeerId:
        """Its worker."""
        return self.witnessed.window.node

    @property
    def version(self) -> PolicyVersion:
        """Its policy's."""
        return self.witnessed.window.version

    @property
    def drawn(self) -> list[int]:
        """The places that are checked; none before the lot is out."""
        return [] if self.lot is None else self.lot.drawn(self.witnessed.share)

    def judges(
        self,
        place: int,
        validators: Sequence[PeerId],
        count: int,
        passed: Collection[PeerId] = (),
    ) -> list[PeerId]:
        """Who checks a drawn place while some are ``passed`` over; nobody before the lot is
        out."""
        if self.lot is None:
            return []
        return judges_now(self.lot, place, validators, count, passed)

    def why_unsettled(
        self,
        validators: Sequence[PeerId],
        count: int,
        away: Collection[PeerId],
        passed: Collection[PeerId] = (),
    ) -> str:
        """What is missing, in a sentence; empty if nothing is. Judges that are ``away`` are not
        waited for, but one must have spoken."""
        if self.lot is None:
            return "its lot has not fallen"
        for place in self.drawn:
            said = {
                judge: self.verdicts.get((place, judge))
                for judge in self.judges(place, validators, count, passed)
            }
            silent = [judge for judge, verdict in said.items() if verdict is None]
            if len(silent) == len(said) or any(judge not in away for judge in silent):
                return f"no verdict of {silent[0]} on place {place}"
        return ""

    @property
    def is_hidden(self) -> bool:
        """Whether a drawn place was shown to nobody, as far as is known. One that a judge left
        unanswered was shown to the other."""
        shown = {place for place, _ in self.verdicts}
        return any(place not in shown for place in self.drawn)

    @property
    def doubtful(self) -> bool:
        """Whether no judge could decide about a drawn place."""
        decided = {
            place for (place, _), one in self.verdicts.items() if one is Verdict.ACCEPTED
        }
        return any(place not in decided for place in self.drawn)


class Ending(Enum):
    """What a window that is forgotten says of its worker."""

    NOTHING = "nothing"
    SILENT = "a drawn place was shown to nobody in time"
    LEFT_OUT = "a place that was to be learnt from never came"


class WindowBook:
    """All windows under policies that may still be used."""

    def __init__(self) -> None:
        self._records: dict[bytes, WindowRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def find(self, digest: bytes) -> WindowRecord | None:
        """The record of a window; None if it is not known, or forgotten."""
        return self._records.get(digest)

    def add(self, record: WindowRecord) -> None:
        """Know it from now on."""
        self._records[record.witnessed.digest] = record

    def fall(self, beacon: HeardLinks, now: float) -> None:
        """Another link is out: lots fall."""
        for record in self._records.values():
            if record.lot is None:
                record.lot = lot_of(record.witnessed.window, beacon)
                record.lot_at = now

    def is_blocked(self, record: WindowRecord, now: float) -> bool:
        """Whether its worker has kept a drawn place of another window back for too long. One
        that waits for a judge blocks none: all that wait for the same one would block each
        other."""
        return any(
            one.node == record.node
            and one is not record
            and one.state is WindowState.OPEN
            and one.lot is not None
            and now - one.lot_at > BLOCKS
            and one.is_hidden
            for one in self._records.values()
        )

    def take_overdue(
        self, newest: PolicyVersion, lag: int, now: float
    ) -> list[tuple[WindowRecord, Ending]]:
        """Forget windows of which nothing can come any more, and say what that says."""
        gone = []
        for digest, record in self._records.items():
            is_stale = newest - record.version > lag
            is_open = record.state is WindowState.OPEN
            waited = now - (record.since if record.lot is None else record.lot_at)
            if not is_stale and (not is_open or waited <= DUE):
                continue
            ending = Ending.NOTHING
            is_late = waited > PROMPT and not self._is_doubled(record)
            if is_open and is_late and record.is_hidden:
                ending = Ending.SILENT
            elif record.owed and now - record.settled_at > PROMPT:
                ending = Ending.LEFT_OUT
            gone.append((digest, record, ending))
        for digest, _, _ in gone:
            del self._records[digest]
        return [(record, ending) for _, record, ending in gone]

    def _is_doubled(self, record: WindowRecord) -> bool:
        """Whether its worker has settled another window with the same places: a witness that
        first refused this one as late has signed it none the less."""
        mine = record.witnessed.window
        return any(
            one.state is WindowState.SETTLED
            and (one.node, one.version) == (record.node, record.version)
            and bool({*mine.places} & {*one.witnessed.window.places})
            for one in self._records.values()
        )
