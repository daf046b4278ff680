"""Everything that code may know of its machine: clock, randomness, disk, blocking work,
processes, signer.

Nothing else under p2p/ or roles/ reads a clock, a random source, a file, a thread or a process.
The production side is `p2p.machine.RealWorld`, the simulated one `sim.node.world.SimWorld`; one
suite, tests/conformance/test_worlds.py, holds them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol, TypeVar

from p2p.identity import Signer, Verify
from p2p.sandbox import Confinement, Containment

T = TypeVar("T")

OFF_LOOP: Final = 64 * 1024
"""Bytes of foreign content up to which it is decoded where it comes in: half a millisecond of
numbers. What is longer is decoded in a thread, and only once its signature was judged."""
LATE: Final = 1.0
"""Seconds that a site may be late on purpose: many round trips, and less than any
peer waits for an answer.
"""


class Timer(Protocol):
    """A callback that will be called."""

    def cancel(self) -> None:
        """Forget it; harmless when it has fired."""
        ...


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A file that `Disk.walk` found."""

    path: str
    """Relative to where the walk began; empty if that is the file."""
    size: int
    stamp: int
    """A number that changes whenever the file is written, as far as the machine can tell."""
    is_plain: bool = True
    """False for a symbolic link, a device, a socket: what lies behind it is not looked at."""


class Disk(Protocol):
    """The files of one node, named by relative paths with ``/``. Parents are made as needed.

    What was written survives a crash only after `fsync`; what was renamed or removed, only
    after `fsync` of the folder, which `replace` includes. Errors of the machine come as
    `StorageError`, a file that is not there as `FileNotFoundError`.
    """

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; shorter than ``length`` only at its end."""
        ...

    async def write(
        self, path: str, data: bytes | memoryview, offset: int | None = None
    ) -> None:
        """Replace the whole file, or, with ``offset``, overwrite from there."""
        ...

    async def append(self, path: str, data: bytes) -> None:
        """Write at the end of the file."""
        ...

    async def reserve(self, path: str, size: int) -> None:
        """Make a file at least ``size`` bytes long, with room for all of them on the disk."""
        ...

    async def fsync(self, path: str) -> None:
        """Return once the file (and its name) would survive a crash."""
        ...

    async def replace(self, path: str, data: bytes | memoryview) -> None:
        """Put ``data`` at ``path`` atomically and durably: temporary file, fsync, rename, fsync
        of folder.
        """
        ...

    async def rename(self, old: str, new: str) -> None:
        """Move a file over another, or a folder to where nothing is, atomically and durably."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole folder; nothing happens if it is not there."""
        ...

    async def list(self, folder: str) -> list[str]:
        """Sorted names in ``folder``; empty if it is not there."""
        ...

    async def walk(self, path: str, most: int) -> Sequence[DiskEntry]:
        """The file at ``path``, or all below that folder, sorted, but for hidden ones; at most
        ``most``. Empty if nothing is there."""
        ...

    async def size(self, path: str) -> int | None:
        """Bytes, or None if it is not there."""
        ...

    async def free(self) -> int:
        """Bytes that the file system has left, as far as it says: quotas may leave fewer."""
        ...

    def holding(self, path: str) -> AbstractContextManager[None]:
        """Keep other processes from a folder for the length of the block, by a file at
        ``path``. Raises `StorageError` if one has it."""
        ...

    def locate(self, path: str) -> str:
        """The path that another process of this machine would open; engine workers get weights
        this way."""
        ...


class Worker(Protocol):
    """A worker process of this node: one request in, one reply out."""

    async def call(self, request: bytes) -> bytes:
        """Raises `p2p.errors.WorkerDied` if the process ended. One call at a time; others wait
        their turn.
        """
        ...


class World(Protocol):
    """Clock, randomness, disk, blocking work, worker processes, signer of one node."""

    signer: Signer
    """Signs in this node's name."""
    verify: Verify
    """Judges signatures. The simulator remembers verdicts; production does not."""
    disk: Disk
    cores: int
    """Number of calls of `run_blocking` that can run in parallel."""

    def now(self) -> float:
        """Monotonic seconds, from an arbitrary start: for every deadline and age."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, as this machine believes. Clocks lie: for signed records only."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; for pacing, never for polling."""
        ...

    async def sleep_until(self, deadline: float) -> None:
        """Return at ``deadline`` (as of `now`); at once if it has passed, never if it is
        infinite.
        """
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back once at ``when`` (as of `now`); exceptions end the node."""
        ...

    def rng(self, purpose: str) -> Random:
        """A generator of its own for one purpose; in the simulator a function of (seed, node,
        purpose).
        """
        ...

    def entropy(self, count: int) -> bytes:
        """Random bytes fit for keys."""
        ...

    async def run_blocking(self, function: Callable[..., T], *args: Any, cost: float) -> T:
        """Run a pure function off the event loop. ``cost`` is its modelled time in seconds.

        Shielded from cancellation in both worlds, and delivered at the end of its cost.
        """
        ...

    def open_worker(
        self, argv: Sequence[str], *, name: str, confined: Confinement | None = None
    ) -> AbstractAsyncContextManager[Worker]:
        """Run ``python -m`` ``argv`` as a child that speaks 4-byte-length frames over its
        pipes.

        ``confined`` says what it may reach and use; without it, it is a program like any other.
        It is killed when the block ends, and ends by itself when its standard input does.
        Raises `p2p.errors.WorkerNotStarted`, and `p2p.errors.WorkerDied` from
        `p2p.world.Worker.call`. Simulations have no processes: there it is a bug.
        """
        ...

    async def containment(self) -> Containment:
        """Return how this machine contains confined workers; simulations contain nothing.
        Raises `p2p.errors.WorkerNotStarted` where it cannot be tried."""
        ...

    def trace(self, name: str, **fields: object) -> None:
        """Tell the trace what happened: free in production, hashed in the simulator."""
        ...

    def buggify(self, name: str) -> bool:
        """Return True to do on purpose what is legal but rare; always False outside the
        simulator.

        ``name`` is "module/what", the same nowhere else: tests/simulation/test_buggify.py
        collects the sites.
        """
        ...

    def sometimes(self, name: str, condition: bool) -> None:
        """Claim that ``condition`` holds at least once over many simulations. Named like a
        `buggify` site.
        """
        ...


async def decode_off_loop(
    world: World, decode: Callable[..., T], data: bytes, *args: Any, rate: float
) -> T:
    """``decode(data, *args)``, in a thread if ``data`` is long. ``rate``: bytes it does in a
    second.
    """
    if len(data) <= OFF_LOOP:
        return decode(data, *args)
    return await world.run_blocking(decode, data, *args, cost=len(data) / rate)


def lateness(world: World, name: str) -> float:
    """A `World.buggify` site that is late, by this many seconds: up to `LATE`, 0.0 outside the
    simulator.
    """
    return world.rng(name).uniform(0.0, LATE) if world.buggify(name) else 0.0


async def dawdle(world: World, name: str) -> None:
    """A `World.buggify` site that takes its time: up to `LATE` seconds, none outside the
    simulator.
    """
    seconds = lateness(world, name)
    if seconds:
        await world.sleep(seconds)
