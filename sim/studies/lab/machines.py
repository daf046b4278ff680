"""An emulation (L3): machines on shaped lines, each of which runs one program.

Theory of operation
-------------------
A machine is a namespace kept by a ``cat``, so that its line outlives the programs on it; its
folder is its disk. Programs print JSON lines and end with their standard input. Everything ends
with the block: programs are killed, namespaces go with the last process in them, folders are
removed. If the process that owns the emulation is killed itself, the programs end by
themselves, and the next emulation to be opened removes the folders: each emulation holds a lock
in its folder as long as it lives, so a folder without a lock has no owner.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from p2p.errors import ConfigError, StorageError
from p2p.machine import open_world
from p2p.node.process import locked_folder
from p2p.wire import MIB
from p2p.world import World
from sim.errors import LabError
from sim.net.link import LinkSpec
from sim.studies.lab.namespaces import (
    CUBIC,
    MAX_MACHINES,
    NETWORK,
    QUEUE,
    Hub,
    address_of,
    open_hub,
    open_process,
    require_lab,
    wait_ready,
    within,
)

FOLDER_PREFIX: Final = "shoal-emulation-"
MEMORY: Final = Path("/dev/shm")
"""Folder for the machines' disks, if it exists: real machines do not wait for each other's
fsync."""
BUILD_SECONDS: Final = 60.0
"""Seconds to build one machine's namespace and line: six commands, a few milliseconds each on a
quiet machine."""
MAX_REPORT: Final = MIB
"""Bytes of one line a program says: our own, so this only stops a runaway."""
LAST_WORDS: Final = 500
"""Characters of a program's standard error that an error repeats."""

Hear = Callable[[dict[str, Any]], None]
"""Given each JSON object that a program prints."""
Progress = Callable[[float, str], None]
"""A callback that is told the scenario's seconds and the present activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationConfig:
    """The settings that all machines of an emulation share."""

    seed: int = 1
    """Seed of everything that is drawn: keys, links, weights."""

    congestion: str = CUBIC
    """TCP's congestion control; empty for the kernel's own choice."""

    queue: float = QUEUE
    """Seconds that a full queue in front of a line takes to empty."""

    delay: float = 0.0
    """Seconds that every frame takes from one line to the other; half of a round trip."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= 1:
            raise ConfigError(f"a delay is 0 to 1 second, not {self.delay}")
        if not 0.01 <= self.queue <= 10:
            raise ConfigError(f"a queue holds 0.01 to 10 seconds, not {self.queue}")
        if self.congestion and not self.congestion.isidentifier():
            raise ConfigError(f"{self.congestion!r} is no name of a congestion control")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """The place of one machine."""

    name: str
    number: int
    link: LinkSpec
    furnish: Callable[[Path], None]


class Program:
    """A process on a machine of the emulation."""

    def __init__(self, process: trio.Process, complaints: Path) -> None:
        self._process = process
        self._complaints = complaints
        self._wanted = True
        self._ended = trio.Event()

    @property
    def alive(self) -> bool:
        """True if the process has not ended yet, killed or not."""
        return not self._ended.is_set()

    async def kill(self) -> None:
        """Kill the program with SIGKILL, and wait until it is gone."""
        self._wanted = False
        self._process.kill()
        await self._ended.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.alive:
            self._process.send_signal(number)

    async def attend(self, name: str, hear: Hear) -> None:
        """Read the program's output to its end.

        Raises:
            LabError: The program ended, and not by `kill`.
        """
        assert self._process.stdout is not None
        unread = b""
        while data := await self._process.stdout.receive_some():
            *lines, unread = (unread + data).split(b"\n")
            if len(unread) > MAX_REPORT:
                raise LabError(f"{name} prints lines of more than {MAX_REPORT} bytes")
            for line in lines:
                hear(_report(name, line))
        code = await self._process.wait()
        self._ended.set()
        if self._wanted:
            words = self._complaints.read_text(encoding="utf-8", errors="replace").strip()[
                -LAST_WORDS:
            ]
            raise LabError(
                f"{name} ended with {code}, which was not planned: {words or 'it says nothing'}"
            )


def _report(name: str, line: bytes) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise LabError(f"{name} says {line[:LAST_WORDS]!r}, which is no JSON object")
    return report


class LabMachine:
    """A machine of the emulation: a line, an address, a folder, and the program that runs
    there."""

    def __init__(self, emulation: Emulation, spec: MachineSpec, keeper: trio.Process) -> None:
        self.name = spec.name
        self.number = spec.number
        self.link = spec.link
        self.folder = emulation.folder / spec.name
        self._furnish = spec.furnish
        self._emulation = emulation
        self._keeper = keeper
        self._program: Program | None = None
        self._start: Callable[[], Awaitable[None]] | None = None

    @property
    def address(self) -> str:
        return address_of(self.number)

    @property
    def entered(self) -> tuple[str, ...]:
        """The beginning of a command line that runs in this machine's namespace."""
        return "nsenter", "--target", str(self._keeper.pid), "--net"

    @property
    def alive(self) -> bool:
        """True if a program runs here."""
        return self._program is not None and self._program.alive

    async def open(self) -> None:
        """Prepare the machine's folder and lay its line.

        Raises:
            LabError: The line could not be laid.
        """
        self.wipe()
        await wait_ready(self._keeper)
        await self._emulation.hub.connect(self._keeper.pid, self.number, self.link)
        if self._emulation.congestion:
            # By route: many kernels allow a namespace fewer defaults than there are.
            route = (
                f"ip route change {NETWORK} dev eth0 src {self.address} congctl"
                f" {self._emulation.congestion}"
            )
            await within(self._keeper.pid, route)

    async def start(self, command: Sequence[str], hear: Hear) -> None:
        """Run ``command`` here, until it is killed or the emulation closes."""
        complaints = self.folder.with_suffix(".err")
        with complaints.open("wb") as stderr:
            opened = open_process(command, of=self._keeper.pid, stderr=stderr)
            process = await self._emulation.stack.enter_async_context(opened)
        self._program = Program(process, complaints)
        self._start = partial(self.start, command, hear)
        self._emulation.nursery.start_soon(self._program.attend, self.name, hear)

    async def kill(self) -> None:
        """Kill the program with SIGKILL, and wait until it is gone."""
        if self._program is not None:
            await self._program.kill()

    async def restart(self) -> None:
        """Start the program again, if it does not run."""
        if self._start is not None and not self.alive:
            await self._start()

    def wipe(self) -> None:
        """Leave nothing in the folder but what a new machine has."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._furnish(self.folder)

    def pause(self) -> None:
        """Let nothing happen in the program until `resume`."""
        if self._program is not None:
            self._program.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused program go on (SIGCONT)."""
        if self._program is not None:
            self._program.signal(signal.SIGCONT)

    async def reshape(self, link: LinkSpec) -> None:
        """Give the machine another line from now on.

        Raises:
            LabError: The line could not be changed.
        """
        await self._emulation.hub.reshape(self._keeper.pid, self.number, link)


class Emulation:
    """All machines and the emulation's clock. Open it with `open_emulation`."""

    def __init__(
        self,
        config: EmulationConfig,
        world: World,
        progress: Progress | None,
        hub: Hub,
        folder: Path,
    ) -> None:
        self.seed = config.seed
        self.congestion = config.congestion
        self.world = world
        self._progress = progress
        self.hub = hub
        self.folder = folder
        self.machines: dict[str, LabMachine] = {}
        self.nursery: trio.Nursery
        self.stack: AsyncExitStack
        self._zero = math.inf

    async def add(
        self, name: str, link: LinkSpec, furnish: Callable[[Path], None]
    ) -> LabMachine:
        """Build one more machine and return it; ``furnish`` fills a new disk's folder.

        Raises:
            LabError: The machine could not be built.
        """
        if len(self.machines) >= MAX_MACHINES:
            raise LabError(f"more than {MAX_MACHINES} machines do not fit on one bridge")
        keeper = await self.stack.enter_async_context(open_process(["cat"]))
        spec = MachineSpec(name=name, number=len(self.machines) + 1, link=link, furnish=furnish)
        machine = self.machines[name] = LabMachine(self, spec, keeper)
        try:
            with trio.fail_after(BUILD_SECONDS):
                await machine.open()
        except trio.TooSlowError:
            raise LabError(
                f"the line of {name} was not laid within {BUILD_SECONDS:.0f} s"
            ) from None
        return machine

    def begin(self, zero: float) -> None:
        """Let the scenario's second 0 be at wall clock time ``zero``."""
        self._zero = zero

    def tell(self, seconds: float, doing: str) -> None:
        """Report to the caller of the run how far the scenario is."""
        if self._progress is not None:
            self._progress(seconds, doing)

    def now(self) -> float:
        """Seconds of the scenario; minus infinity before `begin`."""
        return self.world.wall() - self._zero

    async def sleep_until(self, second: float) -> None:
        """Wait for a second of the scenario."""
        await self.world.sleep(second - self.now())

    async def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that each machine has sent so far, headers included.

        Raises:
            LabError: The counters could not be read.
        """
        sent = await self.hub.sent_bytes()
        return {machine.name: sent[machine.number] for machine in self.machines.values()}


@asynccontextmanager
async def open_emulation(
    config: EmulationConfig, progress: Progress | None = None
) -> AsyncIterator[Emulation]:
    """Open an emulation for the length of the block; ``progress`` is told how far it is.

    Raises `LabUnavailable` where there can be none, `LabError` if it cannot be made.
    """
    require_lab()
    sweep_leftovers()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_own_folder())
        world = await stack.enter_async_context(open_world(folder / "owner"))
        nursery = await stack.enter_async_context(trio.open_nursery())
        hub = await stack.enter_async_context(open_hub(config.queue, config.delay))
        emulation = Emulation(config, world, progress, hub, folder)
        emulation.nursery, emulation.stack = nursery, stack
        try:
            yield emulation
        finally:
            # Before the programs are killed: their end is no error then.
            nursery.cancel_scope.cancel()


@contextmanager
def _own_folder() -> Iterator[Path]:
    base = _disks()
    with tempfile.TemporaryDirectory(
        prefix=FOLDER_PREFIX, dir=base, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        with locked_folder(folder):
            yield folder


def _disks() -> Path:
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    return MEMORY if usable else Path(tempfile.gettempdir())


def sweep_leftovers() -> list[Path]:
    """Remove the folders of emulations whose owner was killed; return what was found."""
    found = []
    for folder in sorted(_disks().glob(f"{FOLDER_PREFIX}*")):
        try:
            with locked_folder(folder):
                found.append(folder)
                shutil.rmtree(folder, ignore_errors=True)
        except (ConfigError, StorageError):
            continue  # its owner lives, or it belongs to another user
    return found
