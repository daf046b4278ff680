"""trio on virtual time.

Theory of operation
-------------------
trio asks its clock how long to sleep only when no task can run. At that moment this clock pops
the next event of the heap, runs it as a plain callback, moves virtual time and answers "not at
all". That is a whole discrete-event kernel: no MockClock, no guest mode. Events that wake no
task (a message handled by a core) are run one after the other without going back to trio; an
instrument tells when one did wake a task.

A run ends when ``main`` returns, when the horizon comes, or when something fails. Then the
trace is muted and the root scope cancelled; tasks that shield their cleanup still get virtual
time for it. If that never ends, the run has failed, if it had not before, and the shields are
lifted.

Three ways to stand still are told apart: no task runs and no event is left (`SimDeadlock`), a
task spins on checkpoints (`SimStuck`, by an instrument that counts passes of trio's loop), and
events that breed events at one instant (`SimStuck`, by the queue).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import trio

from sim.errors import SimDeadlock, SimStuck, SimulationError
from sim.kernel.determinism import (
    closed_doors,
    deterministic,
    lift_shields,
    raised_gc_thresholds,
    scopes_around,
)
from sim.kernel.queue import SECOND, EventQueue, nanoseconds
from sim.kernel.simulation import CURRENT_NODE, SimOptions, Simulation

T = TypeVar("T")

SPIN_PASSES: Final = 100_000
"""Passes of trio's loop at one instant before a task counts as spinning: about a second of real
time."""
SPIN_SAMPLE: Final = 100
"""Further passes during which the names of the tasks that run are collected."""
WINDING_DOWN: Final = 3600 * SECOND
"""Virtual time that shielded cleanup may take after the end."""
INSISTENCE: Final = 100
"""Number of times that shields are lifted before a task counts as one that cannot end."""
_MAX_NAMED: Final = 12
"""Waiting tasks that a `SimDeadlock` names."""
_PLUMBING: Final = frozenset(
    [
        "_real_async_yield",
        "wait_task_rescheduled",
        "sleep_forever",
        "sleep",
        "checkpoint",
        "ParkingLot.park",
    ]
)
"""Innermost functions that say nothing about what a task waits for."""


class SimClock(trio.abc.Clock):
    """Moves virtual time from event to event."""

    def __init__(self, queue: EventQueue, horizon: int | float) -> None:
        """Drive ``queue`` up to ``horizon`` (nanoseconds, or infinity)."""
        self.failure: SimulationError | None = None
        self.woken = False
        """Set by the instrument whenever a task becomes runnable."""
        self.finished = False
        """True if ``main`` returned before the horizon and without a failure."""
        self.ended_at = 0
        """Nanosecond at which the run ended; shielded cleanup may go on a little."""
        self._queue = queue
        self._horizon = horizon
        self._root = trio.CancelScope()
        self._ending = False
        self._insisted = 0
        self._returned = False

    def start_clock(self) -> None:
        """trio calls this once; virtual time starts at 0 without help."""

    def current_time(self) -> float:
        """Virtual seconds since the simulation began: what `trio.current_time` returns."""
        return self._queue.now / 1e9

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Run events until one wakes a task, or until ``deadline``. Called when no task can
        run."""
        if self._returned:
            return 0.0
        self.woken = False
        queue, wakes_at = self._queue, deadline * 1e9
        while not self.woken:
            due = queue.next_due()
            when = due if due is not None and due <= wakes_at else wakes_at
            if when == math.inf:
                return self._idle()
            if when >= self._horizon:
                self._reach_horizon()
            elif when != due:
                queue.now = max(queue.now, nanoseconds(deadline))
                return 0.0
            else:
                try:
                    queue.run_next()
                except (
                    SimulationError
                ) as error:  # past this frame trio would call it TrioInternalError
                    self.end(error)
        return 0.0

    def _reach_horizon(self) -> None:
        self._queue.now = max(self._queue.now, int(self._horizon))
        if self._ending:
            names = "; ".join(_some(_waiting_tasks()))
            self._insist(
                SimStuck(
                    f"cleanup takes more than {WINDING_DOWN // SECOND} virtual seconds: {names}"
                )
            )
        else:
            self.end(None)

    def _idle(self) -> float:
        waiting = _waiting_tasks()
        if any(place.endswith("wait_all_tasks_blocked") for place in waiting):
            return math.inf  # a test waits for just this moment, and trio wakes it
        deadlock = SimDeadlock(f"at {self.current_time():.6f} s; " + "; ".join(_some(waiting)))
        self.break_off(deadlock)
        return 0.0

    def end(self, failure: SimulationError | None) -> None:
        """End the run; the first failure counts."""
        self.failure = self.failure or failure
        if not self._ending:
            self._ending = True
            self.ended_at = self._queue.now
            self._queue.trace.mute()
            self._horizon = self._queue.now + WINDING_DOWN
            self._root.cancel()

    def break_off(self, failure: SimulationError) -> None:
        """End the run; if it is ending already, by force."""
        if self._ending:
            self._insist(failure)
        else:
            self.end(failure)

    def _insist(self, failure: SimulationError) -> None:
        """Report that winding down does not end by itself, and cancel shielded tasks, too."""
        if self.failure is None:
            self.failure = failure
        elif not self._insisted and type(failure) is not type(self.failure):
            self.failure.add_note(f"and then, while winding down: {failure!r}")
        self._insisted += 1
        root = trio.lowlevel.current_root_task()
        if root is None or self._insisted > INSISTENCE:
            raise failure
        self._horizon = self._queue.now + WINDING_DOWN
        for task in _descendants(root):
            lift_shields(task)

    async def run(self, main: Callable[[], Awaitable[T]]) -> T | None:
        """Run ``main`` until it returns, the horizon comes (then None), or the world fails."""
        try:
            with self._root, closed_doors():
                value = await main()
                if not self._ending:
                    self.finished = True
                    self.ended_at = self._queue.now
                    self._queue.trace.mute()
                return value
        finally:
            self._returned = True
            if self.failure is not None:
                raise self.failure
        return None


class _Watch(trio.abc.Instrument):
    """Tells the clock that a task woke, and ends a world whose time stands still."""

    def __init__(self, clock: SimClock, queue: EventQueue) -> None:
        self._clock = clock
        self._queue = queue
        self._seen = -1
        self._passes = 0
        self._sampler: _StepSampler | None = None

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self._clock.woken = True

    def before_io_wait(self, timeout: float) -> None:
        if self._queue.now != self._seen:
            self._seen = self._queue.now
            self._passes = 0
            return
        self._passes += 1
        if self._passes == SPIN_PASSES:
            self._sampler = _StepSampler()
            trio.lowlevel.add_instrument(self._sampler)
        elif self._sampler is not None and self._passes >= SPIN_PASSES + SPIN_SAMPLE:
            trio.lowlevel.remove_instrument(self._sampler)
            names = ", ".join(
                f"{name} ({count} steps)" for name, count in self._sampler.steps.most_common(5)
            )
            self._sampler = None
            self._passes = 0
            self._clock.break_off(
                SimStuck(f"spinning at {self._clock.current_time():.9f} s: {names}")
            )


class _StepSampler(trio.abc.Instrument):
    """Counts the steps of each task."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps[task.name] += 1


def _waiting_tasks() -> list[str]:
    """Name the tasks that wait, each with the innermost function it waits in."""
    root = trio.lowlevel.current_root_task()
    places = [_where(task) for task in _descendants(root)] if root is not None else []
    return [place for place in places if place is not None]


def _some(waiting: list[str]) -> list[str]:
    rest = len(waiting) - _MAX_NAMED
    return [*waiting[:_MAX_NAMED], f"and {rest} more"] if rest > 0 else waiting


def _descendants(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda task: task.name):
            yield child
            yield from _descendants(child)


def hold_deadlines(
    task: trio.lowlevel.Task, outermost: trio.CancelScope
) -> list[tuple[trio.CancelScope, float]]:
    """Take the deadlines from all scopes of ``task`` and its children inside ``outermost``.

    Returns the scopes with their deadlines, for `release_deadlines`.
    """
    held = []
    for one in (task, *_descendants(task)):
        for scope in scopes_around(one):
            if scope is outermost:
                break
            if scope.deadline < math.inf:
                held.append((scope, scope.deadline))
                scope.deadline = math.inf
    return held


def release_deadlines(held: list[tuple[trio.CancelScope, float]], now: float) -> None:
    """Give the scopes their deadlines back, and cancel those whose deadline has passed."""
    for scope, deadline in held:
        scope.deadline = deadline
        if deadline <= now:
            scope.cancel()


def _where(task: trio.lowlevel.Task) -> str | None:
    """Return the place where `task` waits; None if it is trio's own or only waits for its
    children."""
    frames = [frame.f_code.co_qualname for frame, _ in task.iter_await_frames()]
    if task.name.startswith(("<", "trio._core")) or any(
        name.endswith("_nested_child_finished") for name in frames
    ):
        return None
    own = [name for name in frames if name not in _PLUMBING]
    node = task.context.get(CURRENT_NODE, "")
    name = task.name if task.name.startswith(node) else f"{node}: {task.name}"
    return f"{name} waits in {own[-1] if own else 'nothing'}"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Outcome and cost of a simulation, returned by `run_simulation`."""

    value: T | None
    """Result of ``main``; None if the horizon came first."""
    finished: bool
    """True if ``main`` returned before the horizon."""
    trace_hash: str
    events: int
    virtual_seconds: float
    cpu_seconds: float
    simulation: Simulation


def run_simulation(
    main: Callable[[Simulation], Awaitable[T]],
    *,
    seed: int,
    horizon: float = math.inf,
    options: SimOptions | None = None,
) -> Outcome[T]:
    """Run ``main`` on virtual time and return how it ended. The same seed gives the same trace.

    ``horizon`` is in virtual seconds. Raises `SimDeadlock`, `SimStuck`, `NodeFailed`, and
    whatever ``main`` raises.
    """
    simulation = Simulation(seed, options or SimOptions())
    queue = simulation.queue
    clock = SimClock(queue, nanoseconds(horizon) if horizon != math.inf else math.inf)
    simulation.end = clock.end
    started = time.process_time()
    with deterministic(seed):
        value = trio.run(
            clock.run,
            partial(main, simulation),
            clock=clock,
            instruments=[_Watch(clock, queue)],
        )
    return Outcome(
        value=value,
        finished=clock.finished,
        trace_hash=simulation.trace.digest,
        events=queue.events,
        virtual_seconds=clock.ended_at / 1e9,
        cpu_seconds=time.process_time() - started,
        simulation=simulation,
    )


def run_bare(
    main: Callable[[Simulation], T], *, seed: int, options: SimOptions | None = None
) -> Outcome[T]:
    """Run ``main`` without trio (L0). ``main`` fills ``simulation.queue`` and runs it
    itself."""
    simulation = Simulation(seed, options or SimOptions())
    started = time.process_time()
    with raised_gc_thresholds():
        value = main(simulation)
    return Outcome(
        value=value,
        finished=True,
        trace_hash=simulation.trace.digest,
        events=simulation.queue.events,
        virtual_seconds=simulation.now,
        cpu_seconds=time.process_time() - started,
        simulation=simulation,
    )
