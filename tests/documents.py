"""Follows a page as a reader would: writes the files that it shows, types its commands, and
compares what they print with what the page says that they print.

A comment in front of a block says what is special about it: ``file: NAME`` (the block is that
file), ``stays`` (its last command runs on, until the page ends or types the same line again),
``slow`` (only a deep run plays it), ``not played: WHY``.

Of a command's output a page shows the lines that matter, in their order. Numbers may differ;
an id or an address stands for whatever the command printed in its place, in later commands
too, and /home/you for the reader's home, /home/you/shoal for a checkout.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

from tests.sweeps import DEEP

ROOT: Final = Path(__file__).parent.parent
PATIENCE: Final = 600
"""Seconds for what a command is to print; a run on a busy machine takes most of them."""
LANGUAGES: Final = ("console", "js", "python", "toml")
MARK: Final = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->\n\Z")
NAMES: Final = r"/ip4/\S+|12D3Koo\w+|\b[0-9a-f]{8,}\b"
"""What a page may bind: addresses, ids, digests."""
PARTS: Final = re.compile(rf"({NAMES})|(\d[\d,.]*)|(\s+)|(\.\.\.)")


class Reader:
    """Somebody who follows one page, in a home of their own."""

    def __init__(self, home: Path) -> None:
        self._home = home
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

    def _type(self, command: str, shown: list[str], *, stays: bool) -> None:
        command = self._with_names(command)
        self._end(command)
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}" if stays else command],
            cwd=self._home, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._running[command] = process
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            self._compare(command, process, [line for line in shown if line.strip() != "..."])
            if not stays:
                process.communicate()
                del self._running[command]
                assert process.returncode == 0, f"{command}: exit code {process.returncode}"
        finally:
            watchdog.cancel()

    def _compare(self, command: str, process: subprocess.Popen[str], shown: list[str]) -> None:
        """Read on until each shown line has come, in its order."""
        assert process.stdout is not None
        said: list[str] = []
        for line in shown:
            if not line.strip():
                continue
            pattern, names = self._pattern(line)
            while True:
                said.append(process.stdout.readline())
                assert said[-1], f"$ {command}\nnever said: {line}\nbut: {''.join(said)}"
                if found := pattern.fullmatch(said[-1].rstrip()):
                    self._meant |= dict(zip(names, found.groups(), strict=True))
                    break

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
            process.communicate()
