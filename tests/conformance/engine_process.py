"""An engine's worker process, called from a test that has no event loop, by any Python."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from proofs.checks import Evidence
from roles.engines import codec
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import EngineConfig, config_to_wire

ROOT = Path(__file__).parent.parent.parent


class EngineProcess:
    """Calls cross the pipe as a node's do."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

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

    def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        wire = [codec.task_to_wire(task) for task in tasks]
        groups = self.call("generate", wire, astuple(sampling))
        return [codec.group_from_wire(group) for group in groups]

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        wire = [codec.task_to_wire(task) for task in tasks]
        claims = [codec.group_to_wire(group) for group in groups]
        found = self.call("score", wire, claims, astuple(sampling))
        return [Scored(Evidence(*evidence), logprobs) for evidence, logprobs in found]


@contextmanager
def open_engine_process(python: str, config: EngineConfig) -> Iterator[EngineProcess]:
    """Ends with the block."""
    with subprocess.Popen(
        [python, "-m", "roles.engines.worker"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        engine = EngineProcess(process)
        engine.call("configure", config_to_wire(config))
        yield engine
        process.kill()
