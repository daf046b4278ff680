"""Limits of a worker process: a value, the same on every system."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from p2p.wire import KI, MIB

REPLY: Final = 64 * MIB
"""Most bytes of one reply, as engines and environments send them (`roles.workers.calls`)."""
CHATTER: Final = 16 * MIB
"""Most bytes that a stranger's worker may print during one call. They are discarded after the
first `HEARD`."""
HEARD: Final = 64 * KI
"""Bytes of a worker's printed output, over its life, that go to the node's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The things that a worker may reach besides Python and its libraries, and its limits.

    The defaults are for a stranger's code or text. Paths are those of the operating system, and
    are the same in there. None is no limit.
    """

    readable: tuple[str, ...] = ()
    """Files and folders that the worker may read."""

    writable: tuple[str, ...] = ()
    """Folders of this machine that the worker may write. They are made if they do not exist."""

    sees_machine: bool = False
    """True if the worker may read all of this machine except homes and sockets, and use its
    accelerators. It is meant for our own engines, which need drivers wherever they lie. Their
    threads, cores, files and output are not limited, and they are not stopped between calls."""

    network: bool = False
    """True if the worker may open sockets, and sees this machine's interfaces."""

    forks: bool = False
    """True if the worker may start processes. Each may then use ``memory`` again."""

    variables: tuple[str, ...] = ()
    """Names of environment variables that the worker keeps. A name that ends in ``*`` stands
    for all that begin so. All other variables are removed."""

    memory: int | None = None
    """Most bytes of address space of each process."""

    # Libraries start a thread for each core; a stranger's code must not start as many as the
    # machine has numbers for.
    tasks: int = 64
    """Most threads and processes together."""

    required: bool = True
    """True if the worker must not run where this machine cannot contain it. Otherwise it runs
    there with the limits that a process can set itself."""

    def __post_init__(self) -> None:
        if min(self.memory or 1, self.tasks) < 1:
            raise ValueError("what a worker may use is positive, or None for no limit")
        if not all(path.startswith("/") for path in (*self.readable, *self.writable)):
            raise ValueError("what a worker may reach is named by absolute paths")

    @property
    def scratch(self) -> int:
        """Most bytes of all files in ``/tmp`` together. It is memory, beside what the worker
        may map. An engine's caches lie there: Triton's compiled code takes some hundred MB."""
        return 2048 * MIB if self.sees_machine else 64 * MIB


class Mechanism(Enum):
    """The ways to contain workers on a machine."""

    BUBBLEWRAP = "bubblewrap"
    """Linux: namespaces of the worker's own, made by ``bwrap``."""
    SEATBELT = "seatbelt"
    """macOS: a profile for ``sandbox-exec``."""
    NONE = "none"
    """No containment except the resource limits of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The way in which a machine contains workers, as found by a trial."""

    mechanism: Mechanism = Mechanism.NONE
    """The mechanism that works here."""

    program: str = ""
    """The path of ``bwrap`` or ``sandbox-exec``."""

    is_switching: bool = False
    """True if the node is root. Each worker then runs as a user of its own that no person has,
    without a user namespace. The kernel does not count root's processes."""

    reason: str = ""
    """The reason, for a person, why nothing contains workers; empty if something does."""

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
    """Return True if ``path`` is one of ``folders``, or lies in one."""
    return any(
        path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders
    )
