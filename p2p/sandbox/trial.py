"""A worker that attempts everything forbidden: ``python -m p2p.sandbox.trial``.

`p2p.sandbox.launch` runs it once on each machine, confined as a stranger's code will be. It
ends with 0, or with a sentence on standard error that says which door is open."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Collection
from typing import Final

MOST: Final = 16
"""Threads allowed to a trial, which tries to start twice as many. It is also the largest
process id expected in the trial's own namespace."""


MACHINE: Final = "machine"
"""Argument that makes the trial check a worker that sees the machine. The other arguments are
the node's namespaces, as `namespaces` returns them."""


def namespaces() -> list[str]:
    """Return this process's namespaces, of which a worker must have its own, by the kernel's
    names; empty except on Linux."""
    kinds = ("mnt", "pid", "net", "ipc", "uts")
    with contextlib.suppress(FileNotFoundError):
        return [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    return []


def open_door(others: Collection[str], *, sees_machine: bool) -> str:
    """Return the first forbidden thing that works; empty if none does. ``others`` are
    namespaces that this process must not be in."""
    shared = [name.partition(":")[0] for name in namespaces() if name in others]
    if shared:
        return f"it does not leave the node's namespaces ({', '.join(shared)})"
    for place in ("/", "/usr"):
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=place, prefix=".shoal-trial-")
            os.close(descriptor)
            os.unlink(name)
            return f"{place} can be written"
    if any(int(name) > MOST for name in _processes()):
        return "other processes can be seen"
    if sees_machine:
        return ""
    with contextlib.suppress(OSError):
        os.close(os.open("/etc/passwd", os.O_RDONLY))
        return "/etc/passwd can be read"
    with contextlib.suppress(OSError):  # none of these limits applies to it
        os.close(os.open("/proc/1/mem", os.O_RDWR))
        return "the memory of the first process can be written"
    with contextlib.suppress(OSError):
        socket.socket().close()
        return "sockets can be opened"
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            os._exit(0)
        return "processes can be started"
    if sys.platform != "linux":  # macOS counts processes alone
        return ""
    started = _threads_started()
    if not started:
        return "this kernel counts the threads of all programs of this user (before Linux 5.14)"
    return "" if started < MOST else "threads are not counted"


def _processes() -> list[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:  # macOS
        return []


def _threads_started() -> int:
    """Return how many threads could be started, up to a maximum."""
    until, started = threading.Event(), 0
    try:
        for _ in range(2 * MOST):
            threading.Thread(target=until.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    until.set()
    return started


if __name__ == "__main__":
    sys.exit(open_door(sys.argv[1:], sees_machine=MACHINE in sys.argv) or 0)
