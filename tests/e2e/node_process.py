"""Real node processes for end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 60  # for a process to say something, on a busy machine
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


class NodeProcess:
    """``python -m p2p.node``, its JSON lines, its end."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "p2p.node", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )

    def line(self) -> dict[str, Any]:
        """The next JSON line; fails when there is none in time."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        text = self.process.stdout.readline()
        timer.cancel()
        if not text:
            assert self.process.stderr is not None
            raise AssertionError(f"the node ended: {self.process.stderr.read()}")
        found: dict[str, Any] = json.loads(text)
        return found

    def line_with(self, key: str, value: object) -> dict[str, Any]:
        """The first JSON line from now on that says so."""
        while (line := self.line()).get(key) != value:
            pass
        return line

    def interrupt(self) -> int:
        """Ctrl-C; the exit code. Fails if it takes more than 3 s."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=3)


@contextmanager
def node(data: Path, *arguments: str, **env: str) -> Iterator[NodeProcess]:
    """A node on loopback that speaks JSON, killed if it is still there at the end."""
    running = NodeProcess(["--data", str(data), "--json", *LOOPBACK, *arguments], env)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def fail(*arguments: str, **env: str) -> tuple[int, str]:
    """Exit code and standard error of a node that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "p2p.node", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
        env=os.environ | env,
    )
    return done.returncode, done.stderr
