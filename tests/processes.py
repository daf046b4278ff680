"""Processes below a process, and how a test ends them."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process started and that have not been waited for."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Processes below a process, those of its children included; parents come first."""
    family = children(pid)
    for child in family:
        family += children(child)
    return family


def kill_family(pid: int) -> None:
    """End a worker as the kernel would, and return when nothing of it runs.

    A confined worker has two processes: the sandbox, whose number the node knows, and the
    program inside. The kernel ends the second after the first; until then it may answer a call.
    """
    family = [os.pidfd_open(member) for member in (pid, *descendants(pid))]
    os.kill(pid, signal.SIGKILL)
    for member in family:
        select.select([member], [], [])
        os.close(member)
