"""When a missing chunk becomes urgent: this node stops waiting for the forest to push it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.average import SmoothedAverage

_BEHIND: Final = 4
"""Times the usual delay of chunks that were passed over after which one is overdue. Roots of
unequal strength bring their chunks out of order by a constant time. Example: the chunks of a
weak root come 0.4 s after later ones of strong roots; one that has not come after 1.6 s is
asked for."""
_MOST: Final = 2
"""Times the shortest wait for a chunk that was passed over which is the longest. What the
origin gives a second time comes late by seconds, and must not teach patience with roots that
keep what they are given."""
_TURNS: Final = 48
"""Chunks that the origin gives away, in the mean, after which one that was passed over is
overdue: eight roots may have two unconfirmed and four waiting for each child. With 16 the first
second of a hand-out over eight even links, when all its streams start together, made peers ask
the origin for chunks that were on their way, and cost honest roots their place. The origin's
pace counts, not that of what comes here: where all roots keep what they are given, next to
nothing comes, and a node that took this for a slow line would wait for ever."""


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

    A parent that will not push a chunk does hold it, but has mostly more to send than its line
    carries; so it counts as a source again only after the same patience. Example: a parent on a
    10 Mbit/s line withholds chunk 7 from two of its five children. Both pull it from a
    neighbour at once; if no neighbour has it within 0.8 s, both ask the parent.
    """

    __slots__ = (
        "_behind",
        "_frontier",
        "_passed",
        "_seen",
        "_stall",
        "_started",
        "_turn",
        "_withheld",
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
        self._frontier = 0
        """One beyond the highest chunk that was pushed."""
        self._behind = SmoothedAverage()
        """Seconds after which a chunk that was passed over usually comes."""
        self.urgent = EMPTY
        """Chunks to pull now, unless they are asked for already."""
        # Both in the order of time, since a chunk is entered once and leaves for good.
        self._seen: dict[int, Sighting] = {}
        self._withheld: dict[int, Sighting] = {}

    def note_seen(self, chunk: int, peer: PeerId, now: float) -> None:
        """``peer`` holds a chunk that is missing here."""
        self._seen.setdefault(chunk, Sighting(now, peer))

    def note_withheld(self, chunk: int, parent: PeerId, now: float) -> None:
        """``parent`` holds a chunk and will not push it: pull it, for now from others."""
        self._seen.pop(chunk, None)
        self.note_urgent(chunk)
        self._withheld.setdefault(chunk, Sighting(now, parent))

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
        self._withheld.pop(chunk, None)
        return self._seen.pop(chunk, None)

    def lose(self, peer: PeerId, requested: ChunkSet) -> None:
        """What ``peer`` was first to have is urgent, unless it is asked of another."""
        self._withheld = {
            c: withheld for c, withheld in self._withheld.items() if withheld.peer != peer
        }
        for chunk, seen in self._seen.items():
            if seen.peer == peer and chunk not in requested:
                self.note_urgent(chunk)

    def mark_late(self, now: float, patience: float) -> list[tuple[int, PeerId]]:
        """Make urgent what was seen ``patience`` ago.

        Returns the chunks that were withheld for as long: their parents may be asked from now
        on.
        """
        while self._seen:
            chunk, seen = next(iter(self._seen.items()))
            if seen.when + patience > now:
                break
            del self._seen[chunk]
            self.note_urgent(chunk)
        for chunk in self._take_overdue(now):
            self.overdue = self.overdue.including(chunk)
        released = []
        while self._withheld:
            chunk, withheld = next(iter(self._withheld.items()))
            if withheld.when + patience > now:
                break
            del self._withheld[chunk]
            released.append((chunk, withheld.peer))
        return released

    def _take_overdue(self, now: float) -> list[int]:
        wait = self._overdue_after
        overdue = list(takewhile(lambda chunk: self._passed[chunk] + wait <= now, self._passed))
        for chunk in overdue:
            del self._passed[chunk]
        return overdue

    @property
    def _overdue_after(self) -> float:
        least = max(self._stall, _TURNS * self._turn)
        return min(max(least, _BEHIND * self._behind.value), _MOST * least)

    def due(self, patience: float) -> float:
        """When `mark_late` next has something to do; infinite if it waits for nothing."""
        due = math.inf
        if self._seen:
            due = next(iter(self._seen.values())).when + patience
        if self._withheld:
            due = min(due, next(iter(self._withheld.values())).when + patience)
        if self._passed:
            passed = next(iter(self._passed.values()))
            due = min(due, passed + self._overdue_after)
        return due
