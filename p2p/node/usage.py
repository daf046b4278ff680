"""Common parts of every command line: options are checked first, errors end in one place.

Each path that a command will write to is checked before the command begins: one that computes
for an hour and cannot write its result has wasted the hour. An unknown word is answered with
the nearest known one. `interruptible` is the border of every command: an error that arrives
there becomes a sentence and an exit code, and only a bug is a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import math
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.multiaddr import Multiaddr
from p2p.naming import printable_lines, unencodable

FAILED: Final = 1
"""Exit code after a failure with a correct command line."""
WRONG_USAGE: Final = 2
"""Exit code for a wrong command line, or a wrong file named on it, before any work has begun.
argparse uses it too."""
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""
UNHEARD: Final = 141
"""Exit code if the reader of standard output has gone: 128 plus the number of SIGPIPE."""
SOON: Final = 2.0
"""Seconds after which a silent command says what it waits for."""
DATA: Final = Path("~/.shoal")
"""Default folder of a node's data (`expanded`)."""
STANDARD_OUTPUT: Final = Path("-")
"""Path that stands for standard output in most commands."""


def did_you_mean(word: str, known: Iterable[str], what: str = "there are") -> str:
    """Return the end of a sentence about an unknown word, which names the nearest known word or
    all."""
    names = sorted(known)
    # Words this similar, by difflib's ratio, are suggested: ``traner`` and ``trainer`` have
    # 0.92, ``rnu`` and ``run`` 0.67, ``role`` and ``open`` 0.5. Dashes make no likeness.
    bare = {name.lstrip("-"): name for name in names}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    if near:
        return f"did you mean {bare[near[0]]!r}?"
    # All scenarios, commands or keys fit, but not the 10,000 nodes of a swarm.
    rest = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return f"{what}: {', '.join(names[:40]) or 'none'}{rest}"


class CommandParser(argparse.ArgumentParser):
    """Argument parser whose errors suggest the nearest known command, option or value."""

    def format_help(self) -> str:
        """Return the help with the first paragraph of a docstring, without its backticks."""
        self.description = (self.description or "").partition("\n\n")[0]
        return super().format_help().replace("``", "")

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with `WRONG_USAGE`."""
        if message.endswith("required: COMMAND"):
            self.print_help(sys.stderr)
            self.exit(WRONG_USAGE)
        if "arguments are required" in message and (slip := self._misspelt()):
            message = f"unrecognized arguments: {slip}"
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        word = rest.split()[0].partition("=")[0] if rest.split() else ""
        if is_unknown and word.startswith("-"):
            message = f"there is no option {word}; {did_you_mean(word, self.known_options())}"
        elif found := re.fullmatch(
            r"argument (\S+): invalid choice: (.*?) \(choose from (.*)\)", message
        ):
            what, word, known = found[1], found[2].strip("'"), found[3].replace("'", "")
            kind = f"value of {what}" if what.startswith("-") else "command"
            message = f"there is no {kind} {word!r}; {did_you_mean(word, known.split(', '))}"
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Note the words, to name a misspelt option before an argument that is missing."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _misspelt(self) -> str:
        known = (*self.known_options(), "--")
        options = (word.partition("=")[0] for word in self._words if word.startswith("--"))
        return next((one for one in options if not any(k.startswith(one) for k in known)), "")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit with ``status``, also if nobody reads the ``message``."""
        try:
            super()._print_message(message or "", sys.stderr)
            _flush(sys.stderr)
        except OSError:
            _leave(sys.stderr)
        sys.exit(status)

    def known_options(self) -> list[str]:
        """Return the long options of this parser and of its commands."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        names = {name for action in shown for name in action.option_strings}
        for action in shown:
            for parser in action.choices.values() if isinstance(action.choices, dict) else ():
                names.update(parser.known_options())
        return sorted(name for name in names if name.startswith("--"))


def check_target(option: str, path: Path | None, *, text: bool = True) -> None:
    """Raise `ConfigError` unless a file can be written to ``path``; None means there is nothing
    to write.

    Binary results (``*.shoal`` documents, keys) have ``text=False`` and are never written to
    standard output. Without this check, a file named ``-`` would be left in the working
    directory.
    """
    if path == STANDARD_OUTPUT and not text:
        raise ConfigError(f"{option} -: this is no text for standard output; name a file")
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: that is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {folder}; make it first (mkdir -p {folder})"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write there")


def write_text(option: str, path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, which was given as ``option``; ``-`` is standard output.

    If ``-`` was given, messages for people go to standard error.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        return
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text.rstrip("\n") + "\n")
        return
    try:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from None


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is not from {least} to {most}")
        return number

    return read


def multiaddr(text: str) -> Multiaddr:
    """Parse an address, as an argparse type."""
    try:
        return Multiaddr.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def bootstrap_addr(text: str) -> Multiaddr:
    """Parse the address of a peer, which must name its id, as an argparse type."""
    try:
        addr = Multiaddr.parse(text)
        if addr.peer_id is None:
            raise ValueError(f"{text} must end in /p2p/ and the peer's id")
    except ValueError as error:
        why = str(error).partition("; write")[0]
        raise argparse.ArgumentTypeError(
            f"{why}; write for example /ip4/1.2.3.4/tcp/4001/p2p/ID, as that node prints it"
        ) from None
    return addr


def host_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, as an argparse type."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 0.0.0.0:8000")
    return host.strip("[]"), int(port)


def seconds(text: str) -> float:
    """Parse a positive and finite number of seconds, as an argparse type."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive: it is a number of seconds")
    return number


BEGINS_AGAIN: Final = "interrupted: nothing is kept, and the same line begins again"
"""Message after Ctrl-C for a command that keeps none of its unfinished work."""


def interruptible(command: Callable[[], int], said: str = "") -> int:
    """Run a command of a person at a keyboard and return its exit code (docs/exit-codes.md).
    After Ctrl-C `said` is printed, for commands that have not said by themselves what was done,
    and how it goes on.

    This is the border of every command line. It answers what the command itself did not catch:

    - Ctrl-C, however often pressed. Python turns a SIGINT into `KeyboardInterrupt` wherever the
      main thread is, also in the lines that handle the first one: from the first on, further
      ones are ignored. What is cleaned up then is bounded by those who clean up.
    - An error of ours or of the operating system: one sentence, without a traceback.
    - An output that is closed, full, or cannot encode a sign.
    - A bug: it shows what was raised. Python prints no group within ten others, and a node's
      tasks are within more.
    """
    _prepare_output()
    try:
        try:
            return _with_flushed_output(command)
        except (
            KeyboardInterrupt, SystemExit, ShoalError, OSError, UnicodeEncodeError,
            BaseExceptionGroup,
        ) as error:  # fmt: skip # no bug, or one too deep in a group to be printed
            if not is_interrupt(error):
                return _judge(error)
            ignore_interrupts()
    except KeyboardInterrupt:  # the second, before it could be ignored
        ignore_interrupts()
    if said and sys.stderr is not None:
        print(said, file=sys.stderr)  # noqa: T201 - one sentence for people
    return INTERRUPTED


def _with_flushed_output(command: Callable[[], int]) -> int:
    try:
        code = command()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich, which has no better word
            _leave_unread()
            return UNHEARD
        _flush(sys.stdout)
        raise
    _flush(sys.stdout)
    return code


def _judge(error: BaseException) -> int:
    """Return the exit code for the error that ended a command. Raise bugs and `SystemExit`
    again."""
    causes = list(leaves(error))
    if all(isinstance(cause, ShoalError) for cause in causes):
        for message in dict.fromkeys(map(str, causes)):
            complain(message)
        is_usage = all(isinstance(cause, ConfigError) for cause in causes)
        return WRONG_USAGE if is_usage else FAILED
    if any(isinstance(cause, BrokenPipeError) for cause in causes) and _leave_unread():
        return UNHEARD
    if all(map(_is_surroundings, causes)):
        complain("; ".join(dict.fromkeys(map(_words, causes))))
        for stream in (sys.stdout, sys.stderr):
            try:
                _flush(stream)
            except OSError:
                _leave(stream)  # what it did not take would be tried again at the end
        return FAILED
    if not isinstance(error, SystemExit):
        # Exceptions of a crash that are shown whole. Mostly it is one, and all else is
        # cancelled.
        for leaf in islice(causes, 4):
            error.add_note("".join(traceback.format_exception(leaf)))
    raise error


def _is_surroundings(error: BaseException) -> bool:
    """Return True if the operating system refused, or its locale lacks the characters of a
    name."""
    if isinstance(error, UnicodeEncodeError):
        return error.encoding not in {"utf-8", "utf8"}
    return isinstance(error, OSError)


def _words(error: BaseException) -> str:
    """Return the operating system's message. An error without a file name is about an
    output."""
    if isinstance(error, UnicodeEncodeError):
        return unencodable(error)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None and error.errno in {errno.ENOSPC, errno.EIO, errno.EBADF}:
        return f"the output cannot be written: {error.strerror}"
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def _leave_unread() -> bool:
    """Redirect standard output or standard error to nowhere if its reader has gone. Return True
    if one had."""
    gone = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                gone.append(stream)
    for stream in gone:
        _leave(stream)
    return bool(gone)


def _prepare_output() -> None:
    """Make outputs escape characters that their encoding lacks. Redirect a stream that was
    closed at the start (``>&-``) to nowhere; otherwise a file could get its descriptor."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush(stream: TextIO | None) -> None:
    """Flush ``stream`` unless a test or a program has closed it.

    Raises:
        OSError: The output cannot be written.
    """
    with contextlib.suppress(ValueError):
        if stream is not None:
            stream.flush()


def _leave(stream: TextIO | None) -> None:
    """Discard pending output of ``stream``, which nobody reads, so that Python does not
    complain at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def is_interrupt(error: BaseException) -> bool:
    """Return True if ``error`` is a `KeyboardInterrupt` or a group that contains one."""
    return any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def ignore_interrupts() -> None:
    """Ignore further Ctrl-C, because this process is ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def complain(error: object) -> None:
    """Print an error as one sentence on standard error, unless its reader has gone."""
    try:
        said = printable_lines(f"error: {error}")
        print(said, file=sys.stderr, flush=True)  # noqa: T201 - for people
    except OSError:
        _leave(sys.stderr)


def remark(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)  # noqa: T201 - one sentence for people


def say(text: str) -> None:
    """Print the result of a command. If the reader has gone, `interruptible` ends the
    command."""
    print(text, flush=True)  # noqa: T201 - standard output is for results


def tell(text: str, end: str = "\n") -> None:
    """Print progress of a command. If the reader has gone, the command goes on."""
    try:
        print(text, end=end, flush=True)  # noqa: T201 - standard output is for people here
    except BrokenPipeError:
        _leave(sys.stdout)
    except OSError:
        pass  # a full disk: there may be room for the next line


@contextlib.contextmanager
def patience(text: str) -> Iterator[Callable[[], None]]:
    """Say on standard error what a command waits for, after `SOON` seconds. The end of the
    block, or a call of the yielded function, cancels this."""
    timer = threading.Timer(SOON, lambda: print(text, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def expanded(path: Path) -> Path:
    """Return ``path`` with ``~`` replaced by the home folder.

    Raises:
        ConfigError: This user has no home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} cannot be found: this user has no home folder (neither HOME nor an entry"
            " in passwd); set HOME, or name a folder"
        ) from None
