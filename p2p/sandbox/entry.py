"""First module of a confined worker: ``python -m p2p.sandbox.entry LIMITS MODULE ...``.

It takes from its own process what the worker must not have, in an order in which each step can
still be made: amounts, the user, the right to ever gain privileges, system calls. Then it says
on standard output that it is ready, with one byte, and runs the module in its own place. All of
that holds for whatever the process starts, and cannot be taken back.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

from p2p.sandbox.seccomp import assemble, filter_program

READY: Final = b"+"
"""Output of a worker whose limits are in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLimits:
    """The limits of a worker, as passed on the command line."""

    amounts: dict[str, int]
    """Resource limits by Python's names, without the prefix ``RLIMIT_``."""

    cores: int = 0
    """Number of cores to stay on, chosen at random; 0 for all."""

    user: int = 0
    """User id to switch to; 0 keeps the current one."""

    machine: str = ""
    """Architecture whose system calls are filtered; empty for no filter."""

    network: bool = False
    forks: bool = False
    uncounted: bool = False
    """True if the filter allows uncounted memory; see `p2p.sandbox.seccomp.filter_program`."""

    def to_argument(self) -> str:
        """Return the limits as a command line argument."""
        return json.dumps(asdict(self))


class _Program(ctypes.Structure):
    """The C type ``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(argv: list[str]) -> None:
    """Apply the limits, report that they are in force, and become the worker."""
    limits = EntryLimits(**json.loads(argv[1]))
    module, rest = argv[2], argv[3:]
    for name, amount in limits.amounts.items():
        _limit(name, amount)
    if limits.cores:
        # Threads share them. Drawn, lest all workers of a machine share the same.
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, Random().sample(mine, min(limits.cores, len(mine))))
    if limits.user:
        os.setgroups([])
        os.setresgid(limits.user, limits.user, limits.user)
        os.setresuid(limits.user, limits.user, limits.user)
    if limits.machine:
        _prctl(38, 1, 0)  # PR_SET_NO_NEW_PRIVS
        filtered = filter_program(
            limits.machine,
            network=limits.network,
            forks=limits.forks,
            uncounted=limits.uncounted,
        )
        program = _Program(len(filtered), assemble(filtered))
        _prctl(22, 2, ctypes.addressof(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    os.write(sys.stdout.fileno(), READY)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _limit(name: str, amount: int) -> None:
    """Lower a resource limit. Only root may raise one."""
    import resource  # not at the top: Windows has none, and nodes import this to say so

    kind: int = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, amount))


def _prctl(option: int, first: int, second: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0))
    if libc.prctl(option, *arguments, ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv)
