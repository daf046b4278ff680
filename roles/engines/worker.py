"""The worker process of an engine: ``python -m roles.engines.worker``.

Theory of operation
-------------------
Frames come on standard input; each is answered by one on standard output, in order
(`roles.shared.worker_streams`). The first configures the engine (threads and niceness before
torch is imported), the others call its methods. When standard input ends, the process ends at
once, even in the middle of a step: files are written atomically, so there is nothing to finish.

What a caller can cause (a file that is missing, a shape that does not fit) comes back as a
`Failure`. Anything else is a bug: it ends the process with a traceback, and the node sees
`WorkerDied`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, Protocol

from p2p.errors import ConfigError, MissingDependency, ShoalError
from proofs.checks import Evidence
from roles.engines import codec
from roles.engines.base import Answers, Group, GroupTask, Sampling, StepReport, TrainingGroup
from roles.engines.config import EngineConfig, config_from_wire
from roles.shared.worker_streams import serve_streams


class LocalEngine(Protocol):
    """The methods of `roles.engines.base` within one process, files named as the operating
    system does."""

    def load(self, weights: str) -> None:
        """See `Generator.load`."""
        ...

    def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        """See `Generator.generate`."""
        ...

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Evidence]:
        """See `Scorer.score`."""
        ...

    def open(self, checkpoint: str, base: str = "") -> int:
        """See `Learner.open`."""
        ...

    def adopt(self, weights: str, step: int) -> None:
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


def make_engine(config: EngineConfig) -> LocalEngine:
    """Build the engine of ``config.kind``; only here is torch imported."""
    if config.kind != "torch":
        raise ConfigError(
            f"there is no engine {config.kind!r} for worker processes; installed are torch"
        )
    try:
        from roles.engines.torch.engine import TorchEngine
    except ImportError as error:
        raise MissingDependency(
            f"the torch engine needs torch: pip install 'shoal[torch]' ({error})"
        ) from error
    return TorchEngine(config)


def call(engine: LocalEngine, method: str, arguments: Sequence[Any]) -> object:
    """Call one method with arguments from the pipe; the result is fit for the pipe."""
    match method, arguments:
        case "load", [weights]:
            engine.load(weights)
            return None
        case "generate", [tasks, sampling]:
            groups = engine.generate(
                [codec.task_from_wire(task) for task in tasks], Sampling(*sampling)
            )
            return [codec.group_to_wire(group) for group in groups]
        case "score", [tasks, groups, sampling]:
            evidence = engine.score(
                [codec.task_from_wire(task) for task in tasks],
                [codec.group_from_wire(group) for group in groups],
                Sampling(*sampling),
            )
            return [astuple(one) for one in evidence]
        case "open", [checkpoint, base]:
            return engine.open(checkpoint, base)
        case "adopt", [weights, step]:
            engine.adopt(weights, step)
            return None
        case "step", [groups]:
            return astuple(engine.step([codec.training_from_wire(group) for group in groups]))
        case "save", [checkpoint, weights]:
            engine.save(checkpoint, weights)
            return None
        case "answer", [tasks, sampling]:
            return engine.answer(
                [codec.task_from_wire(task) for task in tasks], Sampling(*sampling)
            )
        case _:
            raise TypeError(f"an engine has no method {method}({len(arguments)} arguments)")


def serve(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
    """Answer frames until the process ends."""
    engine: LocalEngine | None = None
    while True:
        method, arguments = codec.decode_request(receive())
        try:
            if engine is None:
                engine = _configure(method, arguments)
                value: object = None
            else:
                value = call(engine, method, arguments)
        except (ShoalError, OSError, ValueError, RuntimeError, MemoryError) as error:
            send(codec.encode_failure(codec.Failure(type(error).__name__, str(error))))
        else:
            send(codec.encode_reply(value))


def _configure(method: str, arguments: Sequence[Any]) -> LocalEngine:
    """Prepare this process for ``config``, then build its engine."""
    if method != "configure":
        raise TypeError(f"the first call of a worker is configure, not {method}")
    config = config_from_wire(arguments[0])
    os.nice(config.nice)
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    return make_engine(config)


def main() -> None:
    """Serve one engine on the standard streams."""
    serve_streams(serve)


if __name__ == "__main__":
    main()
