"""From a confinement to a command: what stands in front of a worker on this machine."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from p2p.sandbox.bubblewrap import bwrap_command
from p2p.sandbox.confinement import Confinement, Containment, Mechanism
from p2p.sandbox.entry import EntryLimits
from p2p.sandbox.installation import Installation, find_installation
from p2p.sandbox.seatbelt import seatbelt_profile
from p2p.sandbox.syscalls import ARCHITECTURES

VARIABLES: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""A worker's environment, unless it keeps the node's. Compiled code has nowhere to be kept."""
SERIAL: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""Libraries start a thread for each core, which takes address space that a worker with a limit
on it has not."""
LOADER: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Without them some Pythons do not find their own library."""
USERS: Final = (1 << 30, 1 << 29)
"""The first of the users that root's workers run as, and how many there are: above those of
people and containers. Each worker is another one, so that it is counted alone."""
NO_CORE: Final = 1
"""Bytes of a core dump. With 0 a crash still starts the machine's handler (``core_pattern``),
as root and on what the worker left there; 1 is the kernel's word for none at all."""
SIGNALS: Final = 256
"""Signals and timers that may be pending. They are counted with those of the node's user."""
ENTRY: Final = "p2p.sandbox.entry"


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and environment that start a worker."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    is_nested: bool = False
    """Whether the command starts another process, in which the worker and all that it starts
    live and end."""


def machine_name() -> str:
    """Whose system calls a filter is for: empty where none is installed."""
    if sys.platform != "linux":
        return ""
    name = platform.machine()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name.lower(), name)


def is_filtered() -> bool:
    """Whether there is a filter for this machine, and ``prctl`` to install it with."""
    return machine_name() in ARCHITECTURES


def launch(
    argv: Sequence[str],
    confined: Confinement,
    containment: Containment,
    *,
    folder: str,
    keys: Sequence[str] = (),
) -> Launch:
    """How to run ``python -m`` ``argv``, which sees nothing of ``folder``, the node's, but what
    ``confined`` says, and never ``keys``."""
    installation = find_installation()
    named = [*confined.readable, *confined.writable]
    named += [folder] if confined.sees_machine else []
    aliases = {name: path for name in named if (path := os.path.realpath(name)) != name}
    real = replace(
        confined,
        readable=tuple(map(os.path.realpath, confined.readable)),
        writable=tuple(map(os.path.realpath, confined.writable)),
    )
    hidden = [os.path.realpath(key) for key in keys if os.path.exists(key)]
    is_switching = containment.is_switching and not confined.sees_machine
    limits = _limits(confined, is_switching=is_switching, counts=containment.holds)
    command = [installation.python, "-P", "-m", ENTRY, limits.to_argument(), *argv]
    match containment.mechanism:
        case Mechanism.BUBBLEWRAP:
            front = bwrap_command(
                containment, real, installation,
                folder=os.path.realpath(folder), secrets=hidden, aliases=aliases,
            )  # fmt: skip
        case Mechanism.SEATBELT:
            profile = seatbelt_profile(real, installation, secrets=hidden)
            front = [containment.program, "-p", profile]
        case Mechanism.NONE:
            front = []
    return Launch(
        (*front, *command),
        _variables(confined, installation),
        is_nested=containment.mechanism is Mechanism.BUBBLEWRAP,
    )


def _limits(confined: Confinement, *, is_switching: bool, counts: bool) -> EntryLimits:
    """``counts``: whether the worker's tasks are counted alone. Else those of all programs of
    the node's user are, who mostly has more than a worker may."""
    is_filtered_here = is_filtered()
    amounts = {
        "CORE": NO_CORE if is_filtered_here else 0,
        "AS": confined.memory,
        "NPROC": confined.tasks if counts else None,
        "FSIZE": confined.file_size,
        "NOFILE": confined.open_files,
    }
    if is_filtered_here:  # names that macOS has not
        amounts |= {"RTPRIO": 0, "NICE": 0}
        amounts |= {} if confined.memory is None else {"SIGPENDING": SIGNALS, "MEMLOCK": 0}
    first, count = USERS
    return EntryLimits(
        amounts={name: amount for name, amount in amounts.items() if amount is not None},
        cores=(confined.cores or 0) if is_filtered_here else 0,
        user=first + secrets.randbelow(count) if is_switching else 0,
        machine=machine_name() if is_filtered_here else "",
        network=confined.network,
        forks=confined.forks,
        uncounted=confined.memory is None,
    )


def _variables(confined: Confinement, installation: Installation) -> dict[str, str]:
    names = [name for name in confined.variables if not name.endswith("*")]
    beginnings = tuple(name[:-1] for name in confined.variables if name.endswith("*"))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (*names, *LOADER) or (beginnings and name.startswith(beginnings))
    }
    path = {"PYTHONPATH": os.pathsep.join(installation.search)} if installation.search else {}
    serial = SERIAL if confined.memory is not None else {}
    return VARIABLES | serial | kept | path
