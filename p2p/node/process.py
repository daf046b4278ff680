"""A node as a process: its folder and lock, its log, and how it ends.

Theory of operation
-------------------
Three things end a node: a signal (SIGINT, SIGTERM), the end of its standard input when it was told to die
with its parent (the pipe closes however the parent dies, kill -9 included), and an error. The first two
cancel everything; what is being written to disk is carried through. If that takes longer than `GRACE`, for
example because a thread computes, the process leaves anyway: what is on disk survives being killed, so
nothing is lost by it but politeness.
"""

from __future__ import annotations

import fcntl
import logging
import logging.handlers
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import trio

from p2p.errors import ConfigError, StorageError
from p2p.wire import MIB

GRACE: Final = 2.5
"""Seconds between the request to end and leaving at any price: a person waits 3."""
LOG_BYTES: Final = 16 * MIB
"""Of the log file; one older file of the same size is kept. A day of ``info`` of a busy node."""
LEVELS: Final = ("debug", "info", "warning", "error")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep every other node out of it. Raises `ConfigError`, `StorageError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"{folder} cannot be used: {error.strerror}; give another --data") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another node is using {folder}; give this one its own --data") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def logging_to(path: Path, level: str) -> Iterator[None]:
    """Log to ``path`` at ``level``, and warnings to standard error too, unless that is the same file."""
    to_file = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    to_people = logging.StreamHandler(sys.stderr)
    to_people.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    to_people.setLevel(logging.WARNING)
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(to_file)
    if not os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat()):
        root.addHandler(to_people)
    try:
        yield
    finally:
        root.removeHandler(to_people)
        root.removeHandler(to_file)
        root.setLevel(before)
        to_file.close()


@asynccontextmanager
async def until_told_to_end(*, with_parent: bool) -> AsyncIterator[None]:
    """Run the block until it ends, a signal comes, or (``with_parent``) standard input ends."""
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, nursery.cancel_scope)
        if with_parent:
            nursery.start_soon(_watch_parent, nursery.cancel_scope)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()


async def _watch_signals(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            logging.getLogger(__name__).info("node.signal number=%d", number)
            _end(scope)


async def _watch_parent(scope: trio.CancelScope) -> None:
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        while await stream.receive_some(4096):
            pass
    _end(scope)


def _end(scope: trio.CancelScope) -> None:
    scope.cancel()
    leave = threading.Timer(GRACE, os._exit, args=(0,))
    leave.daemon = True
    leave.start()
