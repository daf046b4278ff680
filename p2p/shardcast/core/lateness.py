"""When a missing chunk becomes urgent: this node stops waiting for the forest to push it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet


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

    In the last case the parent does hold the chunk, but it has mostly more to send than its
    line carries; so it counts as a source again only after the same patience. Example: a parent
    on a 10 Mbit/s line withholds chunk 7 from two of its five children. Both pull it from a
    neighbour at once; if no neighbour has it within 0.8 s, both ask the parent.
    """

    __slots__ = ("_seen", "_withheld", "urgent")

    def __init__(self) -> None:
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

    def note_urgent(self, chunk: int) -> None:
        """Pull this chunk now."""
        self.urgent = self.urgent.including(chunk)

    def note_arrival(self, chunk: int) -> Sighting | None:
        """A chunk is here; returns where it was first seen."""
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
        released = []
        while self._withheld:
            chunk, withheld = next(iter(self._withheld.items()))
            if withheld.when + patience > now:
                break
            del self._withheld[chunk]
            released.append((chunk, withheld.peer))
        return released

    @property
    def oldest(self) -> float:
        """Since when `mark_late` has waited for a chunk; infinite if it waits for none."""
        seen = next(iter(self._seen.values())).when if self._seen else math.inf
        return min(seen, next(iter(self._withheld.values())).when) if self._withheld else seen
