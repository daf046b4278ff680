"""Use of machines' time, and worlds that record it.

A machine is doing one thing at a time: from the start of a life it *waits* until its engine
first has weights to load; then it is busy with what its engine is asked for, and *idle*
between. What SHARDCAST computes beside the engine (decoding a policy that comes) is noted
apart; a trainer's encoding, which the role waits for, counts as being busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from roles.engines import fake
from sim.node.world import SimWorld

T = TypeVar("T")

WAITING: Final = "waiting"
IDLE: Final = "idle"
ENCODING: Final = "encoding"
DECODING: Final = "decoding"
BESIDE: Final = frozenset((DECODING,))
"""Activities that keep no engine from working."""

Note = Callable[[str, Mapping[str, object]], None]
"""A callback that is told each trace event of a node: its name and fields."""


class Timesheet:
    """Seconds of a machine by activity, over all its lives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._alive_since: float | None = None
        self._alive = 0.0
        self._life = 0

    def begin_life(self) -> None:
        """Note that the machine runs, and waits for something to load."""
        self._alive_since = self._clock()
        self._life += 1
        self._begin(WAITING)

    def end_life(self) -> None:
        """Note that the machine is gone; all its activities end now."""
        for activity in list(self._begun):
            self._end(activity)
        if self._alive_since is not None:
            self._alive += self._clock() - self._alive_since
            self._alive_since = None

    def restart(self) -> None:
        """Forget the counts; current activities count from now on."""
        self._spent.clear()
        self._alive = 0.0
        now = self._clock()
        self._begun = dict.fromkeys(self._begun, now)
        if self._alive_since is not None:
            self._alive_since = now

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Be busy for the length of the block, or until the machine dies."""
        if activity not in BESIDE:
            self._end(WAITING)
        life = self._life
        self._begin(activity)
        try:
            yield
        finally:
            if self._life == life:
                self._end(activity)

    def _begin(self, activity: str) -> None:
        self._begun[activity] = self._clock()

    def _end(self, activity: str) -> None:
        start = self._begun.pop(activity, None)
        if start is not None:
            self._spent[activity] = self._spent.get(activity, 0.0) + self._clock() - start

    def is_doing(self, activity: str) -> bool:
        """Return True if the machine is at it now."""
        return activity in self._begun

    @property
    def alive(self) -> float:
        """Seconds that the machine has run."""
        since = self._alive_since
        return self._alive + (self._clock() - since if since is not None else 0.0)

    def spent(self, activity: str) -> float:
        """Return the seconds at ``activity``. `IDLE` is the rest of the time. A trainer replays
        while it encodes, so its activities may add up to more than the time."""
        if activity == IDLE:
            known = dict.fromkeys((*self._spent, *self._begun))
            busy = sum(self.spent(other) for other in known if other not in BESIDE)
            return max(0.0, self.alive - busy)
        start = self._begun.get(activity)
        return self._spent.get(activity, 0.0) + (
            self._clock() - start if start is not None else 0.0
        )


class TimedWorld:
    """Wraps a simulated world and keeps a timesheet; everything else is unchanged."""

    def __init__(self, world: SimWorld, sheet: Timesheet, scale: float, note: Note) -> None:
        """Wrap ``world``; each byte of the simulated policy stands for ``scale`` bytes of a
        real one.
        """
        self._world = world
        self._sheet = sheet
        self._scale = scale
        self._note = note
        self.now = world.now
        self.wall = world.wall
        self.rng = world.rng
        self.call_at = world.call_at
        self.verify = world.verify
        self.signer = world.signer
        self.disk = world.disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    async def run_blocking(self, function: Callable[..., T], *args: Any, cost: float) -> T:
        """Run the function as the real world does, and record it on the sheet. SHARDCAST's work
        takes as long as for the full size."""
        if function in fake.ACTIVITIES:
            activity = function.__name__
        elif function.__module__.startswith("p2p.shardcast"):
            activity = ENCODING if "encode" in function.__name__ else DECODING
            cost *= self._scale
        else:
            return await self._world.run_blocking(function, *args, cost=cost)
        with self._sheet.doing(activity):
            return await self._world.run_blocking(function, *args, cost=cost)

    def trace(self, name: str, **fields: object) -> None:
        """Trace and record on the sheet."""
        self._world.trace(name, **fields)
        self._note(name, fields)
