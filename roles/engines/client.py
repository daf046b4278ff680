"""An engine as a role sees it: ``async with open_engine(world, config) as engine``.

Paths are those of the node's disk (`p2p.world.Disk`). Importing this does not import torch.

A disk that is full, or gives back another file than was written, ends no node: completions,
scores and answers are asked for again until the disk has taken their files. So is a step, which
the worker does not begin before it has read its file whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, Final, TypeVar

import trio

from p2p.errors import ConfigError, MissingDependency, ShoalError, StorageError, WorkerDied
from p2p.sandbox import Confinement
from p2p.world import Worker, World
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Engine,
    EngineError,
    Group,
    GroupTask,
    Placement,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import AUTO, GIB, EngineConfig, config_to_wire
from roles.engines.content import ContentFile, ContentFolder, ContentLimit
from roles.engines.fake import FakeEngine
from roles.engines.lasting import open_lasting_worker
from roles.engines.vllm.requirements import installed
from roles.shared.checked_json import DamagedFile
from roles.shared.durable import Durable

T = TypeVar("T")

Records = Callable[[], Iterable[bytes]]
"""Of one file, as often as it has to be written."""

logger = logging.getLogger(__name__)

FOLDER: Final = "engine"
"""Of the node's disk: below it, one folder for each role's engine, with the content of the call
that is under way."""
WORKER_ARGV: Final = ("roles.engines.worker",)
"""What `World.open_worker` runs, as ``python -m``."""

VARIABLES: Final = (
    "PATH", "LANG", "LC_*", "TZ",  # of the system
    "LD_*", "MALLOC_*",  # drivers in odd places; allocators that vLLM's authors advise
    "CUDA_*", "NVIDIA_*", "NCCL_*", "HIP_*", "HSA_*", "ROCR_*", "ZE_*", "ONEAPI_*", "SYCL_*",
    "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "GLOO_*",  # threads, and on which cores
    "TORCH*", "PYTORCH_*", "TRITON_*", "VLLM_*",  # what the owner has set
    "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",  # and no HF_TOKEN
    "CC", "CXX",  # Triton compiles
)  # fmt: skip
"""Of the node's environment, what an engine keeps: how to find and use the machine's
accelerators. Keys and tokens of other programs are none of its business."""
SCRATCH: Final = 2 * GIB
"""Bytes that an engine may leave in `/tmp` and its caches, which are gone with it: Triton's
compiled code takes some hundred MB."""

_KINDS: Final[dict[str, type[ShoalError]]] = {
    "ConfigError": ConfigError,
    "MissingDependency": MissingDependency,
    "StorageError": StorageError,
    "DamagedFile": DamagedFile,
}
"""Errors that mean the same on both sides of the pipe; the others become `EngineError`."""


TURN: Final = 0.1
"""Seconds that an engine decodes before it looks for new groups, and a role for a new policy. A
turn costs some 2 ms in both processes, a file included: 2 %. At a second, an engine of small
models, with 100,000 tokens a second, would have decoded all that it was given and waited."""


@asynccontextmanager
async def open_engine(
    world: World, config: EngineConfig, *, name: str = "engine", learns: bool = True
) -> AsyncIterator[Engine]:
    """Run an engine for the length of the block; its process ends with the block. Only one
    that ``learns`` writes into the folder of its role: checkpoints and policies.

    Raises `ConfigError` or `MissingDependency` if it cannot be built, `WorkerDied` from any
    method if its process ends (the next call has another, which holds nothing), `EngineLost` if
    it always does, `EngineError` if a method fails.
    """
    if config.kind == "fake":
        yield FakeEngine(world, config)
        return
    content, durable = ContentFolder(world.disk, f"{FOLDER}/{name}"), Durable(world, name)
    await durable.insist(content.clear)
    try:
        confined = confinement_of(world, config, name, learns=learns)
        async with open_lasting_worker(
            world, WORKER_ARGV, name=name, confined=confined
        ) as worker:
            engine = WorkerEngine(world, worker, config, content, durable)
            await engine.configure()
            yield engine
    finally:
        with trio.CancelScope(shield=True):
            await _clear(content)


def confinement_of(
    world: World, config: EngineConfig, name: str, *, learns: bool = True
) -> Confinement:
    """An engine is our own code, and needs drivers wherever they lie: it sees the machine, and
    writes what is its own: its content, and if it learns the folder of its role.

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
        tasks=None,
        cores=None,
        rests=False,
        file_size=None,
        open_files=None,
        scratch=SCRATCH,
        reply=codec.MAX_FRAME,
        chatter=None,
        required=False,
    )


async def _clear(content: ContentFolder) -> None:
    """At the end: what the disk does not remove now goes at the next start."""
    try:
        await content.clear()
    except StorageError as error:
        logger.info("content_not_removed: %s", error)


class WorkerEngine:
    """An engine in a worker process. Calls wait for their turn."""

    def __init__(
        self,
        world: World,
        worker: Worker,
        config: EngineConfig,
        content: ContentFolder,
        durable: Durable,
    ) -> None:
        self._locate = world.disk.locate
        self._worker = worker
        self._config = config
        self._content = content
        self._durable = durable
        self._has_room = True
        self._under_way = 0  # groups
        self._read = 0
        """Groups of the last answer, of which the worker is not told yet that they are here."""
        self._limit: ContentLimit | None = None
        """Of what is under way."""

    async def configure(self) -> None:
        """Build the engine; once, before anything else. Raises `EngineLost`.

        Most of what an engine takes, it takes now, beside those of other roles that start: a
        process that dies here is replaced as later ones are.
        """
        while True:
            try:
                placed = await self._call("configure", config_to_wire(self._config))
            except WorkerDied as error:
                logger.warning("%s while it started; it is started again", error)
            else:
                break
        placement = Placement(*placed)
        logger.info(
            "engine_ready kind=%s device=%s threads=%d",
            placement.engine, placement.device, placement.threads,
        )  # fmt: skip
        if placement.idle:
            logger.warning("%s", placement.idle)

    @property
    def writes_waiting(self) -> int:
        """See `roles.engines.base.Engine`."""
        return self._durable.waiting

    async def load(self, weights: str) -> None:
        """See `roles.engines.base.Generator`."""
        await self._call("load", self._locate(weights))

    @property
    def has_room(self) -> bool:
        """See `roles.engines.base.Generator`."""
        return self._has_room

    async def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """See `roles.engines.base.Generator`."""
        # Repeated only if nothing has begun: the worker reads the file whole before that.
        await self._durable.insist(partial(self._submit, tasks, sampling))
        self._under_way += len(tasks)
        self._limit = _limit_of(sampling, self._config.context)

    async def _submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        most = _limit_of(sampling, self._config.context).of(len(tasks))
        path = self._content.new()
        try:
            file = await self._content.write(path, map(codec.encode_task, tasks), most)
            self._has_room = await self._call("submit", most, astuple(sampling), file.to_wire())
        finally:
            await self._content.forget([path])

    async def advance(self) -> list[Group]:
        """See `roles.engines.base.Generator`."""
        if not self._under_way:
            return []
        # Repeated, it gives the same groups, and what has ended meanwhile.
        groups = await self._durable.insist(self._advance)
        self._under_way -= len(groups)
        self._read = len(groups)
        return groups

    async def _advance(self) -> list[Group]:
        assert self._limit is not None
        most, path, read = self._limit.of(self._under_way), self._content.new(), self._read
        self._read = 0
        where = self._content.locate(path)
        try:
            self._has_room, file = await self._call("advance", where, most, TURN, read)
            if not file:
                return []
            return await self._content.read(
                path, ContentFile.from_wire(file), codec.decode_group, most
            )
        except StorageError:
            raise
        except ShoalError:
            self._forget()
            raise
        finally:
            await self._content.forget([path])

    async def drop(self) -> None:
        """See `roles.engines.base.Generator`."""
        await self._call("drop")
        self._forget()

    def _forget(self) -> None:
        """Nothing is under way, in this process or in the next."""
        self._under_way, self._read, self._has_room = 0, 0, True

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """See `roles.engines.base.Scorer`."""
        claimed = partial(map, codec.encode_group, groups)
        return await self._ask("score", tasks, sampling, codec.decode_scored, claimed)

    async def open(self, checkpoint: str, base: str = "") -> int:
        """See `roles.engines.base.Learner`."""
        return int(await self._call("open", self._locate(checkpoint), self._located(base)))

    async def adopt(self, weights: str, step: int, base: str = "") -> None:
        """See `roles.engines.base.Learner`."""
        await self._call("adopt", self._locate(weights), step, self._located(base))

    async def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """See `roles.engines.base.Learner`."""
        # Repeated only if it was not computed: a worker reads the file whole before it begins.
        return await self._durable.insist(partial(self._step, groups))

    async def _step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        sampling, learner = self._config.sampling, self._config.learner
        assert learner is not None
        path = self._content.new()
        limit = ContentLimit(
            completions=sampling.group_size, tokens=sampling.max_new_tokens,
            context=self._config.context, proof_values=0,
        )  # fmt: skip
        most = limit.of(learner.groups)
        try:
            file = await self._content.write(path, map(codec.encode_training, groups), most)
            return StepReport(*await self._call("step", most, file.to_wire()))
        finally:
            await self._content.forget([path])

    async def save(self, checkpoint: str, weights: str) -> None:
        """See `roles.engines.base.Learner`."""
        await self._call("save", self._located(checkpoint), self._located(weights))

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """See `roles.engines.base.Learner`."""
        return await self._ask("answer", tasks, sampling, codec.decode_answers)

    async def _ask(
        self,
        method: str,
        tasks: Sequence[GroupTask],
        sampling: Sampling,
        decode: Callable[[bytes], T],
        *claimed: Records,
    ) -> list[T]:
        """One record for each task; asked again until the disk has taken all files."""
        given: list[Records] = [partial(map, codec.encode_task, tasks), *claimed]
        most = _limit_of(sampling, self._config.context).of(len(tasks))
        return await self._durable.insist(
            partial(self._ask_once, method, given, sampling, decode, most)
        )

    async def _ask_once(
        self,
        method: str,
        given: Sequence[Records],
        sampling: Sampling,
        decode: Callable[[bytes], T],
        most: int,
    ) -> list[T]:
        content = self._content
        answered, *paths = [content.new() for _ in (None, *given)]
        try:
            files = [
                (await content.write(path, records(), most)).to_wire()
                for path, records in zip(paths, given, strict=True)
            ]
            where = content.locate(answered)
            value = await self._call(method, where, most, astuple(sampling), *files)
            return await content.read(answered, ContentFile.from_wire(value), decode, most)
        finally:
            await content.forget([answered, *paths])

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
        try:
            reply = codec.decode_reply(await self._worker.call(request))
        except WorkerDied:
            self._forget()
            raise
        if isinstance(reply, codec.Failure):
            raise _KINDS.get(reply.kind, EngineError)(
                f"{method} failed with {reply.kind}: {reply.message}"
            )
        return reply


def _limit_of(sampling: Sampling, context: int) -> ContentLimit:
    return ContentLimit(
        completions=sampling.group_size, tokens=sampling.max_new_tokens,
        context=context, proof_values=sampling.proof_values,
    )  # fmt: skip
