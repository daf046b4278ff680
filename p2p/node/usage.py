"""What every command line of ours does alike: options checked first, errors ended in one place.

A command that computes for an hour and cannot write its result then has wasted the hour, so
every path it will write to is checked first. A word that is not known is answered with the
nearest one that is. `interruptible` is the border of every command: what ends it there is a
sentence and an exit code, and only a bug is a traceback.
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
from typing import Final, NoReturn, TextIO

from p2p.concurrency import leaves
from p2p.errors import ConfigError, ShoalError
from p2p.multiaddr import Multiaddr
from p2p.naming import unencodable

FAILED: Final = 1
"""Exit code: something went wrong, and the command line was right."""
WRONG_USAGE: Final = 2
"""Exit code for a wrong command line, or a wrong file named on it, before anything has begun;
argparse uses it too."""
INTERRUPTED: Final = 130
"""Exit code of Ctrl-C: 128 and the number of SIGINT, as shells have it."""
UNHEARD: Final = 141
"""Exit code where the reader of standard output has gone: 128 and the number of SIGPIPE."""
SOON: Final = 2.0
"""Seconds after which a command that is silent says what it waits for: a person wonders."""
DATA: Final = Path("~/.shoal")
"""Where a node keeps its data unless it is told (`expanded`)."""
STANDARD_OUTPUT: Final = Path("-")
"""Stands for standard output where a file may be named, as in most commands."""
MAX_NAMED: Final = 40
"""Known words that a sentence lists: all scenarios, commands and keys; not the 10,000 nodes of
a swarm."""


def did_you_mean(word: str, known: Iterable[str], what: str = "there are") -> str:
    """The end of a sentence about a word that is not known: the nearest one, or all."""
    names = sorted(known)
    # Words this similar, by difflib's ratio, are suggested: ``traner`` and ``trainer`` have
    # 0.92, ``rnu`` and ``run`` 0.67, ``role`` and ``open`` 0.5. Dashes make no likeness.
    bare = {name.lstrip("-"): name for name in names}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    if near:
        return f"did you mean {bare[near[0]]!r}?"
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{what}: {', '.join(names[:MAX_NAMED]) or 'none'}{rest}"


_NO_CHOICE: Final = re.compile(r"argument (\S+): invalid choice: (.*?) \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """argparse's, and a command, option or value that there is not is answered with the nearest
    that there is."""

    def format_help(self) -> str:
        """Return the help without the marks that code has in docstrings."""
        return super().format_help().replace("``", "")

    def error(self, message: str) -> NoReturn:
        """End with `WRONG_USAGE` and one sentence."""
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        word = rest.split()[0].partition("=")[0] if rest.split() else ""
        if is_unknown and word.startswith("-"):
            message = f"there is no option {word}; {did_you_mean(word, self.known_options())}"
        elif found := _NO_CHOICE.fullmatch(message):
            what, word, known = found[1], found[2].strip("'"), found[3].replace("'", "")
            kind = f"value of {what}" if what.startswith("-") else "command"
            message = f"there is no {kind} {word!r}; {did_you_mean(word, known.split(', '))}"
        super().error(message)

    def known_options(self) -> list[str]:
        """The long options of this parser and of its commands."""
        commands = [
            parser
            for action in self._actions
            if isinstance(action.choices, dict)
            for parser in action.choices.values()
        ]
        own = [name for action in self._actions for name in action.option_strings]
        below = [
            name
            for parser in commands
            if isinstance(parser, CommandParser)
            for name in parser.known_options()
        ]
        return sorted({name for name in (*own, *below) if name.startswith("--")})


def check_target(option: str, path: Path | None, *, text: bool = True) -> None:
    """Raise `ConfigError` unless a file can be written to ``path``; None is nothing to write.

    What is no text (``*.shoal`` documents, keys) has ``text=False``, and is never written to
    standard output: without this check a file called ``-`` would lie in the working directory
    afterwards.
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
    """Write ``text`` for a person who gave ``option``; ``-`` is standard output.

    Raises `ConfigError` when the disk refuses. Where ``-`` was given, what is for people goes
    to standard error.
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
    """An argparse type: a whole number from ``least`` to ``most``."""

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
    """An argparse type: where a peer listens."""
    try:
        return Multiaddr.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def host_port(text: str) -> tuple[str, int]:
    """HOST:PORT, for argparse."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 0.0.0.0:8000")
    return host.strip("[]"), int(port)


def seconds(text: str) -> float:
    """An argparse type: seconds, positive and finite."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive: it is a number of seconds")
    return number


_JUDGED: Final = (
    KeyboardInterrupt, SystemExit, ShoalError, OSError, UnicodeEncodeError, BaseExceptionGroup
)  # fmt: skip
"""What may end a command without being a bug, or hold one too deep to be printed."""


BEGINS_AGAIN: Final = "interrupted: nothing is kept, and the same line begins again"
"""What a command says after Ctrl-C that has no use for half of its work."""


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
        except _JUDGED as error:
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
    """Answer what ended a command; the exit code. Raise what is a bug, and `SystemExit`."""
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
    """Return True if the operating system refused, or its locale lacks the signs of a name."""
    if isinstance(error, UnicodeEncodeError):
        return error.encoding not in {"utf-8", "utf8"}
    return isinstance(error, OSError)


def _words(error: BaseException) -> str:
    """What the operating system says. What it says of no file is about an output."""
    if isinstance(error, UnicodeEncodeError):
        return unencodable(error)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None and error.errno in {errno.ENOSPC, errno.EIO, errno.EBADF}:
        return f"the output cannot be written: {error.strerror}"
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def _leave_unread() -> bool:
    """Leave standard output or standard error where its reader has gone; True if one had."""
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
    """Let every sign be written: what the encoding lacks comes as an escape. A stream that was
    closed at the start (``>&-``) leads nowhere: its number would become a file's."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush(stream: TextIO | None) -> None:
    """Raises `OSError`, and does nothing with a stream that a test or a program has closed."""
    with contextlib.suppress(ValueError):
        if stream is not None:
            stream.flush()


def _leave(stream: TextIO | None) -> None:
    """Let what is still to be written to ``stream`` go nowhere: nobody reads it, and Python
    would complain of that at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def is_interrupt(error: BaseException) -> bool:
    """Whether ``error`` is a `KeyboardInterrupt`, or a group of which one is: trio wraps what
    it raises."""
    return any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def ignore_interrupts() -> None:
    """Hear no further Ctrl-C: this process is ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def complain(error: object) -> None:
    """Print one sentence on standard error, if somebody hears it."""
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201 - for people
    except OSError:
        _leave(sys.stderr)


def remark(text: str) -> None:
    """Print on standard error what is no error, and a person should know."""
    print(f"note: {text}", file=sys.stderr)  # noqa: T201 - one sentence for people


def say(text: str) -> None:
    """Print the result of a command. If who listened has gone, `interruptible` ends it."""
    print(text, flush=True)  # noqa: T201 - standard output is for results


def tell(text: str, end: str = "\n") -> None:
    """Print what a command says while it works. If who listened has gone, the work goes on."""
    try:
        print(text, end=end, flush=True)  # noqa: T201 - standard output is for people here
    except BrokenPipeError:
        _leave(sys.stdout)
    except OSError:
        pass  # a full disk: there may be room for the next line


@contextlib.contextmanager
def patience(text: str) -> Iterator[Callable[[], None]]:
    """Say on standard error what a command waits for, unless the block is over soon, or the
    function that this gives is called: it has heard something."""
    timer = threading.Timer(SOON, lambda: print(text, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def expanded(path: Path) -> Path:
    """``path`` with ``~`` replaced by the home folder. Raises `ConfigError`."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} cannot be found: this user has no home folder (neither HOME nor an entry"
            " in passwd); set HOME, or name a folder"
        ) from None
