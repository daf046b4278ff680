"""Places of the draw order that the engine fills side by side, under one policy.

Theory of operation
-------------------
A place is one submission: some groups, of which each ends when its longest answer does. So that
the engine has enough rows to decode while the last answers of a place go on, it is given the
places behind it as well; any of them may be full first. They leave in the draw order all the
same. What leaves is on the disk before anything else happens to it (`roles.inference.outbox`),
and the cursor of the draw order with it: a node that is killed begins again at the first place
that has not left, draws there what it had drawn before, and has left no place out. A validator
would take that for a choice among draws (`roles.validator.core.sequence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from roles.engines.base import Group, GroupTask
from roles.envs.base import Task
from roles.protocol.core.assignment import DrawOrder
from roles.protocol.core.groups import UNHEARD


@dataclass(slots=True)
class OpenPlace:
    """One place, and its completions that have ended."""

    order: DrawOrder
    index: int
    tasks: Sequence[GroupTask]
    asked: Sequence[Task] = ()
    """Tasks as the environment made them."""
    ended: dict[int, Group] = field(default_factory=dict)
    unheard: set[tuple[int, int]] = field(default_factory=set)
    """Groups and slots of completions that the environment failed to answer."""

    @property
    def is_full(self) -> bool:
        """True if every group has ended."""
        return len(self.ended) == len(self.tasks)

    def groups(self) -> tuple[Group, ...]:
        """Return all groups of a full place, in the order of its tasks."""
        return tuple(self._marked(self.ended[task.group]) for task in self.tasks)

    def _marked(self, group: Group) -> Group:
        slots = {slot for number, slot in self.unheard if number == group.group}
        if not slots:
            return group
        completions = list(group.completions)
        for slot in slots:
            completions[slot] = replace(completions[slot], heard=UNHEARD)
        return replace(group, completions=tuple(completions))


class OpenPlaces:
    """The places under way, consecutive in the draw order."""

    def __init__(self) -> None:
        self._places: list[OpenPlace] = []
        self._of: dict[int, OpenPlace] = {}  # by group

    def __len__(self) -> int:
        return len(self._places)

    @property
    def next_index(self) -> int:
        """Index after the last open place; there must be at least one."""
        return self._places[-1].index + 1

    def add(self, place: OpenPlace) -> None:
        """Add a place after the last one."""
        assert not self._places or place.index == self.next_index
        self._places.append(place)
        self._of |= {task.group: place for task in place.tasks}

    def note(self, groups: Iterable[Group]) -> None:
        """Record groups that have ended."""
        for group in groups:
            self._of.pop(group.group).ended[group.group] = group

    def of(self, group: int) -> OpenPlace:
        """Return the place of a group that has not ended."""
        return self._of[group]

    def take_full(self) -> OpenPlace | None:
        """Remove and return the first place, if it is full. Later places wait for it."""
        if not self._places or not self._places[0].is_full:
            return None
        return self._places.pop(0)

    def clear(self) -> None:
        """Drop all open places."""
        self._places.clear()
        self._of.clear()
