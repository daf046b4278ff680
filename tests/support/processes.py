"""Processes of tests: how they are started, read and ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any


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


def kill(engine: Any) -> None:
    """End the worker process of an engine."""
    kill_family(engine._remote.process.pid)


ROOT = Path(__file__).parent.parent.parent


@contextmanager
def started(
    *command: str, cwd: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process and end it with the block; output and errors are one stream."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        start_new_session=True,
        # A suite that a shell runs in the background ignores SIGINT, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the workers of a sweep hold the pipe too
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def lines_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Return the lines of output up to the first that begins with ``start``."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(start):
        line = process.stdout.readline()
        assert line, f"it ended without a line {start!r}: {lines}"
        lines.append(line)
    return lines
