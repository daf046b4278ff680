"""Event queue: one heap of integer nanoseconds.

Integers, because float sums depend on their order: one event of 8,286 differed in its ninth
decimal between two drivers of the same code. No trio here: at L0 this heap is the run loop
itself, at L1 and L2 `sim.kernel.virtual_time.SimClock` drives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from sim.errors import NodeFailed, SimStuck
from sim.kernel.trace import Trace

SECOND: Final = 1_000_000_000
"""Nanoseconds in a second."""
MAX_SAME_INSTANT: Final = 1_000_000
"""Events at one nanosecond before the queue calls itself stuck: 100 for each of 10,000
nodes."""
SLEEP: Final = "sleep"
"""Label of the end of a sleep. It outlives its node: a dying task may sleep in shielded
cleanup."""
IO: Final = "io"
"""Label of the end of a wait for the machine (its disk, a dial). It outlives its node, too."""
TIMER: Final = "timer"
"""Label of a callback that `World.call_at` schedules."""
_OUTLIVES: Final = frozenset((SLEEP, IO))
_OWN_CLOCK: Final = frozenset((SLEEP, TIMER))
"""Labels of what a process does by its own clock, without a look at its sockets."""
_BEHIND: Final = 1 << 62
"""Added to the order of what a resumed process reads: behind all timers of that nanosecond,
also those that are set then."""
_SWEEP_AT_LEAST: Final = 4096
"""Cancelled timers in the heap before it is swept (64 bytes each)."""


def nanoseconds(seconds: float) -> int:
    """Return the first nanosecond that float comparison takes for at least ``seconds``.

    trio and cores compare float seconds. A rounded integer may still compare as earlier than
    the float it came from, and a clock that lands there hangs (6 % of random sleeps).
    """
    when = round(seconds * 1e9)
    while when / 1e9 < seconds:
        when += 1
    return when


class Owner:
    """One life of a node, which owns events. They end with it, and wait while it is paused.

    When a pause ends, timers that are due run before anything that arrived meanwhile. A real
    process does the same: after SIGCONT, epoll reports no socket if its timeout has passed, and
    trio runs everything whose deadline is over before it looks again.
    """

    __slots__ = ("alive", "name", "paused_since", "paused_until")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_since = 0
        self.paused_until = 0

    def __repr__(self) -> str:
        return f"Owner({self.name}{'' if self.alive else ', dead'})"


class SimTimer:
    """A callback that waits in the heap."""

    __slots__ = ("_queue", "args", "callback", "label", "owner")

    def __init__(
        self,
        queue: EventQueue,
        owner: Owner,
        label: str,
        callback: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        self._queue = queue
        self.owner = owner
        self.label = label
        self.callback: Callable[..., None] | None = callback
        self.args = args

    def cancel(self) -> None:
        """Cancel the callback. This does nothing if it has fired."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            self._queue.note_cancelled()


class EventQueue:
    """Runs callbacks in order of (time, when they were asked for)."""

    __slots__ = (
        "_cancelled", "_heap", "_order", "_same_instant", "_watch_due", "_watch_step",
        "_watcher", "events", "kernel", "now", "trace",
    )  # fmt: skip

    def __init__(self, trace: Trace) -> None:
        self.now = 0
        """Nanoseconds since the simulation began."""
        self.events = 0
        """Number of callbacks run so far."""
        self.trace = trace
        self.kernel = Owner("sim")
        """Owner of what belongs to no node."""
        self._heap: list[tuple[int, int, SimTimer]] = []
        self._order = 0
        self._cancelled = 0
        self._same_instant = 0
        self._watch_step = 0
        self._watch_due = 0
        self._watcher: Callable[[], None] = lambda: None

    def watch(self, step: int, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` about every ``step`` nanoseconds, between events and outside the
        trace."""
        self._watch_step, self._watcher = step, watcher

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def schedule(
        self, when: int, owner: Owner, label: str, callback: Callable[..., None], *args: Any
    ) -> SimTimer:
        """Call back at ``when`` nanoseconds, or now if that has passed, unless the owner is
        dead by then."""
        timer = SimTimer(self, owner, label, callback, args)
        self._order += 1
        heappush(self._heap, (when if when > self.now else self.now, self._order, timer))
        return timer

    def rearrange(self, due: Callable[[int, SimTimer], int]) -> None:
        """Give every event a new time, asking in order. All events are sorted again, so this is
        for rare changes."""
        heap = [
            (max(due(when, timer), self.now), order, timer)
            for when, order, timer in sorted(self._heap)
        ]
        heapify(heap)
        self._heap = heap

    def note_cancelled(self) -> None:
        """Count a cancelled timer; sweep when most of the heap is cancelled."""
        self._cancelled += 1
        if self._cancelled > _SWEEP_AT_LEAST and self._cancelled * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].callback is not None]
            heapify(self._heap)
            self._cancelled = 0

    def next_due(self) -> int | None:
        """Return the time of the next event in nanoseconds, or None if there is none."""
        heap = self._heap
        while heap:
            when, _, timer = heap[0]
            if timer.callback is None:
                heappop(heap)
                self._cancelled -= 1
            elif not timer.owner.alive and timer.label not in _OUTLIVES:
                heappop(heap)
            elif timer.owner.paused_until > when:
                heappop(heap)
                self._order += 1
                order = self._order + (0 if timer.label in _OWN_CLOCK else _BEHIND)
                heappush(heap, (timer.owner.paused_until, order, timer))
            else:
                return when
        return None

    def run_next(self) -> None:
        """Run the event that `next_due` has just announced.

        Raises:
            NodeFailed: The event raised an error.
        """
        when, _, timer = heappop(self._heap)
        if when != self.now:
            self.now = when
            self._same_instant = 0
            if self._watch_step and when >= self._watch_due:
                self._watch_due = when + self._watch_step
                self._watcher()
        else:
            self._same_instant += 1
            if self._same_instant > MAX_SAME_INSTANT:
                raise SimStuck(
                    f"{timer.owner.name}: {timer.label} events breed at {when / 1e9:.9f} s"
                )
        callback = timer.callback
        assert callback is not None, "next_due drops cancelled timers"
        timer.callback = None
        self.events += 1
        self.trace.record((when, timer.owner.name, timer.label))
        try:
            callback(*timer.args)
        except Exception as error:
            raise NodeFailed(timer.owner.name, when / 1e9, error) from error

    def run(self, until: float = math.inf) -> None:
        """Run without trio (L0) until ``until`` seconds, or until nothing is left to do."""
        limit = math.inf if until == math.inf else nanoseconds(until)
        while (due := self.next_due()) is not None and due < limit:
            self.run_next()
        if limit != math.inf:
            self.now = max(self.now, int(limit))
