"""An engine as a role sees it: ``async with open_engine(world, config) as engine``.

Paths are those of the node's disk (`p2p.world.Disk`). Importing this does not import torch.

A full disk ends no node: completions, scores and answers are asked for again until the disk has
taken their files. So is a step, which the worker begins only once its file is whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple
from typing import Any, Final, TypeVar

import trio

from p2p.errors import ConfigError, MissingDependency, ShoalError, StorageError, WorkerDied
from p2p.node.tables import write_table
from p2p.sandbox import Confinement
from p2p.world import World
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Engine,
    EngineError,
    Group,
    GroupTask,
    Placement,
    Row,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import AUTO, EngineConfig
from roles.engines.fake import FakeEngine
from roles.engines.vllm.requirements import installed
from roles.shared.durable import Durable
from roles.workers.client import Remote, open_remote
from roles.workers.files import Scratch

T = TypeVar("T")

logger = logging.getLogger(__name__)

FOLDER: Final = "engine"
"""Folder on the node's disk with one folder for each role's engine, which holds the content of
the current call."""
WORKER_ARGV: Final = ("roles.engines.worker",)
"""Arguments with which `World.open_worker` starts the process, after ``python -m``."""

VARIABLES: Final = (
    "PATH", "LANG", "LC_*", "TZ",  # of the system
    "LD_*", "MALLOC_*",  # drivers in odd places; allocators that vLLM's authors advise
    "CUDA_*", "NVIDIA_*", "NCCL_*", "HIP_*", "HSA_*", "ROCR_*", "ZE_*", "ONEAPI_*", "SYCL_*",
    "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "GLOO_*",  # threads, and on which cores
    "TORCH*", "PYTORCH_*", "TRITON_*", "VLLM_*",  # what the owner has set
    "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",  # and no HF_TOKEN
    "CC", "CXX",  # Triton compiles
)  # fmt: skip
"""Environment variables of the node that an engine keeps, by which it finds and uses the
machine's accelerators. Keys and tokens of other programs are not passed on."""
TURN: Final = 0.1
"""Seconds that an engine decodes before it looks for new groups, and a role for a new policy. A
turn costs some 2 ms in both processes, a file included: 2 %. At a second, an engine of small
models, with 100,000 tokens a second, would have decoded all that it was given and waited."""


@asynccontextmanager
async def open_engine(
    world: World, config: EngineConfig, *, name: str = "engine", learns: bool = True
) -> AsyncIterator[Engine]:
    """Run an engine for the length of the block; its process ends with the block. Only an
    engine that ``learns`` may write into the folder of its role, which has checkpoints and
    policies.

    Raises `ConfigError` or `MissingDependency` if it cannot be built, `WorkerDied` from any
    method if its process ends (the next call has another, which holds nothing), `WorkerLost` if
    it always does, `EngineError` if a method fails.
    """
    if config.kind == "fake":
        yield FakeEngine(world, config)
        return
    scratch, durable = Scratch(world, f"{FOLDER}/{name}"), Durable(world, name)
    await durable.insist(scratch.clear)
    try:
        async with open_remote(
            world, WORKER_ARGV, name=name, otherwise=EngineError,
            raises=(ConfigError, MissingDependency, StorageError),
            confined=confinement_of(world, config, name, learns=learns),
        ) as remote:  # fmt: skip
            placement = Placement(*await remote.start("configure", write_table(config)))
            logger.info(
                "engine_ready kind=%s device=%s threads=%d",
                placement.engine, placement.device, placement.threads,
            )  # fmt: skip
            if placement.idle:
                logger.warning("%s", placement.idle)
            yield WorkerEngine(world, remote, scratch, durable)
    finally:
        with trio.CancelScope(shield=True), suppress(StorageError):  # or at the next start
            await scratch.clear()


def confinement_of(
    world: World, config: EngineConfig, name: str, *, learns: bool = True
) -> Confinement:
    """Return the confinement of an engine. An engine is our own code and needs drivers wherever
    they lie, so it sees the machine. It writes only its content and, if it learns, the folder
    of its role.

    vLLM, and a learner with several ranks, are several processes that talk to each other by
    sockets.
    """
    may_be_vllm = config.kind == "vllm" or (config.kind == AUTO and bool(installed()))
    is_several = may_be_vllm or config.gpus.ranks > 1
    folders = (f"{FOLDER}/{name}", *([name] if learns else []))
    return Confinement(
        writable=tuple(map(world.disk.locate, folders)),
        sees_machine=True,
        network=is_several,
        forks=is_several,
        variables=VARIABLES,
        required=False,
    )


class WorkerEngine:
    """An engine in a worker process. Calls are made one at a time."""

    def __init__(
        self, world: World, remote: Remote, scratch: Scratch, durable: Durable
    ) -> None:
        self._world, self._remote = world, remote
        self._scratch, self._durable = scratch, durable
        self._has_room = True
        self._under_way = 0  # groups
        self._waiting: list[Row] = []

    @property
    def warning(self) -> str:
        return ""

    @property
    def writes_waiting(self) -> int:
        return self._durable.waiting

    @property
    def has_room(self) -> bool:
        return self._has_room

    async def load(self, weights: str) -> None:
        await self._call("load", self._located(weights))

    async def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        # Repeated only if nothing has begun: the worker reads the file before that.
        self._has_room = await self._ask(
            "submit", sampling, lambda: [map(codec.encode_task, tasks)]
        )
        self._under_way += len(tasks)

    async def advance(self) -> list[Group]:
        if not self._under_way:
            return []
        # Repeated, it gives the same groups, and what has ended meanwhile.
        groups = await self._durable.insist(self._advance)
        self._under_way -= len(groups)
        return groups

    async def _advance(self) -> list[Group]:
        async with self._scratch.files() as (answer, _):
            try:
                self._has_room, rows, file = await self._call("advance", answer, TURN)
                self._waiting = codec.rows_from_wire(rows)
            except StorageError:
                raise
            except ShoalError:
                self._forget()
                raise
            try:
                return await self._scratch.read(file, codec.decode_group) if file else []
            except StorageError as error:
                await self.drop()  # the worker has them no more
                raise EngineError(f"the answer of the engine is lost: {error}") from error

    @property
    def waiting(self) -> Sequence[Row]:
        return self._waiting

    async def hear(self, answers: Sequence[Row]) -> None:
        heard = {(row.group, row.slot) for row in answers}
        self._waiting = [one for one in self._waiting if (one.group, one.slot) not in heard]
        await self._call("hear", codec.rows_to_wire(answers))

    async def drop(self) -> None:
        await self._call("drop")
        self._forget()

    def _forget(self) -> None:
        """Note that no groups are under way any more."""
        self._under_way, self._has_room, self._waiting = 0, True, []

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        scored: list[Scored] = await self._ask(
            "score", sampling,
            lambda: [map(codec.encode_task, tasks), map(codec.encode_group, groups)],
            codec.decode_scored,
        )  # fmt: skip
        return scored

    async def open(self, checkpoint: str, base: str = "") -> int:
        return int(await self._call("open", self._located(checkpoint), self._located(base)))

    async def adopt(self, weights: str, step: int, base: str = "") -> float:
        return float(
            await self._call("adopt", self._located(weights), step, self._located(base))
        )

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        # Repeated only if it was not computed: the worker maps the file before it begins.
        report = await self._ask("step", None, lambda: [map(codec.encode_training, groups)])
        return StepReport(*report)

    async def save(self, checkpoint: str, weights: str) -> None:
        await self._call("save", self._located(checkpoint), self._located(weights))

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        answers: list[Answers] = await self._ask(
            "answer", sampling, lambda: [map(codec.encode_task, tasks)], codec.decode_answers
        )
        return answers

    async def _ask(
        self,
        method: str,
        sampling: Sampling | None,
        contents: Callable[[], list[Iterable[bytes]]],
        decode: Callable[[bytes], T] | None = None,
    ) -> Any:
        """Call a method with files, and repeat the call until the disk has taken them.

        Returns:
            The value, or, with ``decode``, the values of the file that it names.
        """

        async def ask() -> Any:
            async with self._scratch.files(*contents()) as (answer, files):
                how = [] if sampling is None else [astuple(sampling)]
                if decode is None:
                    return await self._call(method, *how, *files)
                written = await self._call(method, answer, *how, *files)
                return await self._scratch.read(written, decode)

        return await self._durable.insist(ask)

    def _located(self, path: str) -> str:
        """Return a path as the worker would open it; an empty one stays so."""
        return self._world.disk.locate(path) if path else ""

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await self._remote.call(method, *arguments)
        except WorkerDied:
            self._forget()
            raise
