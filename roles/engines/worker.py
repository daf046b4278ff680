"""The worker process of an engine: ``python -m roles.engines.worker``.

`EngineServer` is what a node may call (`roles.workers`), `LocalEngine` what an engine is in its
own process. Files are written atomically, so a process that ends in the middle of a step leaves
nothing to finish.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any, Protocol

from p2p.errors import ConfigError, MissingDependency
from p2p.node.tables import read_table
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Group,
    GroupTask,
    Placement,
    Row,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import AUTO, NODE_ENGINES, EngineConfig
from roles.engines.hardware import gpus, threads_of
from roles.workers.files import MappedRecords, RecordFile, write_records
from roles.workers.server import serve


class LocalEngine(Protocol):
    """The methods of `roles.engines.base` within one process. Paths are those of the operating
    system."""

    def placement(self) -> Placement:
        """Return the engine, device and threads that compute."""
        ...

    def load(self, weights: str) -> None: ...

    @property
    def has_room(self) -> bool: ...

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None: ...

    def advance(self, seconds: float) -> list[Group]:
        """Decode for ``seconds``, and at least one token of each row; see
        `Generator.advance`."""
        ...

    @property
    def waiting(self) -> Sequence[Row]: ...

    def hear(self, answers: Sequence[Row]) -> None: ...

    def drop(self) -> None: ...

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]: ...

    def open(self, checkpoint: str, base: str = "") -> int: ...

    def adopt(self, weights: str, step: int, base: str = "") -> float: ...

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport: ...

    def save(self, checkpoint: str, weights: str) -> None: ...

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]: ...


def draw_all(
    engine: LocalEngine, tasks: Sequence[GroupTask], sampling: Sampling
) -> list[Group]:
    """Draw these tasks alone, as `roles.engines.base.draw_all` does."""
    engine.submit(tasks, sampling)
    ended: dict[int, Group] = {}
    while len(ended) < len(tasks):
        ended |= {group.group: group for group in engine.advance(math.inf)}
    return [ended[task.group] for task in tasks]


def make_engine(config: EngineConfig) -> LocalEngine:
    """Build the engine of ``config.kind``; only here are torch and vLLM imported."""
    match choose_kind(config):
        case "torch":
            return _make_torch(config)
        case "vllm":
            return _make_vllm(config)
        case kind:
            raise ConfigError(
                f"there is no engine {kind!r} for worker processes; installed are"
                f" {' and '.join(NODE_ENGINES)}"
            )


def choose_kind(config: EngineConfig) -> str:
    """Return ``config.kind``, or for ``auto`` the engine that suits: vLLM where it is installed
    and knows the model."""
    if config.kind != AUTO:
        return config.kind
    from roles.engines.vllm import requirements

    return "vllm" if requirements.knows(config, len(gpus())) else "torch"


def _make_torch(config: EngineConfig) -> LocalEngine:
    try:
        from roles.engines.torch.engine import TorchEngine
    except ImportError as error:
        raise MissingDependency(
            f"the torch engine needs torch: pip install 'shoal[torch]' ({error})"
        ) from error
    return TorchEngine(config)


def _make_vllm(config: EngineConfig) -> LocalEngine:
    from roles.engines.vllm import requirements

    requirements.prepare(config.device)  # names the remedy, and must precede what imports torch
    from roles.engines.vllm.engine import VllmEngine

    return VllmEngine(config)


class EngineServer:
    """The methods that a node may call: those of an engine, with files in place of long
    arguments."""

    def __init__(self) -> None:
        self._ended: list[Group] = []
        """Groups that have ended and whose file the disk has not taken yet."""

    def configure(self, table: dict[str, Any]) -> tuple[Any, ...]:
        """Prepare this process, threads and niceness before torch is imported, and build the
        engine."""
        config = read_table(EngineConfig, table, "the engine")
        os.nice(config.nice)
        os.environ["OMP_NUM_THREADS"] = str(threads_of(config))
        self._engine = make_engine(config)
        return astuple(self._engine.placement())

    def load(self, weights: str) -> None:
        self._engine.load(weights)

    def submit(self, sampling: list[Any], tasks: list[Any]) -> bool:
        self._engine.submit(_tasks(tasks), Sampling(*sampling))
        return self._engine.has_room

    def advance(
        self, answer: str, seconds: float
    ) -> tuple[bool, list[object], RecordFile | None]:
        """Decode for a while. Return whether there is room, the rows that wait for an answer,
        and the file of ended groups, if any."""
        with ExitStack() as failing:
            failing.callback(self.drop)
            self._ended += self._engine.advance(seconds)
            failing.pop_all()
        rows = codec.rows_to_wire(self._engine.waiting)
        if not self._ended:
            return self._engine.has_room, rows, None
        file = write_records(answer, map(codec.encode_group, self._ended))
        self._ended.clear()
        return self._engine.has_room, rows, file

    def hear(self, rows: list[Any]) -> None:
        self._engine.hear(codec.rows_from_wire(rows))

    def drop(self) -> None:
        self._ended.clear()
        self._engine.drop()

    def score(
        self, answer: str, sampling: list[Any], tasks: list[Any], claims: list[Any]
    ) -> RecordFile:
        groups = list(MappedRecords(RecordFile(*claims), codec.decode_group))
        scored = self._engine.score(_tasks(tasks), groups, Sampling(*sampling))
        return write_records(answer, map(codec.encode_scored, scored))

    def answer(self, answer: str, sampling: list[Any], tasks: list[Any]) -> RecordFile:
        answers = self._engine.answer(_tasks(tasks), Sampling(*sampling))
        return write_records(answer, map(codec.encode_answers, answers))

    def open(self, checkpoint: str, base: str) -> int:
        return self._engine.open(checkpoint, base)

    def adopt(self, weights: str, step: int, base: str) -> float:
        return self._engine.adopt(weights, step, base)

    def step(self, groups: list[Any]) -> tuple[Any, ...]:
        mapped = MappedRecords(RecordFile(*groups), codec.decode_training)
        return astuple(self._engine.step(mapped))

    def save(self, checkpoint: str, weights: str) -> None:
        self._engine.save(checkpoint, weights)


def _tasks(file: list[Any]) -> list[GroupTask]:
    return list(MappedRecords(RecordFile(*file), codec.decode_task))


def main() -> None:
    """Serve one engine on the standard streams."""
    serve(EngineServer())


if __name__ == "__main__":
    main()
