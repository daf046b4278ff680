"""The worker process of an engine: ``python -m roles.engines.worker``.

Theory of operation
-------------------
Frames come on standard input; each is answered by one on standard output, in order
(`roles.workers.streams`). The first configures the engine (threads and niceness before
torch is imported), the others call its methods. When standard input ends, the process ends at
once, even in the middle of a step: files are written atomically, so there is nothing to finish.

Tasks, groups and answers are in files, of which the frames say where they are
(`roles.engines.content`).

What a caller can cause (a file that is missing, a shape that does not fit) comes back as a
`Failure`. Anything else is a bug: it ends the process with a traceback, and the node sees
`WorkerDied`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, Protocol, TypeVar

from p2p.errors import ConfigError, MissingDependency, ShoalError
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Group,
    GroupTask,
    Placement,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import AUTO, NODE_ENGINES, EngineConfig, config_from_wire
from roles.engines.content import ContentFile
from roles.engines.hardware import gpus, threads_of
from roles.engines.mapped import MappedContent, open_content, write_content
from roles.workers.streams import serve_streams

T = TypeVar("T")


class LocalEngine(Protocol):
    """The methods of `roles.engines.base` within one process, files named as the operating
    system does."""

    def placement(self) -> Placement:
        """What it computes with."""
        ...

    def load(self, weights: str) -> None:
        """See `Generator.load`."""
        ...

    @property
    def has_room(self) -> bool:
        """See `Generator.has_room`."""
        ...

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """See `Generator.submit`."""
        ...

    def advance(self, seconds: float) -> list[Group]:
        """See `Generator.advance`: for so long, and one token of each row at least."""
        ...

    def drop(self) -> None:
        """See `Generator.drop`."""
        ...

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """See `Scorer.score`."""
        ...

    def open(self, checkpoint: str, base: str = "") -> int:
        """See `Learner.open`."""
        ...

    def adopt(self, weights: str, step: int, base: str = "") -> None:
        """See `Learner.adopt`."""
        ...

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """See `Learner.step`."""
        ...

    def save(self, checkpoint: str, weights: str) -> None:
        """See `Learner.save`."""
        ...

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """See `Learner.answer`."""
        ...


def draw_all(
    engine: LocalEngine, tasks: Sequence[GroupTask], sampling: Sampling
) -> list[Group]:
    """As `roles.engines.base.draw_all`."""
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
    """``config.kind``; for ``auto`` vLLM, where it is installed and knows the model."""
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
    """Calls an engine by the names of its methods, with arguments from the pipe."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._ended: list[Group] = []
        """Groups of which the node has not said that it has read them: its disk may not have
        taken their file."""

    def call(self, method: str, arguments: Sequence[Any]) -> object:
        """The result is fit for the pipe."""
        engine = self._engine
        match method, arguments:
            case "load", [weights]:
                engine.load(weights)
                return None
            case "submit", [most, sampling, file]:
                with _content(file, codec.decode_task, most) as tasks:
                    engine.submit(list(tasks), Sampling(*sampling))
                return engine.has_room
            case "advance", [answered, most, seconds, read]:
                return self._advance(answered, most, seconds, read)
            case "drop", []:
                self._ended.clear()
                engine.drop()
                return None
            case "score" | "answer", [answered, most, sampling, *files]:
                records = _answered(engine, method, Sampling(*sampling), files, most)
                return write_content(answered, records, most).to_wire()
            case "open", [checkpoint, base]:
                return engine.open(checkpoint, base)
            case "adopt", [weights, step, base]:
                engine.adopt(weights, step, base)
                return None
            case "step", [most, file]:
                with _content(file, codec.decode_training, most) as groups:
                    return astuple(engine.step(groups))
            case "save", [checkpoint, weights]:
                engine.save(checkpoint, weights)
                return None
            case _:
                raise TypeError(f"an engine has no method {method}({len(arguments)} arguments)")

    def _advance(
        self, answered: str, most: int, seconds: float, read: int
    ) -> tuple[bool, list[object]]:
        """Whether there is room, and the file of what has ended, if anything has; the first
        ``read`` of the groups before are with the node."""
        del self._ended[:read]
        is_whole = False
        try:
            self._ended += self._engine.advance(seconds)
            is_whole = True
        finally:
            if not is_whole:
                self._ended.clear()
                self._engine.drop()
        if not self._ended:
            return self._engine.has_room, []
        records = map(codec.encode_group, self._ended)
        return self._engine.has_room, write_content(answered, records, most).to_wire()


def _answered(
    engine: LocalEngine, method: str, sampling: Sampling, files: Sequence[Any], most: int
) -> Iterator[bytes]:
    """What the engine makes of the tasks in the first file, as records."""
    with _content(files[0], codec.decode_task, most) as content:
        tasks = list(content)
    if method == "answer":
        return map(codec.encode_answers, engine.answer(tasks, sampling))
    with _content(files[1], codec.decode_group, most) as groups:
        return map(codec.encode_scored, engine.score(tasks, list(groups), sampling))


def _content(
    file: Any, decode: Callable[[bytes], T], most: int
) -> AbstractContextManager[MappedContent[T]]:
    return open_content(ContentFile.from_wire(file), decode, most)


def serve(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
    """Answer frames until the process ends."""
    server: EngineServer | None = None
    while True:
        method, arguments = codec.decode_request(receive())
        try:
            value: object
            if server is None:
                engine = _configure(method, arguments)
                server, value = EngineServer(engine), astuple(engine.placement())
            else:
                value = server.call(method, arguments)
        except (ShoalError, OSError, ValueError, RuntimeError, MemoryError) as error:
            send(codec.encode_failure(codec.failure_of(error)))
        else:
            send(codec.encode_reply(value))


def _configure(method: str, arguments: Sequence[Any]) -> LocalEngine:
    """Prepare this process for ``config``, then build its engine."""
    if method != "configure":
        raise TypeError(f"the first call of a worker is configure, not {method}")
    config = config_from_wire(arguments[0])
    os.nice(config.nice)
    os.environ["OMP_NUM_THREADS"] = str(threads_of(config))
    return make_engine(config)


def main() -> None:
    """Serve one engine on the standard streams."""
    serve_streams(serve)


if __name__ == "__main__":
    main()
