"""A terminal of 80 x 24 with a person before it: what a command shows there, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS, COLUMNS = 24, 80
PATIENCE = 240.0
"""Seconds for a command to say or do something, on a busy machine."""
MOST = 8 << 20
"""Bytes that it may show before it shows what is waited for: ten minutes of a busy view."""
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """One command of this Python in a terminal of its own."""

    def __init__(
        self, command: Sequence[str], cwd: Path | None, env: Mapping[str, str]
    ) -> None:
        self._said = bytearray()
        self.pid, self._keys = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite in the background ignores it
            os.chdir(cwd or ROOT)
            paths = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
            os.execve(
                sys.executable, [sys.executable, *command], {**os.environ, **paths, **env}
            )
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, size)

    @property
    def said(self) -> str:
        """All that it has shown, without colours and movements of the cursor."""
        return STYLE.sub("", self._said.decode(errors="replace")).replace("\r", "\n")

    def _read(self) -> bool:
        """Take what it shows next; False at its end."""
        if not select.select([self._keys], [], [], PATIENCE)[0]:
            raise AssertionError(f"it says no more: {self.said[-2000:]}")
        with suppress(OSError):  # the last process that had the terminal has ended
            data = os.read(self._keys, 65536)
            self._said += data
            return bool(data)
        return False

    def wait(self, text: str) -> None:
        """Return once it has shown ``text``."""
        while text not in self.said:
            assert self._read(), f"it ended without {text!r}: {self.said[-3000:]}"
            assert len(self._said) < MOST, f"it does not say {text!r}: {self.said[-3000:]}"

    def press_ctrl_c(self) -> None:
        """Send what the key does."""
        os.write(self._keys, b"\x03")

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._keys, f"{text}\n".encode())

    def end(self) -> int:
        """Return the exit code once it has ended."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Kill it if it is still there."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._keys)


@contextmanager
def terminal(*command: str, cwd: Path | None = None, **env: str) -> Iterator[Terminal]:
    """Run ``python COMMAND`` in a terminal for the length of the block."""
    shown = Terminal(command, cwd, env)
    try:
        yield shown
    finally:
        shown.close()
