"""An engine's worker process, called from a test that has no event loop, by any Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from p2p.node.tables import write_table
from p2p.sandbox import Confinement
from p2p.sandbox.entry import READY
from p2p.sandbox.launch import find_containment, launch
from roles.engines import codec
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import EngineConfig
from roles.workers.calls import Failure, decode_reply, encode_request, read_frame, write_frame
from roles.workers.files import MappedRecords, RecordFile, write_records

T = TypeVar("T")

ROOT = Path(__file__).parent.parent.parent


class EngineProcess:
    """Calls cross the pipe as a node's do, and content goes by file."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._files = 0
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
        write_frame(self._process.stdin, encode_request(method, *arguments))
        frame = read_frame(self._process.stdout)
        assert frame, f"the worker ended in {method} (its standard error says why)"
        reply = decode_reply(frame)
        if isinstance(reply, Failure):
            raise EngineError(f"{method} failed with {reply.kind}: {reply.message}")
        return reply

    def load(self, weights: Path) -> None:
        self.call("load", str(weights))

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        self.has_room = self.call("submit", astuple(sampling), self.tasks(tasks))

    def advance(self, seconds: float) -> list[Group]:
        path = self._new("ended")
        self.has_room, _, file = self.call("advance", path, seconds)
        return list(MappedRecords(RecordFile(*file), codec.decode_group)) if file else []

    def drop(self) -> None:
        self.call("drop")

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        claims = self.written("claims", map(codec.encode_group, groups))
        return self.ask("score", codec.decode_scored, sampling, self.tasks(tasks), claims)

    def tasks(self, tasks: Sequence[GroupTask]) -> RecordFile:
        return self.written("tasks", map(codec.encode_task, tasks))

    def written(self, name: str, records: Iterable[bytes]) -> RecordFile:
        return write_records(self._new(name), records)

    def _new(self, name: str) -> str:
        """Return a path that no call had."""
        self._files += 1
        return str(self._folder / f"{name}-{self._files}")

    def ask(
        self, method: str, decode: Callable[[bytes], T], sampling: Sampling, *files: object
    ) -> list[T]:
        path = self._new("answered")
        file = self.call(method, path, astuple(sampling), *files)
        return list(MappedRecords(RecordFile(*file), decode))


def is_confined(python: str) -> bool:
    return bool(os.environ.get("SHOAL_SANDBOX")) and python == sys.executable


def _command(python: str, folder: str) -> Sequence[str]:
    if not is_confined(python):
        return [python, "-m", "roles.engines.worker"]
    confined = Confinement(
        readable=(tempfile.gettempdir(),), writable=(folder,), sees_machine=True,
    )  # fmt: skip
    containment = find_containment(folder)
    assert containment.holds, containment.reason
    start = launch(["roles.engines.worker"], confined, containment, folder=folder)
    variables = [f"{name}={value}" for name, value in start.variables.items()]
    return ["env", "-i", *variables, *start.command]


@contextmanager
def open_engine_process(python: str, config: EngineConfig) -> Iterator[EngineProcess]:
    """With SHOAL_SANDBOX=1 an engine of this Python is confined as a node's is."""
    with (
        TemporaryDirectory(prefix="shoal-content-") as folder,
        subprocess.Popen(
            _command(python, folder), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        if is_confined(python):
            assert process.stdout is not None
            assert process.stdout.read(len(READY)) == READY
        engine = EngineProcess(process, Path(folder))
        engine.placement = engine.call("configure", write_table(config))
        yield engine
        process.kill()
