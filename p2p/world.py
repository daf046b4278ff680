"""Everything that code may know of its machine: clock, randomness, disk, blocking work,
processes, signer.

Nothing else under p2p/ or roles/ reads a clock, a random source, a file, a thread or a process.
The production side is `p2p.machine.RealWorld`, the simulated one `sim.node.world.SimWorld`; one
suite, tests/conformance/test_worlds.py, holds them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol, TypeVar

from p2p.errors import StorageError
from p2p.identity import Signer, Verify
from p2p.sandbox import Confinement, Containment

T = TypeVar("T")
logger = logging.getLogger(__name__)

OFF_LOOP: Final = 64 * 1024
"""Bytes of foreign content up to which it is decoded on the event loop: half a millisecond of
numbers. Longer content is decoded in a thread, and only once its signature was verified."""


class Timer(Protocol):
    """A callback that will be called at its time."""

    def cancel(self) -> None:
        """Cancel the callback. Nothing happens if it was called already."""


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A file that `Disk.walk` found."""

    path: str
    """Path relative to where the walk began; empty if that is the file."""
    size: int
    stamp: int
    """Number that changes whenever the file is written, as far as the machine can tell."""
    is_plain: bool = True
    """False for a symbolic link, a device or a socket, which are not followed or opened."""


class Disk(Protocol):
    """The files of one node, named by relative paths with ``/``. Parents are made as needed.

    What was written survives a crash only after `fsync`; what was renamed or removed, only
    after `fsync` of the folder, which `replace` includes. Errors of the machine come as
    `StorageError`, a file that is not there as `FileNotFoundError`.
    """

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file: ``length`` of them, or fewer at its end."""

    async def write(
        self, path: str, data: bytes | memoryview, offset: int | None = None
    ) -> None:
        """Replace the whole file, or, with ``offset``, overwrite from there."""

    async def append(self, path: str, data: bytes) -> None:
        """Write at the end of the file."""

    async def reserve(self, path: str, size: int) -> None:
        """Make a file at least ``size`` bytes long, with room for all of them on the disk."""

    async def fsync(self, path: str) -> None:
        """Return once the file (and its name) would survive a crash."""

    async def replace(self, path: str, data: bytes | memoryview) -> None:
        """Put ``data`` at ``path`` atomically and durably: temporary file, fsync, rename, fsync
        of folder.
        """

    async def rename(self, old: str, new: str) -> None:
        """Move a file over another, or a folder to where nothing is, atomically and durably."""

    async def remove(self, path: str) -> None:
        """Remove a file or a whole folder. Nothing happens if it does not exist."""

    async def list(self, folder: str) -> list[str]:
        """Return the sorted names in ``folder``; empty if it does not exist."""

    async def walk(self, path: str, most: int) -> Sequence[DiskEntry]:
        """Return the file at ``path``, or all files below that folder, sorted, without hidden
        ones; at most ``most``. Return none if nothing is there."""

    async def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if it does not exist."""

    async def free(self) -> int:
        """Return the free bytes that the file system reports. Quotas may leave fewer."""

    def holding(self, path: str) -> AbstractContextManager[None]:
        """Keep other processes from a folder for the length of the block, by a file at
        ``path``. Raises `StorageError` if another process holds it."""

    def locate(self, path: str) -> str:
        """Return the path that another process of this machine would open. Engine workers get
        weights this way."""


class Worker(Protocol):
    """A worker process of this node, which answers one request at a time."""

    async def call(self, request: bytes) -> bytes:
        """Send a request and return the reply. Raises `p2p.errors.WorkerDied` if the process
        ended. Concurrent calls wait their turn."""


class World(Protocol):
    """Clock, randomness, disk, blocking work, worker processes, signer of one node."""

    signer: Signer
    """Signs in this node's name."""
    verify: Verify
    """Verifies signatures. The simulator caches verdicts; production does not."""
    disk: Disk
    cores: int
    """Number of calls of `run_blocking` that can run in parallel."""

    def now(self) -> float:
        """Return monotonic seconds from an arbitrary start, for every deadline and age."""

    def wall(self) -> float:
        """Return the seconds since 1970 by this machine's clock. Clocks are wrong, so it is for
        signed records only."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``. It is for pacing, never for polling."""

    async def sleep_until(self, deadline: float) -> None:
        """Return at ``deadline`` (as of `now`); at once if it has passed, never if it is
        infinite.
        """

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` once at ``when`` (as of `now`). Exceptions end the node."""

    def rng(self, purpose: str) -> Random:
        """Return a generator for one purpose. In the simulator it is a function of (seed, node,
        purpose)."""

    def entropy(self, count: int) -> bytes:
        """Return random bytes fit for keys."""

    async def run_blocking(self, function: Callable[..., T], *args: Any, cost: float) -> T:
        """Run a pure function off the event loop. ``cost`` is its modelled time in seconds.

        Shielded from cancellation in both worlds, and delivered at the end of its cost.
        """

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

    async def containment(self) -> Containment:
        """Return how this machine contains confined workers; simulations contain nothing.
        Raises `p2p.errors.WorkerNotStarted` if that cannot be tried."""

    def trace(self, name: str, **fields: object) -> None:
        """Add an entry to the trace, which is free in production and hashed in the
        simulator."""

    def buggify(self, name: str) -> bool:
        """Return True to provoke a legal but rare case on purpose; always False outside the
        simulator.

        ``name`` is "module/what" and unique: tests/simulation/test_buggify.py collects the
        sites.
        """

    def sometimes(self, name: str, condition: bool) -> None:
        """Claim that ``condition`` holds at least once over many simulations. Named like a
        `buggify` site.
        """


async def decode_off_loop(
    world: World, decode: Callable[..., T], data: bytes, *args: Any, rate: float
) -> T:
    """Return ``decode(data, *args)``, computed in a thread if ``data`` is long. ``rate`` is the
    bytes that it decodes in a second."""
    if len(data) <= OFF_LOOP:
        return decode(data, *args)
    return await world.run_blocking(decode, data, *args, cost=len(data) / rate)


_SPAN: Final = 10**8
"""Sequence numbers that one process may use: enough for three years at one a second."""


async def first_seqno(world: World, path: str) -> int:
    """Return a sequence number above all that earlier processes of this node have used.

    The file at ``path`` says below which number this process stays; it counts as lost if it is
    damaged. If the disk refuses it, the process starts by the clock in the second half of the
    numbers that the file reserves: above all that the file's writer used, and below all that a
    process with a working disk uses later.
    """
    try:
        text = await world.disk.read(path)
    except FileNotFoundError:
        text = b""
    used = int(text) if text.isdigit() and len(text) < 19 else 0
    clock = int(world.wall() * 1000)
    first = max(used + 1, clock)
    try:
        await world.disk.replace(path, str(first + 2 * _SPAN).encode())
    except StorageError as error:
        logger.warning("seqno.not_saved path=%s reason=%s", path, error)
        return max(used - _SPAN + clock % _SPAN, clock)
    return first


def lateness(world: World, name: str) -> float:
    """Return the seconds by which a `World.buggify` site is late: up to `LATE`, and 0.0 outside
    the simulator."""
    # Most seconds that a `World.buggify` site may be late: many round trips, and less than any
    # peer waits for an answer.
    return world.rng(name).uniform(0.0, 1.0) if world.buggify(name) else 0.0


async def dawdle(world: World, name: str) -> None:
    """Delay at a `World.buggify` site: up to `LATE` seconds, and not at all outside the
    simulator."""
    seconds = lateness(world, name)
    if seconds:
        await world.sleep(seconds)
