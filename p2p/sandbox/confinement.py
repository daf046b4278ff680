"""Limits of a worker process: a value, the same on every system."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from p2p.wire import KI, MIB

SCRATCH: Final = 64 * MIB
"""Bytes of ``/tmp`` in there. It is memory, beside what a worker may map."""
TASKS: Final = 64
"""Threads (and processes) of one worker. Libraries start one for each core, a stranger's code
must not start as many as the machine has numbers for."""
OPEN_FILES: Final = 256
"""Files of one worker. Each costs the kernel up to 64 KiB where it is a pipe."""
REPLY: Final = 64 * MIB
"""Bytes of one reply: what engines and environments say at most (`roles.workers.calls`)."""
CHATTER: Final = 16 * MIB
"""Bytes that a worker may print during one call, on its way to where they are forgotten."""
HEARD: Final = 64 * KI
"""Bytes of what a worker prints in its life that go to the node's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What a worker may reach besides Python and its libraries, and how much it may use.

    The defaults are for a stranger's code or text. Paths are those of the operating system, and
    are the same in there. None is no limit.
    """

    readable: tuple[str, ...] = ()
    """Files and folders."""

    writable: tuple[str, ...] = ()
    """Folders of this machine; made if they are not there."""

    sees_machine: bool = False
    """True if all of this machine may be read but homes and sockets, and its accelerators used:
    for our own engines, which need drivers wherever they lie."""

    network: bool = False
    """True if it may open sockets, and sees this machine's interfaces."""

    forks: bool = False
    """True if it may start processes. Each may then use ``memory`` again."""

    variables: tuple[str, ...] = ()
    """Names of environment variables that it keeps, and beginnings of names that end in ``*``;
    all others are gone."""

    memory: int | None = None
    """Bytes of address space of each process."""

    tasks: int | None = TASKS
    """Threads and processes together."""

    cores: int | None = 1
    """Cores that its threads share (Linux)."""

    rests: bool = True
    """True if the worker is stopped between calls where ``bwrap`` contains it, so that it uses
    the machine only when asked."""

    file_size: int | None = SCRATCH
    """Bytes of one file."""

    open_files: int | None = OPEN_FILES
    """Open files of each process."""

    scratch: int = SCRATCH
    """Bytes of ``/tmp``, all files together."""

    reply: int = REPLY
    """Bytes of one reply."""

    chatter: int | None = CHATTER
    """Bytes on standard error during one call. None: it is the node's own, unread."""

    required: bool = True
    """True if it must not run where this machine cannot contain it. Else it gets the limits
    that a process can give itself."""

    def __post_init__(self) -> None:
        amounts = (
            self.memory, self.tasks, self.cores, self.file_size, self.open_files, self.scratch,
            self.reply, self.chatter,
        )  # fmt: skip
        if any(amount is not None and amount < 1 for amount in amounts):
            raise ValueError("what a worker may use is positive, or None for no limit")
        if not all(path.startswith("/") for path in (*self.readable, *self.writable)):
            raise ValueError("what a worker may reach is named by absolute paths")


class Mechanism(Enum):
    """The ways to contain workers on a machine."""

    BUBBLEWRAP = "bubblewrap"
    """Linux: own namespaces, made by ``bwrap``."""
    SEATBELT = "seatbelt"
    """macOS: ``sandbox-exec``."""
    NONE = "none"
    """No containment, except resource limits of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """How a machine contains workers, as tried."""

    mechanism: Mechanism = Mechanism.NONE
    """The mechanism that works here."""

    program: str = ""
    """The path of ``bwrap`` or ``sandbox-exec``."""

    is_switching: bool = False
    """True if the node is root: then each worker runs as a user that no person has, without a
    user namespace. The kernel counts no process of root's."""

    reason: str = ""
    """Why nothing contains them, for a person; empty if something does."""

    @property
    def holds(self) -> bool:
        """True if a stranger's code may run here."""
        return self.mechanism is not Mechanism.NONE

    def __str__(self) -> str:
        match self.mechanism:
            case Mechanism.BUBBLEWRAP:
                who = "another user" if self.is_switching else "a user namespace"
                return f"bubblewrap ({self.program}, {who}, seccomp)"
            case Mechanism.SEATBELT:
                return f"seatbelt ({self.program})"
            case Mechanism.NONE:
                return f"none: {self.reason}"


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return True if ``path`` is one of ``folders``, or in one."""
    return any(
        path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders
    )
