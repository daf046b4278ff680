"""What several faults at once do to one thing of a node, and what is left of it when each of them ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sim.net.link import LinkSpec
from sim.node.clock import Pace
from sim.node.disk import DiskModel

T = TypeVar("T")
Change = Callable[[T], T]


@dataclass(slots=True)
class _Bent(Generic[T]):
    whole: T
    changes: list[Change[T]] = field(default_factory=list)

    def now(self) -> T:
        value = self.whole
        for change in self.changes:
            value = change(value)
        return value


class Bends(Generic[T]):
    """Changes to one thing (the line, the clock) of each node, applied in the order in which they came.

    Faults overlap, and end in any order. To put back what was there before would let the second of two end
    in the state that the first had made, for ever.
    """

    def __init__(self) -> None:
        self._bent: dict[str, _Bent[T]] = {}

    def bend(self, name: str, value: T, change: Change[T]) -> T:
        """Begin a change; returns what is now. ``value`` is taken for whole if nothing else bends it."""
        bent = self._bent.setdefault(name, _Bent(value))
        bent.changes.append(change)
        return bent.now()

    def unbend(self, name: str, change: Change[T]) -> T:
        """End a change; returns what the others leave of it."""
        bent = self._bent[name]
        bent.changes.remove(change)
        if not bent.changes:
            del self._bent[name]
        return bent.now()


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How truly a machine speaks. The default is a machine without faults."""

    lies: float = 0.0
    """Share of its messages and stream segments in which a bit is flipped."""

    repeats: float = 0.0
    """Share of its messages in whose place an older one is sent."""

    lags: float = 0.0
    """Share of its messages whose stream lags behind the others of their connection."""


class Bent:
    """All that faults can bend, of every machine by its name."""

    def __init__(self) -> None:
        self.links: Bends[LinkSpec] = Bends()
        self.disks: Bends[DiskModel] = Bends()
        self.clocks: Bends[Pace] = Bends()
        self.words: Bends[Words] = Bends()
        self.clogs: Bends[float] = Bends()
        """Seconds of delay from one machine to another, by ``"one>other"``."""
        self.places: Bends[int] = Bends()
        """Number of the machine that answers in this one's place."""
