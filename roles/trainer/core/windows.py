"""What the trainer knows of each window: its lot, what came of its drawn places, how it ended.

Theory of operation
-------------------
A window is *open* from when its witness, or its worker, tells of it. It is *settled* when every
judge that its lot names for a drawn place, and that the trainer sees, has said something, at
least one has accepted each place, and none has rejected any. Only then may its content be
learnt from. A rejection makes it *void*. So does silence: a drawn place that nobody was shown
is the one that its worker did not want to show.

A place counts as *hidden* only if none of its judges has spoken about it though one was there
for `PROMPT` seconds after the lot. So a judge that is away, or keeps quiet about what it was
shown beside one that does not, costs a worker its window, and no standing. The same holds if
the policy went stale sooner, as nobody could have judged the place in time. Nothing of such a
window is learnt from, so none of this slips a lie through.

A settled window *owes* the places that it was said to teach by. Who brings only those that earn
much selects: a window that is forgotten with places owed says so (`Ending.LEFT_OUT`). No I/O:
the caller knows the time, and who is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
"""Seconds in which a worker can be expected to have had its drawn places judged by one that is
there. A window whose policy goes stale sooner blames nobody."""
BLOCKS: Final = 60.0
"""Seconds after its lot from which a window with a hidden place keeps later ones of its worker
from being settled: what it holds back is not to be forgotten over what it shows."""

MAX_WINDOWS: Final = 16_384
"""Windows that are known at a time: 64 MB, of a thousand workers with a dozen each."""
MAX_GUESTS: Final = MAX_WINDOWS // 2
"""Of newcomers, since names are free: the other half is for workers in standing."""
MAX_OF_WORKER: Final = 128
"""Windows of one worker, 2,048 places under the three policies in use: one that is in standing
is to crowd nobody out either."""


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
    """Whether its worker was in standing when it committed, by what the trainer knows: else
    nothing is learnt from it."""
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
    def contents(self) -> Iterator[tuple[int, bytes]]:
        """Each place, and the digest of what it was filled with."""
        window = self.witnessed.window
        return zip(window.places, window.contents, strict=True)

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
    def doubtful(self) -> bool:
        """Whether no judge could decide about a drawn place."""
        decided = {
            place for (place, _), one in self.verdicts.items() if one is Verdict.ACCEPTED
        }
        return any(place not in decided for place in self.drawn)


@dataclass(frozen=True, slots=True)
class Bench:
    """Those who may be judges, and how many of them judge a place."""

    validators: Sequence[PeerId]
    count: int
    passed: Collection[PeerId] = ()
    """Those that the trainer passes over: turns of theirs fall to others."""


class Ending(Enum):
    """What a window that is forgotten says of its worker."""

    NOTHING = "nothing"
    SILENT = "a drawn place was shown to nobody in time"
    LEFT_OUT = "a place that was to be learnt from never came"


class WindowBook:
    """All windows under policies that may still be used."""

    def __init__(self) -> None:
        self._records: dict[bytes, WindowRecord] = {}
        self._by_worker: dict[PeerId, dict[bytes, WindowRecord]] = {}
        self._guests: dict[bytes, WindowRecord] = {}
        self._here_since: dict[PeerId, float] = {}
        """Since when each judge that is there has been there without a break."""

    def __len__(self) -> int:
        return len(self._records)

    def find(self, digest: bytes) -> WindowRecord | None:
        """The record of a window; None if it is not known, or forgotten."""
        return self._records.get(digest)

    def add(self, record: WindowRecord) -> None:
        """Know it from now on."""
        digest = record.witnessed.digest
        self._records[digest] = record
        self._by_worker.setdefault(record.node, {})[digest] = record
        if not record.was_proven:
            self._guests[digest] = record

    def forget(self, record: WindowRecord) -> None:
        """As if nobody had told of it."""
        digest = record.witnessed.digest
        del self._records[digest]
        self._guests.pop(digest, None)
        mine = self._by_worker[record.node]
        del mine[digest]
        if not mine:
            del self._by_worker[record.node]

    def of(self, node: PeerId) -> Collection[WindowRecord]:
        """Those of one worker."""
        return self._by_worker.get(node, {}).values()

    def has_room(self, node: PeerId, *, is_proven: bool) -> bool:
        """Whether one more window may be known. A newcomer's takes the room of the newcomers'
        window that has been open for longest: its worker brings that again, with all verdicts.
        """
        if len(self.of(node)) >= MAX_OF_WORKER:
            return False
        if is_proven:
            return len(self) < MAX_WINDOWS
        if len(self._guests) >= MAX_GUESTS:
            is_open = (one for one in self._guests.values() if one.state is WindowState.OPEN)
            if (oldest := next(is_open, None)) is None:
                return False
            self.forget(oldest)
        return len(self) < MAX_WINDOWS

    def note_here(self, judges: Collection[PeerId], now: float) -> None:
        """These are there now, and no others."""
        self._here_since = {one: self._here_since.get(one, now) for one in judges}

    def fall(self, beacon: HeardLinks, now: float) -> None:
        """Another link is out: lots fall."""
        for record in self._records.values():
            if record.lot is None:
                record.lot = lot_of(record.witnessed.window, beacon)
                record.lot_at = now

    def is_blocked(self, record: WindowRecord, bench: Bench, now: float) -> bool:
        """Whether its worker has kept a drawn place of another window back for too long. One
        that waits for a judge blocks none: all that wait for the same one would block each
        other."""
        return any(
            one is not record
            and one.state is WindowState.OPEN
            and now - one.lot_at > BLOCKS
            and self.is_hidden(one, bench, now)
            for one in self.of(record.node)
        )

    def is_hidden(self, record: WindowRecord, bench: Bench, now: float) -> bool:
        """Whether a drawn place was shown to nobody, though a judge of it was there."""
        shown = {place for place, _ in record.verdicts}
        return any(
            self._was_there(judge, record.lot_at, now)
            for place in record.drawn
            if place not in shown
            for judge in record.judges(place, bench.validators, bench.count, bench.passed)
        ) and not self._is_doubled(record, shown)

    def take_overdue(
        self, newest: PolicyVersion, lag: int, bench: Bench, now: float
    ) -> list[tuple[WindowRecord, Ending]]:
        """Forget windows of which nothing can come any more, and say what that says."""
        gone = []
        for record in self._records.values():
            is_stale = newest - record.version > lag
            is_open = record.state is WindowState.OPEN
            waited = now - (record.since if record.lot is None else record.lot_at)
            if not is_stale and (not is_open or waited <= DUE):
                continue
            ending = Ending.NOTHING
            if is_open and self.is_hidden(record, bench, now):
                ending = Ending.SILENT
            elif record.owed and now - record.settled_at > PROMPT:
                ending = Ending.LEFT_OUT
            gone.append((record, ending))
        for record, _ in gone:
            self.forget(record)
        return gone

    def _was_there(self, judge: PeerId, since: float, now: float) -> bool:
        """Whether it has been there for long enough to be shown something since then."""
        here = self._here_since.get(judge)
        return here is not None and now - max(here, since) > PROMPT

    def _is_doubled(self, record: WindowRecord, shown: Collection[int]) -> bool:
        """Whether what was not ``shown`` of its drawn places stands in other windows that its
        worker has settled, with the same contents: a witness that first refused this one as
        late has signed it none the less."""
        settled = {
            (place, content)
            for one in self.of(record.node)
            if one.state is WindowState.SETTLED and one.version == record.version
            for place, content in one.contents
        }
        drawn = {*record.drawn} - {*shown}
        return all(one in settled for one in record.contents if one[0] in drawn)
