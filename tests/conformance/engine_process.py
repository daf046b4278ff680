"""An engine's worker process, called from a test that has no event loop, by any Python."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from roles.engines import codec
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import EngineConfig, config_to_wire
from roles.engines.content import ContentFile
from roles.engines.mapped import open_content, write_content

T = TypeVar("T")

MOST = 1 << 24
"""Bytes of content."""
ROOT = Path(__file__).parent.parent.parent


class EngineProcess:
    """Calls cross the pipe as a node's do, and content goes by file."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._read = 0
        self.has_room = True
        self.placement: list[Any] = []
        """What it computes with, as it said."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def call(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = codec.encode_request(method, *arguments)
        self._process.stdin.write(len(request).to_bytes(codec.LENGTH_BYTES, "big") + request)
        self._process.stdin.flush()
        length = int.from_bytes(self._process.stdout.read(codec.LENGTH_BYTES), "big")
        assert length, f"the worker ended in {method} (its standard error says why)"
        reply = codec.decode_reply(self._process.stdout.read(length))
        if isinstance(reply, codec.Failure):
            raise EngineError(f"{method} failed with {reply.kind}: {reply.message}")
        return reply

    def load(self, weights: Path) -> None:
        self.call("load", str(weights))

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        self.has_room = self.call("submit", MOST, astuple(sampling), self.tasks(tasks))

    def advance(self, seconds: float) -> list[Group]:
        path = str(self._folder / "ended")
        read, self._read = self._read, 0
        self.has_room, file = self.call("advance", path, MOST, seconds, read)
        if not file:
            return []
        with open_content(ContentFile.from_wire(file), codec.decode_group, MOST) as groups:
            self._read = len(groups)
            return list(groups)

    def drop(self) -> None:
        self.call("drop")
        self._read = 0

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        claims = self.written("claims", map(codec.encode_group, groups))
        return self.ask("score", codec.decode_scored, sampling, self.tasks(tasks), claims)

    def tasks(self, tasks: Sequence[GroupTask]) -> list[object]:
        return self.written("tasks", map(codec.encode_task, tasks))

    def written(self, name: str, records: Iterable[bytes]) -> list[object]:
        return write_content(str(self._folder / name), records, MOST).to_wire()

    def ask(
        self, method: str, decode: Callable[[bytes], T], sampling: Sampling, *files: object
    ) -> list[T]:
        path = str(self._folder / "answered")
        file = ContentFile.from_wire(self.call(method, path, MOST, astuple(sampling), *files))
        with open_content(file, decode, MOST) as answered:
            return list(answered)


@contextmanager
def open_engine_process(python: str, config: EngineConfig) -> Iterator[EngineProcess]:
    """Ends with the block."""
    with (
        TemporaryDirectory(prefix="shoal-content-") as folder,
        subprocess.Popen(
            [python, "-m", "roles.engines.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        engine = EngineProcess(process, Path(folder))
        engine.placement = engine.call("configure", config_to_wire(config))
        yield engine
        process.kill()
