"""A learner in several processes. ``python -m roles.engines.torch.ranks`` runs all but the
first.

Theory of operation
-------------------
The engine's own process is the first rank. It starts the others and tells them, by pipe, every
method that it calls itself: all of them run the same learner over the same groups, each with
its rows of the weights and its share of the batches (`roles.engines.torch.sharding`), and meet
in what torch.distributed adds up and gathers. The groups are in a file that each maps.

They live and die together. A process whose standard input ends leaves at once, so none outlives
the engine, however that ends; and when one of them ends, the engine's process does, since the
others would wait for it for ever. Then the node starts another engine, and the trainer goes on
from its checkpoint. An error that a caller can cause (a checkpoint that is damaged) is the same
in all of them, and nobody waits; after any other error of the first the engine ends as well.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from p2p.errors import ShoalError
from roles.engines.base import (
    Answers,
    EngineUnusable,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import EngineConfig
from roles.engines.hardware import threads_of
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.rank import LOOPBACK, Rank, joined, rank_device
from roles.workers.calls import Failure, decode_reply, encode_request, read_frame, write_frame
from roles.workers.server import serve

Make = Callable[[EngineConfig, torch.device, Rank], object]
"""Function that makes one process's part of a model."""
_SHARED: Final = (ShoalError, OSError, ValueError)
"""Errors that all processes raise alike, before they wait for each other."""
_MODULE: Final = "roles.engines.torch.ranks"
_CLOSED: Final = 10.0
"""Seconds that a process may take to end after its standard input is closed."""


class Ranks:
    """Processes that train one model together. This process is the first of them."""

    def __init__(self, config: EngineConfig, make: Make) -> None:
        """Start the processes. Each calls ``make``, which must be picklable, for its part of
        the model."""
        size = config.gpus.ranks
        for number in range(size):  # before any is started: the sentence is a person's
            rank_device(config, number)
        self._stack = ExitStack()
        folder = self._stack.enter_context(TemporaryDirectory(prefix="shoal-ranks-"))
        meeting = Path(folder) / "meeting"
        _stay_on_this_machine()
        self._others = [_Process(config, make, one, meeting) for one in range(1, size)]
        self._stack.callback(self._end_others)
        device, rank = self._stack.enter_context(joined(config, 0, meeting))
        for other in self._others:
            other.hear()
        self._calls = _Calls(partial(make, config, device, rank))

    def close(self) -> None:
        """End the other processes. They end with the engine's process as well."""
        self._stack.close()

    def all(self, method: str, *arguments: object) -> Any:
        """Call ``method`` in every process, and return the first's answer. Raises
        `EngineUnusable` if the processes have come apart."""
        request = pickle.dumps((method, arguments))
        for other in self._others:
            other.tell("call", request)
        failure: Exception | None = None
        answer = None
        try:
            answer = self._calls.call(method, arguments)
        except _SHARED as error:
            failure = error
        except (RuntimeError, MemoryError) as error:
            raise EngineUnusable(f"{method} failed in one of several processes") from error
        for reply in [other.hear() for other in self._others]:
            # only the first writes, so a disk may fail for it alone
            if isinstance(reply, Failure) and failure is None:
                raise EngineUnusable(f"{method} failed in one process: {reply.message}")
        if failure is not None:
            raise failure
        return answer

    def _end_others(self) -> None:
        for other in self._others:
            other.close()


class SharedLearner:
    """A `TorchLearner` that consists of several processes."""

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = Ranks(config, TorchLearner)

    def open(self, checkpoint: Path, base: Path | None = None) -> int:
        step: int = self._ranks.all("open", checkpoint, base)
        return step

    def adopt(self, weights: Path, step: int, base: Path | None = None) -> float:
        changed: float = self._ranks.all("adopt", weights, step, base)
        return changed

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        report: StepReport = self._ranks.all("step", groups)
        return report

    def save(self, checkpoint: Path | None, weights: Path | None) -> None:
        self._ranks.all("save", checkpoint, weights)

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        answers: list[Answers] = self._ranks.all("answer", tasks, sampling)
        return answers

    def close(self) -> None:
        """End the other processes. They end with the engine's process as well."""
        self._ranks.close()


class _Calls:
    """The methods of one process's part, which is made again whenever a learner is opened."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._made: object = None

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of this process's part."""
        if method in ("open", "adopt"):
            made = self._make()
            answer = getattr(made, method)(*arguments)
            self._made = made
            return answer
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, method)(*arguments)


class _Process:
    """Another rank, as the first rank sees it."""

    def __init__(self, config: EngineConfig, make: Make, number: int, meeting: Path) -> None:
        self._number = number
        self._is_closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.tell("join", pickle.dumps((config, make, number, meeting)))
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End this process when the other one ends, since a collective call would wait for it
        for ever."""
        status = self._process.wait()
        if not self._is_closing:
            number = self._number
            sys.stderr.write(f"rank {number} of the learner ended with status {status}\n")
            os._exit(1)

    def tell(self, method: str, argument: bytes) -> None:
        """Call a method of `RankServer`."""
        assert self._process.stdin is not None
        write_frame(self._process.stdin, encode_request(method, argument))

    def hear(self) -> Any:
        """Return the answer to a call."""
        assert self._process.stdout is not None
        if not (frame := read_frame(self._process.stdout)):
            raise EngineUnusable(f"rank {self._number} of the learner gives no answer")
        return decode_reply(frame)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self._is_closing = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_CLOSED)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _stay_on_this_machine() -> None:
    """Restrict torch.distributed to this machine, before it opens a port."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK


class RankServer:
    """The methods that the first rank may call."""

    def join(self, request: bytes) -> None:
        """Make this process a rank of the learner."""
        config, make, number, meeting = pickle.loads(request)
        _stay_on_this_machine()
        torch.set_num_threads(threads_of(config))
        self._stack = ExitStack()
        device, rank = self._stack.enter_context(joined(config, number, meeting))
        self._calls = _Calls(partial(make, config, device, rank))

    def call(self, request: bytes) -> None:
        """Call a method of the learner; only the first rank answers."""
        self._calls.call(*pickle.loads(request))


def main() -> None:
    """Serve on the standard streams."""
    serve(RankServer(), caused=_SHARED)


if __name__ == "__main__":
    main()
