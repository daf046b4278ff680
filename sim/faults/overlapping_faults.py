"""Overlapping faults of one property of a node, and what remains when each ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sim.net.link import LinkSpec
from sim.node.clock import ClockModel
from sim.node.disk import DiskModel

T = TypeVar("T")
Change = Callable[[T], T]


@dataclass(slots=True)
class _Changed(Generic[T]):
    """A property of a node: its value without faults, and its value under the current
    faults."""

    whole: T
    changes: list[Change[T]] = field(default_factory=list)

    def now(self) -> T:
        value = self.whole
        for change in self.changes:
            value = change(value)
        return value


class OverlappingChanges(Generic[T]):
    """Changes to one thing (the line, the clock) of each node, in the order in which they
    began.

    Faults overlap, and end in any order. A fault that put back what it had found would be
    wrong: of two throttles, from 1 s to 5 s and from 3 s to 8 s, the second finds the line that
    the first has narrowed, and would leave it narrow for ever at 8 s. So the whole value and
    the list of changes are kept, and after each beginning and end the value is computed anew
    from both.
    """

    def __init__(self) -> None:
        self._changed: dict[str, _Changed[T]] = {}

    def begin(self, name: str, value: T, change: Change[T]) -> T:
        """Begin a change and return the current value. ``value`` counts as whole if no other
        change runs."""
        changed = self._changed.setdefault(name, _Changed(value))
        changed.changes.append(change)
        return changed.now()

    def end(self, name: str, change: Change[T]) -> T:
        """End a change, found by its identity. Returns the value under the remaining
        changes."""
        changed = self._changed[name]
        changed.changes.remove(change)
        if not changed.changes:
            del self._changed[name]
        return changed.now()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """Faults of a machine's messages; none by default."""

    lies: float = 0.0
    """Share of its messages and stream segments in which a bit is flipped."""

    repeats: float = 0.0
    """Share of its messages in whose place an older one is sent."""

    lags: float = 0.0
    """Share of its messages whose stream lags behind the others of their connection."""


class OverlappingFaults:
    """Everything that faults can change, of every machine by name."""

    def __init__(self) -> None:
        self.links: OverlappingChanges[LinkSpec] = OverlappingChanges()
        self.disks: OverlappingChanges[DiskModel] = OverlappingChanges()
        self.clocks: OverlappingChanges[ClockModel] = OverlappingChanges()
        self.messages: OverlappingChanges[MessageFaults] = OverlappingChanges()
        self.clogs: OverlappingChanges[float] = OverlappingChanges()
        """Seconds of delay from one machine to another, by ``"one>other"``."""
        self.answering: OverlappingChanges[int] = OverlappingChanges()
        """Number of the machine that answers in this one's place."""
