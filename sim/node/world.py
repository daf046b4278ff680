"""The simulated `World`: one life of one node, on virtual time.

Kill and restart give the node a new `SimWorld` over the same `SimDisk` and `MachineClock`.
Clocks can be made to lie: a rate stretches the monotonic clock (drift), a skew shifts the wall
clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any, NoReturn, TypeVar

import outcome
import trio

from p2p.identity import Signer, Verify
from p2p.sandbox import Confinement, Containment
from p2p.world import Disk, Worker
from sim.errors import SimForbidden
from sim.kernel.queue import IO, SLEEP, TIMER, Owner, SimTimer, nanoseconds
from sim.kernel.simulation import EPOCH, Simulation
from sim.kernel.trace import plain
from sim.node.clock import MachineClock
from sim.node.disk import DiskHandle, SimDisk

T = TypeVar("T")


class SimWorld:
    """Clock, randomness, disk, blocking work and signer of one life of one node."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        *,
        disk: SimDisk | None = None,
        clock: MachineClock | None = None,
        life: int = 0,
    ) -> None:
        """Begin a life; ``life`` counts restarts. Each life draws its own randomness, but keeps
        its key.
        """
        self.simulation = simulation
        self.name = name
        self.owner = Owner(name)
        self.signer: Signer = simulation.keys.signer(name)
        self.verify: Verify = simulation.keys.verify
        self.sim_disk = disk if disk is not None else SimDisk(name)
        self.disk: Disk = DiskHandle(self.sim_disk, self.wait_io, self._is_alive)
        self.cores = 1
        """Time of one core, for `run_blocking`."""
        self.clock = clock if clock is not None else MachineClock(simulation.queue)
        """The machine's: it is as wrong in the next life as in this."""
        self._queue = simulation.queue
        self._label = name if life == 0 else f"{name}#{life}"
        self._generators: dict[str, Random] = {}
        self._blocking: dict[trio.lowlevel.Task, SimTimer] = {}

    def __repr__(self) -> str:
        return f"SimWorld({self._label})"

    def _is_alive(self) -> bool:
        return self.owner.alive

    def now(self) -> float:
        """Monotonic seconds, as this node's clock runs."""
        return self._queue.now / 1e9 if self.clock.is_true else self.clock.now()

    def wall(self) -> float:
        """Seconds since 1970, as this node believes."""
        clock = self.clock
        now = self._queue.now / 1e9 if clock.is_true else clock.now()
        return EPOCH + now + clock.model.skew

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self.now() + seconds)

    async def wait_io(self, seconds: float) -> None:
        """Return after ``seconds`` of the machine's work; after a pause of the process, behind
        its timers."""
        await self._wait_until(self.now() + seconds, IO)

    async def sleep_until(self, deadline: float) -> None:
        """Return at ``deadline``, at once if it has passed."""
        await self._wait_until(deadline, SLEEP)

    async def _wait_until(self, deadline: float, label: str) -> None:
        """Wait until ``deadline`` by a heap entry, at a third of the cost of ``trio.sleep``."""
        if deadline == math.inf:
            await trio.sleep_forever()
        if deadline <= self.now():
            await trio.lowlevel.checkpoint()
            return
        task = trio.lowlevel.current_task()
        timer = self._queue.schedule(
            self.clock.due(deadline), self.owner, label, trio.lowlevel.reschedule, task
        )

        def abort(_: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            timer.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def call_at(self, when: float, callback: Callable[[], None]) -> SimTimer:
        """Call back once at ``when``; never if it is infinite."""
        if when == math.inf:
            timer = SimTimer(self._queue, self.owner, "never", callback, ())
            timer.callback = None
            return timer
        clock = self.clock
        due = nanoseconds(when) if clock.is_true else clock.due(when)
        return self._queue.schedule(due, self.owner, TIMER, callback)

    def rng(self, purpose: str) -> Random:
        """Return the generator of (seed, node, life, purpose)."""
        generator = self._generators.get(purpose)
        if generator is None:
            generator = self._generators[purpose] = self.simulation.rng(self._label, purpose)
        return generator

    def entropy(self, count: int) -> bytes:
        """Bytes that are a function of the seed, and fit for simulated keys only."""
        return self.rng("entropy").randbytes(count)

    async def run_blocking(self, function: Callable[..., T], *args: Any, cost: float) -> T:
        """Run ``function`` now and deliver its result ``cost`` seconds later, also if the
        caller is cancelled.

        Only the end of the node, or of the simulation, cuts the wait short.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        result = outcome.capture(function, *args)
        task = trio.lowlevel.current_task()
        due = self._queue.now + nanoseconds(max(0.0, cost * self.clock.model.slowness))
        self._blocking[task] = self._queue.schedule(
            due, self.owner, "blocking", self._unblock, task
        )
        if not self.owner.alive:
            self.release_blocking()
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        value: T = result.unwrap()
        return value

    def prolong_blocking(self, nanoseconds: int) -> None:
        """Let all work in `run_blocking` end later: threads stop with their process."""
        unfinished = set(self._blocking.values())
        if unfinished:
            self._queue.rearrange(
                lambda when, timer: when + nanoseconds if timer in unfinished else when
            )

    def _unblock(self, task: trio.lowlevel.Task) -> None:
        self._blocking.pop(task).cancel()
        trio.lowlevel.reschedule(task)

    def release_blocking(self) -> None:
        """End every task in `run_blocking`, because the node has died."""
        for task in list(self._blocking):
            self._unblock(task)

    def open_worker(
        self, argv: Sequence[str], *, name: str, confined: Confinement | None = None
    ) -> AbstractAsyncContextManager[Worker]:
        """Raise `SimForbidden`: simulations have no processes."""
        raise SimForbidden(
            f"a worker process ({name}) in a simulation: use an engine that needs none"
        )

    async def containment(self) -> Containment:
        """Return no containment: a simulation has no processes."""
        return Containment(reason="a simulation has no processes")

    def trace(self, name: str, **fields: object) -> None:
        """Hash an event into the trace."""
        details = [item for key, value in fields.items() for item in (key, plain(value))]
        self.simulation.trace.record((self._queue.now, self.name, name, *details))

    def buggify(self, name: str) -> bool:
        """Return True to misbehave on purpose: at random, in active runs and at active
        sites."""
        return self.simulation.buggify(name, self.rng)

    def sometimes(self, name: str, condition: bool) -> None:
        """Count that ``condition`` held, or that it did not yet."""
        self.simulation.sometimes(name, condition)
