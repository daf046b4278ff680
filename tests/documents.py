"""Follows a page as a reader would: writes the files that it shows, types its commands, and
compares what they print with what the page says that they print.

A comment in front of a block says what is special about it: ``file: NAME`` (the block is that
file), ``stays`` (its last command runs on, until the page ends or types the same line again),
``slow`` (only a deep run plays it), ``not played: WHY``.

Of a command's output a page shows the lines that matter, in their order. Numbers may differ;
an id or an address stands for whatever the command printed in its place, in later commands
too, and /home/you for the reader's home, /home/you/shoal for a checkout.

A reader ``in_terminal`` sits before one of 80 x 24, which shows a view instead of lines: what a
page shows need not come there, but each command must end well, and without a traceback.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

from tests.sweeps import DEEP
from tests.terminal import COLUMNS, ROWS, STYLE

ROOT: Final = Path(__file__).parent.parent
PATIENCE: Final = 1500
"""Seconds for what a command is to print; a run on a busy machine takes most of them."""
TRIES: Final = 75
"""How often somebody before a terminal types a command again that asks a node which starts."""
LANGUAGES: Final = ("console", "js", "python", "toml")
MARK: Final = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->\n\Z")
NAMES: Final = r"/ip4/\S+|12D3Koo\w+|\b[0-9a-f]{8,}\b"
"""What a page may bind: addresses, ids, digests."""
PARTS: Final = re.compile(rf"({NAMES})|(\d[\d,.]*)|(\s+)|(\.\.\.)")


class Reader:
    """Somebody who follows one page, in a home of their own."""

    def __init__(self, home: Path, *, in_terminal: bool = False) -> None:
        self._home = home
        self._in_terminal = in_terminal
        self._meant = {"/home/you": str(home), "/home/you/shoal": str(ROOT)}
        self._running: dict[str, subprocess.Popen[str]] = {}
        # What the page installs lies in this home, and models are not fetched for each home.
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        installed = {"PIP_TARGET": str(home / "installed"), "PIP_NO_DEPS": "1"}
        self._env = os.environ | installed | {
            "HOME": str(home),
            "XDG_CACHE_HOME": cache,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), installed["PIP_TARGET"]]),
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the option: do not isolate
            "COLUMNS": "120",
        }  # fmt: skip
        if in_terminal:
            self._env |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm"}

    def follow(self, page: Path) -> int:
        """Play a page's blocks; returns how many were played."""
        parsers = [CodeBlockParser(language, self._play) for language in LANGUAGES]
        self._played = 0
        try:
            for example in Document.parse(str(page), *parsers):
                example.evaluate()
        finally:
            for command in list(self._running):
                self._end(command)
        return self._played

    def _play(self, example: Example) -> None:
        mark = MARK.search(example.document.text[: example.start])
        kind, rest = (mark[1], mark[2]) if mark else ("", None)
        if kind == "not played" or (kind == "slow" and not DEEP):
            return
        self._played += 1
        if kind == "file":
            target = self._home / rest
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self._with_names(example.parsed), encoding="utf-8")
            return
        assert example.region.lexemes["arguments"] == "console", "what is done with the block?"
        commands = re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)
        assert not commands[0].strip(), "a block of commands begins with one"
        for place, text in enumerate(commands[1:], 2):
            line, _, shown = re.sub(r"\\\n\s*", "", text).partition("\n")
            stays = place == len(commands) and (kind == "stays" or rest == "stays")
            self._type(line.partition("  #")[0].strip(), shown.splitlines(), stays=stays)

    def _type(self, command: str, shown: list[str], *, stays: bool, tries: int = TRIES) -> None:
        command = self._with_names(command)
        self._end(command)
        process, output = self._begin(f"exec {command}" if stays else command)
        self._running[command] = process
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        said, lines = list[str](), _lines(output)
        try:
            wanted = [line for line in shown if line.strip() not in ("", "...")]
            for line in wanted[: 1 if stays and self._in_terminal else None]:
                self._wait(command, line, lines, said)
            rest = threading.Thread(target=lambda: said.extend(lines), daemon=True)
            rest.start()  # a terminal that nobody reads stops who writes to it
            if not stays:
                process.wait()
                rest.join()
                del self._running[command]
                if process.returncode and self._in_terminal and self._running and tries:
                    threading.Event().wait(PATIENCE / TRIES)  # a node that is not so far yet
                    return self._type(command, shown, stays=False, tries=tries - 1)
                told = f"{command}: exit code {process.returncode}\n{''.join(said)[-3000:]}"
                assert process.returncode == 0, told
                assert "Traceback" not in "".join(said), told
        finally:
            watchdog.cancel()

    def _begin(self, command: str) -> tuple[subprocess.Popen[str], IO[str]]:
        start: Any = partial(
            subprocess.Popen, ["bash", "-c", command], cwd=self._home, env=self._env, text=True,
            start_new_session=True,
        )  # fmt: skip
        if not self._in_terminal:
            process = start(
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            return process, process.stdout
        screen, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        take = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
        process = start(stdin=tty, stdout=tty, stderr=tty, preexec_fn=take)
        os.close(tty)
        return process, open(screen, encoding="utf-8", errors="replace")

    def _wait(self, command: str, line: str, lines: Iterator[str], said: list[str]) -> None:
        """Read on until a line of the page has come. A terminal may show all but this one."""
        pattern, names = self._pattern(line)
        before = [*said] if self._in_terminal else []
        for one in chain(before, map(partial(_kept, said), lines)):
            if found := pattern.fullmatch(one.rstrip()):
                self._meant |= dict(zip(names, found.groups(), strict=True))
                return
        assert self._in_terminal, f"$ {command}\nnever said: {line}\nbut: {''.join(said)}"

    def _pattern(self, line: str) -> tuple[re.Pattern[str], list[str]]:
        """What a shown line stands for, and the names of the page that it gives a meaning."""
        pattern, names, place = "", [], 0
        line = self._with_names(line.rstrip())
        for part in PARTS.finditer(line):
            pattern += re.escape(line[place : part.start()])
            place = part.end()
            if part[1] and part[1] not in self._meant.values():
                names.append(part[1])
                pattern += r"(\S+)"
            elif part[1]:
                pattern += re.escape(part[1])
            else:
                pattern += r"[\d,.]+" if part[2] else r"\s+" if part[3] else ".*"
        return re.compile(pattern + re.escape(line[place:])), names

    def _with_names(self, text: str) -> str:
        for name in sorted(self._meant, key=len, reverse=True):
            text = text.replace(name, self._meant[name])
        return text

    def _end(self, command: str) -> None:
        if process := self._running.pop(command, None):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _kept(said: list[str], line: str) -> str:
    said.append(line)
    return line


def _lines(output: IO[str]) -> Iterator[str]:
    """Yield what a command says, without colours and movements of the cursor."""
    with output, suppress(OSError, ValueError):  # the end of a terminal
        for line in output:
            yield from STYLE.sub("", line).replace("\r\n", "\n").splitlines(keepends=True)
