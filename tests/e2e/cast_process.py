"""``shoal push``, ``pull`` and ``serve`` as processes, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILES = {
    "config.json": b"{}",
    "model-00001.bin": bytes(range(251)) * 16_000,
    "sub/model-00002.bin": bytes(range(241)) * 9_000,
    "empty": b"",
}
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0", "--json")


class Cast:
    """One command, and what it has said so far."""

    def __init__(
        self, command: str, *arguments: object, inside: Sequence[str] = (), **more: Any
    ) -> None:
        code = f"import sys; from p2p import cast; sys.exit(cast.{command}(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
        )  # fmt: skip
        self._said: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._said.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def said(
        self,
        kind: str,
        timeout: float = 60,
        that: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Wait for an event, and one ``that`` is as expected."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self._said if e["event"] == kind and that(e)), None)

        with self._news:
            self._news.wait_for(lambda: found() or self.process.poll() is not None, timeout)
            event = found()
        assert event is not None, (kind, self._said[-1:], self.errors())
        return event

    def all_said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._said if event["event"] == kind]

    def errors(self) -> str:
        if self.process.poll() is None:
            return ""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> int:
        """Its exit status."""
        status = self.process.wait(60)
        self._reader.join()
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def cast(command: str, *arguments: object, **more: Any) -> Iterator[Cast]:
    one = Cast(command, *arguments, **more)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def push_of(source: Path, data: Path, *more: object) -> Iterator[tuple[Cast, str]]:
    with cast("push", source, "--data", data, *LOCAL, *more) as push:
        yield push, push.said("ticket")["ticket"]


def wait_until(condition: Callable[[], bool]) -> None:
    """Look at what another process writes until it is as expected."""
    pause = threading.Event()
    for _ in range(9_000):  # 90 s, and more on a loaded machine
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came to be")


def folder_at(path: Path) -> Path:
    for name, data in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {
        found.relative_to(path).as_posix(): found.read_bytes()
        for found in path.rglob("*")
        if found.is_file() and not found.relative_to(path).parts[0].startswith(".shoal")
    }
