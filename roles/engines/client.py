"""An engine as a role sees it: ``async with open_engine(world, config) as engine``.

Paths are those of the node's disk (`p2p.world.Disk`). Importing this imports neither torch nor
numpy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from typing import Any, Final

from p2p.errors import ConfigError, MissingDependency, ShoalError, StorageError
from p2p.world import Worker, World
from proofs.checks import Evidence
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Engine,
    EngineError,
    Group,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import EngineConfig, config_to_wire
from roles.engines.fake import FakeEngine

WORKER_ARGV: Final = ("roles.engines.worker",)
"""What `World.open_worker` runs, as ``python -m``."""

_KINDS: Final[dict[str, type[ShoalError]]] = {
    "ConfigError": ConfigError,
    "MissingDependency": MissingDependency,
    "StorageError": StorageError,
    "OSError": StorageError,  # a full disk, in the worker's words
}
"""Errors that mean the same on both sides of the pipe; the others become `EngineError`."""


@asynccontextmanager
async def open_engine(
    world: World, config: EngineConfig, *, name: str = "engine"
) -> AsyncIterator[Engine]:
    """Run an engine for the length of the block; its process ends with the block.

    Raises `ConfigError` or `MissingDependency` if it cannot be built, `WorkerDied` from any
    method if its process ends, `EngineError` if a method fails.
    """
    if config.kind == "fake":
        yield FakeEngine(world, config)
        return
    async with world.open_worker(WORKER_ARGV, name=name) as worker:
        engine = WorkerEngine(world, worker)
        await engine.configure(config)
        yield engine


class WorkerEngine:
    """An engine in a worker process. Calls wait for their turn."""

    def __init__(self, world: World, worker: Worker) -> None:
        self._locate = world.disk.locate
        self._worker = worker

    async def configure(self, config: EngineConfig) -> None:
        """Build the engine; once, before anything else."""
        await self._call("configure", config_to_wire(config))

    async def load(self, weights: str) -> None:
        """See `roles.engines.base.Generator`."""
        await self._call("load", self._locate(weights))

    async def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        """See `roles.engines.base.Generator`."""
        value = await self._call(
            "generate", [codec.task_to_wire(task) for task in tasks], astuple(sampling)
        )
        return [codec.group_from_wire(group) for group in value]

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Evidence]:
        """See `roles.engines.base.Scorer`."""
        value = await self._call(
            "score",
            [codec.task_to_wire(task) for task in tasks],
            [codec.group_to_wire(group) for group in groups],
            astuple(sampling),
        )
        return [Evidence(*row) for row in value]

    async def open(self, checkpoint: str, base: str = "") -> int:
        """See `roles.engines.base.Learner`."""
        return int(await self._call("open", self._locate(checkpoint), self._located(base)))

    async def adopt(self, weights: str, step: int) -> None:
        """See `roles.engines.base.Learner`."""
        await self._call("adopt", self._locate(weights), step)

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """See `roles.engines.base.Learner`."""
        return StepReport(
            *await self._call("step", [codec.training_to_wire(group) for group in groups])
        )

    async def save(self, checkpoint: str, weights: str) -> None:
        """See `roles.engines.base.Learner`."""
        await self._call("save", self._located(checkpoint), self._located(weights))

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """See `roles.engines.base.Learner`."""
        value = await self._call(
            "answer", [codec.task_to_wire(task) for task in tasks], astuple(sampling)
        )
        return [tuple(tuple(tokens) for tokens in answers) for answers in value]

    def _located(self, path: str) -> str:
        """As the worker would open it; what is empty stays so."""
        return self._locate(path) if path else ""

    async def _call(self, method: str, *arguments: object) -> Any:
        request = codec.encode_request(method, *arguments)
        if len(request) > codec.MAX_FRAME:
            raise EngineError(
                f"{method}: a request of {len(request)} bytes is over the limit of"
                f" {codec.MAX_FRAME}"
            )
        reply = codec.decode_reply(await self._worker.call(request))
        if isinstance(reply, codec.Failure):
            raise _KINDS.get(reply.kind, EngineError)(
                f"{method} failed with {reply.kind}: {reply.message}"
            )
        return reply
