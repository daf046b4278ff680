"""When a missing chunk becomes urgent: this node stops waiting for the forest to push it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.pace import IN_FLIGHT
from p2p.shardcast.core.patience import Patience


@dataclass(frozen=True, slots=True)
class Sighting:
    """When, and at which peer, a missing chunk was seen."""

    when: float
    peer: PeerId


class LateChunks:
    """The missing chunks of one version: seen at others, withheld by a parent, or urgent.

    A chunk that a neighbour has is *seen*: the forest will probably push it soon. It becomes
    urgent when it has been seen for `ChunkPace.patience`, when the peer that was first to have
    it is lost, when a request for it failed, or at once when a parent says that it will not
    push it.

    An origin gives chunks away in order. So when chunk 40 comes along a stripe and 12 is
    missing, 12 was given away before: it is *passed over*, and *overdue* when it stays away for
    longer than such chunks usually do. If no neighbour has it either, the origin is asked: a
    root that keeps what it is given can hide that from all but those who count.
    """

    __slots__ = (
        "_behind",
        "_frontier",
        "_passed",
        "_seen",
        "_stall",
        "_started",
        "_turn",
        "overdue",
        "urgent",
    )

    def __init__(self, now: float, stall: float) -> None:
        self._started, self._stall = now, stall
        self._turn = 0.0
        """Seconds between two chunks that the origin gave away, in the mean."""
        self.overdue = EMPTY
        """Chunks that were passed over so long ago that the origin should hear of it."""
        self._passed: dict[int, float] = {}
        self._behind = Patience(ceiling=4 * stall)
        """How long after later ones the chunks that were passed over come: roots of unequal
        strength bring theirs out of order."""
        self._frontier = 0
        """One beyond the highest chunk that was pushed."""
        self.urgent = EMPTY
        """Chunks to pull now, unless they are asked for already."""
        # In the order of time, since a chunk is entered once and leaves for good.
        self._seen: dict[int, Sighting] = {}

    def note_seen(self, chunk: int, peer: PeerId, now: float) -> None:
        """``peer`` holds a chunk that is missing here."""
        self._seen.setdefault(chunk, Sighting(now, peer))

    def note_withheld(self, chunk: int) -> None:
        """A parent holds a chunk and will not push it: pull it now."""
        self._seen.pop(chunk, None)
        self.note_urgent(chunk)

    def note_pushed(self, chunk: int, missing: ChunkSet, now: float) -> None:
        """A chunk came along a stripe: the missing ones below it were given away before."""
        if chunk >= self._frontier:
            below = ChunkSet.below(chunk) - ChunkSet.below(self._frontier)
            for passed in missing & below:
                self._passed[passed] = now
            self._frontier = chunk + 1
            self._turn = (now - self._started) / self._frontier

    def note_urgent(self, chunk: int) -> None:
        """Pull this chunk now."""
        self.urgent = self.urgent.including(chunk)

    def note_arrival(self, chunk: int, now: float) -> Sighting | None:
        """A chunk is here; returns where it was first seen."""
        passed = self._passed.pop(chunk, None)
        if passed is not None:
            self._behind.observe(now - passed)
        self.overdue = self.overdue.excluding(chunk)
        self.urgent = self.urgent.excluding(chunk)
        return self._seen.pop(chunk, None)

    def lose(self, peer: PeerId, requested: ChunkSet) -> None:
        """What ``peer`` was first to have is urgent, unless it is asked of another."""
        for chunk, seen in self._seen.items():
            if seen.peer == peer and chunk not in requested:
                self.note_urgent(chunk)

    def mark_late(self, now: float, patience: float) -> None:
        """Make urgent what was seen ``patience`` ago."""
        while self._seen:
            chunk, seen = next(iter(self._seen.items()))
            if seen.when + patience > now:
                break
            del self._seen[chunk]
            self.note_urgent(chunk)
        for chunk in self._take_overdue(now):
            self.overdue = self.overdue.including(chunk)

    def _take_overdue(self, now: float) -> list[int]:
        wait = self._overdue_after
        overdue = list(takewhile(lambda chunk: self._passed[chunk] + wait <= now, self._passed))
        for chunk in overdue:
            del self._passed[chunk]
        return overdue

    @property
    def _overdue_after(self) -> float:
        return self._behind.wait(max(self._stall, 3 * IN_FLIGHT * self._turn))

    def due(self, patience: float) -> float:
        """When `mark_late` next has something to do; infinite if it waits for nothing."""
        due = math.inf
        if self._seen:
            due = next(iter(self._seen.values())).when + patience
        if self._passed:
            passed = next(iter(self._passed.values()))
            due = min(due, passed + self._overdue_after)
        return due
