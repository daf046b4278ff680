"""A worker that attempts what it must not be able to do: ``python -m p2p.sandbox.trial``.

`p2p.sandbox.probe` runs it once on each machine, confined as a stranger's code will be. It ends
with 0, or with a sentence on standard error that says which door is open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
from typing import Final

MOST: Final = 16
"""Threads that a trial may have; it tries to start twice as many. And the largest number of a
process: it is among the first of its own machine."""


MACHINE: Final = "machine"
"""The argument with which the trial is that of a worker that sees the machine."""


def open_door(*, sees_machine: bool) -> str:
    """The first door that is open; empty if none is."""
    for place in ("/", "/usr"):
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=place, prefix=".shoal-trial-")
            os.close(descriptor)
            os.unlink(name)
            return f"{place} can be written"
    if any(int(name) > MOST for name in _processes()):
        return "other processes can be seen"
    return "" if sees_machine else _open_call()


def _open_call() -> str:
    with contextlib.suppress(OSError):
        socket.socket().close()
        return "sockets can be opened"
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            os._exit(0)
        return "processes can be started"
    if sys.platform == "linux" and not _is_limited():  # macOS counts processes alone
        return "threads are not counted"
    return ""


def _processes() -> list[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:  # macOS
        return []


def _is_limited() -> bool:
    """Whether there is an end to threads."""
    until, started = threading.Event(), 0
    try:
        for _ in range(2 * MOST):
            threading.Thread(target=until.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    until.set()
    return started < MOST


if __name__ == "__main__":
    sys.exit(open_door(sees_machine=MACHINE in sys.argv) or 0)
