"""Who works under which policies, by what it promised, so that none is chosen by what it earns.

Theory of operation
-------------------
Whoever may look at what it drew, and hand it in or not, hands in what earns much. So windows
are numbered by time: a window's number is its policy's, and policies come when the trainer
publishes them. Each window names in advance the number of the policy under which its worker
works next (`Window.due`). That counts only if the window names a link that was out before the
very next policy was: nobody can draw under weights that there are not. A worker too slow for
that goes on in its stride: it skips as many as the last time. It works on meanwhile under the
policy that it has, and leaves nothing out. The first promise, and one after a miss, is free.

Under the policy that is due it fills at least as many places in the time as under the one
before, less an eighth, if so many are asked for (`roles.protocol.core.demand`): else it could
end its work under a policy where its rewards are at their best. The time is that from one of
its policies to the next. It need not be over by then: a policy may be worked under until `lag`
others have followed.

A policy is *closed* `LATE` seconds after it has gone stale. Then each window and each miss is
told to `Standings`, in the order of the numbers, whatever order they came in. A miss is excused
if the worker had no witness, or if the policy was published before this life of the trainer,
which may have lost windows. A window that the trainer has no room for counts as well. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from roles.protocol.core.lots import Window
from roles.protocol.core.standing import MAX_PROVEN, Standings, least_places, usual_places

LATE: Final = 60.0
"""Seconds after a policy went stale in which its windows may still be told of: a witness is
asked to wait, or started again, meanwhile."""

Link = tuple[int, int]
"""Chain and number of a link: the later one is greater."""


@dataclass(slots=True)
class _Came:
    """What a worker has committed to under one policy."""

    filled: int = 0
    """Places, from the first on."""
    said: int = 0
    """The policy that it named for its next work, and whether it did so in time."""
    is_in_time: bool = False
    by: int = 0
    """The first place of the window that said so: the earliest counts."""

    def due(self, number: int, last: int, promised: int) -> int:
        """What holds after a window with this ``number``, which came after ``last``, if
        ``promised`` was due."""
        stride = number - last if promised == number else 0
        return self.said if self.is_in_time or not stride else number + stride


@dataclass(slots=True)
class _Round:
    """One policy."""

    out: Link | None
    """The newest link when it was published; None if that was in an earlier life."""
    at: float = 0.0
    """When that was."""
    came: BoundedDict[PeerId, _Came] = field(default_factory=lambda: BoundedDict(MAX_PROVEN))
    excused: BoundedDict[PeerId, None] = field(default_factory=lambda: BoundedDict(MAX_PROVEN))
    stale_at: float | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """A policy under which a worker handed in less than it had promised."""

    node: PeerId
    version: PolicyVersion
    has_ended: bool
    """Whether that was its standing's end."""


class WorkPromises:
    """The policies in use, and who works under them."""

    def __init__(self, standings: Standings, lag: int) -> None:
        self._standings = standings
        self._lag = lag
        self._rounds: dict[PolicyVersion, _Round] = {}
        self._before: BoundedDict[PeerId, tuple[int, float]] = BoundedDict(MAX_PROVEN)
        """Places that each worker filled under the last policy that it was to work under, and
        how many seconds that lasted, if known."""
        self._newest: PolicyVersion | None = None
        self._began = NO_POLICY
        """The newest policy when this life began."""
        self._closed = NO_POLICY

    def publish(self, newest: PolicyVersion, link: Link, now: float) -> None:
        """The ``newest`` policy is out, and ``link`` is the newest that is."""
        if self._newest is None:
            self._newest = self._began = newest
        for number in range(self._newest + 1, newest + 1):
            self._rounds[PolicyVersion(number)] = _Round(link, now)
        self._newest = newest
        for version, one in self._rounds.items():
            if newest - version > self._lag and one.stale_at is None:
                one.stale_at = now

    def note(self, window: Window) -> None:
        """A window was committed to in time, by its witness's word."""
        node, version = window.node, window.version
        if node not in self._standings or version <= self._closed:
            return
        one = self._rounds.get(version)
        if one is None:
            one = self._rounds[version] = _Round(None)
        came = one.came.get(node)
        if came is None:
            came = one.came[node] = _Came(by=window.places.stop)
        came.filled = max(came.filled, window.places.stop)
        if window.first < came.by:
            after = self._rounds.get(PolicyVersion(version + 1))
            out = None if after is None else after.out
            came.is_in_time = out is None or (window.chain, window.link) < out
            came.said, came.by = window.due, window.first

    def is_promised(self, node: PeerId, version: PolicyVersion) -> bool:
        """Whether its worker may be learnt from under this policy: not if it has named a later
        one for its next work."""
        last, due = self._standings.promise(node)
        for number, one in sorted(self._rounds.items()):
            came = one.came.get(node)
            if number < version and came is not None and due <= number:
                last, due = number, came.due(number, last, due)
        return due <= version

    def close(
        self,
        wall: float,
        now: float,
        has_witness: Callable[[PeerId, PolicyVersion], bool],
        is_asked: Callable[[PeerId, PolicyVersion, int], bool],
    ) -> list[Miss]:
        """Tell the standings of each policy that is over; returns who left something out.
        ``is_asked``: whether a worker was to fill this place."""
        misses = []
        for version in sorted(self._rounds):
            one = self._rounds[version]
            if one.stale_at is None or now < one.stale_at + LATE:
                break  # later ones are not over either
            misses += self._misses(version, one, wall, has_witness, is_asked)
            for node, came in one.came.items():
                last, due = self._standings.promise(node)
                if due <= version:
                    due = came.due(version, last, due)
                    self._before.renew(node, (came.filled, self._lasts(version, due)))
                    self._standings.note_window(node, version, wall, due)
            del self._rounds[version]
            self._closed = version
        return misses

    def _lasts(self, version: PolicyVersion, due: int) -> float:
        """Seconds from a policy to the one that its worker took up next; 0 if not known."""
        began, after = self._rounds[version], self._rounds.get(PolicyVersion(due))
        after = after or self._rounds.get(PolicyVersion(version + 1))
        is_known = began.out is not None and after is not None and after.out is not None
        return after.at - began.at if is_known else 0.0

    def _misses(
        self,
        version: PolicyVersion,
        one: _Round,
        wall: float,
        has_witness: Callable[[PeerId, PolicyVersion], bool],
        is_asked: Callable[[PeerId, PolicyVersion, int], bool],
    ) -> list[Miss]:
        is_lost = version <= self._began
        misses = []
        for node, due in self._standings.overdue(version):
            came = one.came.get(node) or _Came()
            filled = came.filled
            last, _ = self._standings.promise(node)
            lasts = self._lasts(version, came.due(version, last, due))
            least = least_places(usual_places(*self._before.get(node, (0, 0.0)), lasts))
            if due == version and filled >= least:
                continue
            if due < version or is_lost:
                self._standings.forgive(node)
            elif not is_asked(node, version, filled):
                if not filled:
                    self._standings.forgive(node)
            elif has_witness(node, version):
                had = self._standings.is_proven(node, wall)
                self._standings.note_missed(node, due)
                has_ended = had and not self._standings.is_proven(node, wall)
                misses.append(Miss(node, version, has_ended))
            else:
                self._standings.forgive(node)
        return misses
