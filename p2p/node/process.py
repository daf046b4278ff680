"""A node as a process: its folder and lock, its log, and how it ends.

Theory of operation
-------------------
Three things end a node: a signal (SIGINT, SIGTERM), the end of its standard input when it was
told to die with its parent (the pipe closes however the parent dies, kill -9 included), and an
error. The first two cancel everything; what is being written to disk is carried through. If
that takes longer than `GRACE`, for example because a thread computes, the process leaves
anyway: what is on disk survives being killed, so nothing is lost by it but politeness.

What a node's log looks like: lines for people, or an object a line for machines.

Messages that a program may wait for begin with a name, ``run.pinned`` or ``policy_damaged``,
and fields follow, ``epoch=%d``. docs/events.md lists the names; a test holds the list.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import trio

from p2p.errors import ConfigError, StorageError
from p2p.naming import unencodable
from p2p.wire import MIB

EVENT: Final = re.compile(r"[a-z0-9]+(?:[._][a-z0-9]+)+(?=[\s:,]|$)")
"""Pattern of an event name at the beginning of a message: words joined by dots or
underscores."""


class TextFormatter(logging.Formatter):
    """Formats a record as a line for people, with a traceback below it. Unprintable characters
    are escaped as in Python, so strangers' text cannot end a line or move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # that of another handler, as it came
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(_escaped, super().formatException(ei).split("\n")))


def _escaped(text: str) -> str:
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, and event with
    fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as ASCII without line ends."""
        name = EVENT.match(str(record.msg))
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name is not None:
            line |= {"event": name[0], "fields": _fields(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the arguments that the template names. Those that JSON lacks, such as NaN, become
    text."""
    # Placeholders in the template, each with the field name before it, if any.
    places = re.findall(r"(?:\b(\w+)=)?%[-.\d]*[a-z]", str(record.msg))
    values = record.args if isinstance(record.args, tuple) else ()
    return {
        # An int (also a bool), or a float that is a number.
        name: value
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for name, value in zip(places, values, strict=False)
        if name
    }


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # `check_platform` says what to do


def check_platform() -> None:
    """Raise `ConfigError` on a platform without fcntl, which is Windows."""
    if fcntl is None:
        raise ConfigError(
            "nodes run on Linux and macOS; on Windows install Shoal in WSL2 and start it there"
        )


@contextmanager
def locked_folder(
    folder: Path, user: str = "node", remedy: str = "give this one its own --data"
) -> Iterator[None]:
    """Create ``folder`` and lock it against other users, which ``user`` names, for the length
    of the block.

    Raises:
        ConfigError: The folder is in use; the message ends with the ``remedy``.
        StorageError: The folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"{folder} cannot be used: {error.strerror}; {remedy}") from None
    except UnicodeEncodeError as error:
        raise StorageError(unencodable(error)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another {user} is using {folder}; {remedy}") from None
        yield
    finally:
        os.close(descriptor)


class Warnings(logging.StreamHandler[TextIO]):
    """Prints warnings on standard error, each within ``above``, since a terminal may have a
    live block at its end."""

    def __init__(self, above: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(sys.stderr)
        self._above = above if is_terminal(sys.stderr) else nullcontext
        self.setFormatter(TextFormatter("%(levelname)s %(name)s %(message)s"))
        self.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record above the block."""
        with self._above():
            super().emit(record)


@contextmanager
def logging_to(
    path: Path,
    level: str,
    above: Callable[[], AbstractContextManager[None]] = nullcontext,
    form: str = "text",
) -> Iterator[None]:
    """Log to ``path`` at ``level``, in the form ``text`` or ``json``, for the length of the
    block. Warnings also go to standard error, unless that is the same file.

    Raises `StorageError` if there is no writing to ``path``.
    """
    try:
        # Size at which the log file is rotated; one older file is kept. A busy node writes as
        # much in a day of ``info``.
        to_file = logging.handlers.RotatingFileHandler(
            path, maxBytes=16 * MIB, backupCount=1, encoding="utf-8"
        )
    except OSError as error:
        raise StorageError(
            f"the log {path} cannot be written: {error.strerror}; remove it"
        ) from None
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    to_file.setFormatter(JsonFormatter() if form == "json" else text)
    to_people = Warnings(above)
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(to_file)
    if sys.stderr is not None and not os.path.samestat(
        os.fstat(sys.stderr.fileno()), path.stat()
    ):
        root.addHandler(to_people)
    try:
        yield
    finally:
        root.removeHandler(to_people)
        root.removeHandler(to_file)
        root.setLevel(before)
        to_file.close()


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if ``stream`` is a terminal. A closed stream (``>&-``) is None in Python."""
    return stream is not None and stream.isatty()


def check_key_place(key: Path, ignored: Path | None = None) -> None:
    """Raise `ConfigError` if git would add the private key at ``key`` to a commit.

    The message suggests to ignore the folder ``ignored``, by default the key's own.

    ``git add .`` in a checkout stages whatever is not ignored, and a key that was pushed once
    is no secret any more. Asked is git itself, because ``.gitignore`` files, global ones and
    ``.git/info/exclude`` all count. Outside a work tree, or where git is not installed, there
    is nothing to fear from it.
    """
    key = key.absolute()
    tree = next((folder for folder in key.parents if (folder / ".git").exists()), None)
    if tree is None:
        return
    # Whose tree it is (safe.directory) does not matter for the question.
    ask = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        str(tree),
        "check-ignore",
        "--quiet",
        str(key),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        # Seconds that git may take to say whether it ignores a path: it reads a few small
        # files.
        answer = subprocess.run(ask, env=env, capture_output=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if answer.returncode == 1:  # 0 is ignored, 128 no work tree
        folder = ignored.absolute() if ignored is not None else key.parent
        folder = folder if folder != tree else key
        raise ConfigError(
            f"{key} would be a private key inside the git work tree {tree}, which does not"
            " ignore it: git add would publish it. Choose a place outside, or add the line"
            f" /{folder.relative_to(tree)} to {tree / '.gitignore'}"
        )


@dataclass(slots=True)
class Ending:
    """State of a process that may be told to end."""

    is_done: bool
    """True when the command has done its work; always True for one that runs until told to
    end."""
    signal: int = 0
    """Number of the signal that ended the process; 0 before that."""

    @property
    def code(self) -> int:
        """Exit code: 128 plus the signal's number if the work was interrupted, else 0."""
        return 0 if self.is_done or not self.signal else 128 + self.signal


@asynccontextmanager
async def until_told_to_end(
    *, with_parent: bool = False, is_done: bool = True
) -> AsyncIterator[Ending]:
    """Run the block until it ends, a signal comes, or, with ``with_parent``, standard input
    ends."""
    ending = Ending(is_done)

    def told() -> None:
        [ending.signal] = seen
        _end(nursery.cancel_scope, ending)

    async with trio.open_nursery() as nursery:
        with told_by_signals(told) as seen:
            if with_parent:
                nursery.start_soon(_watch_parent, nursery.cancel_scope, ending)
            try:
                yield ending
            finally:
                nursery.cancel_scope.cancel()


@contextmanager
def told_by_signals(told: Callable[[], None]) -> Iterator[Sequence[int]]:
    """Call ``told`` in trio's loop when SIGINT or SIGTERM comes during the block. Yield a list
    that then holds the signal's number.

    This does not use `trio.open_signal_receiver`, whose reader is cancelled by the first
    signal. A second signal, while the block winds down, then comes back as a
    `KeyboardInterrupt`.
    """
    token = trio.lowlevel.current_trio_token()
    seen: list[int] = []

    def hear() -> None:
        logging.getLogger(__name__).info("node.signal number=%d", seen[0])
        told()

    def handle(number: int, _: object) -> None:
        if not seen:
            seen.append(number)
            token.run_sync_soon(hear)

    before = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _watch_parent(scope: trio.CancelScope, ending: Ending) -> None:
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        while await stream.receive_some(4096):
            pass
    _end(scope, ending)


def _end(scope: trio.CancelScope, ending: Ending) -> None:
    scope.cancel()
    # Seconds from the request to end until the process exits in any case. A person waits 3.
    leave = threading.Timer(2.5, lambda: os._exit(ending.code))
    leave.daemon = True
    leave.start()
