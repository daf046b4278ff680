"""An environment as a role sees it.

``async with open_environment_of(world, run, machine) as environment``.

Theory of operation
-------------------
An environment is foreign code, called for every stranger's completions, and code that does not
return cannot be ended from within: a thread that runs it is lost for good, and holds the
interpreter while it spins. So it runs in a process of its own (`roles.envs.worker`), with
limits on time and memory. What exceeds them, or ends the process otherwise, fails like what
raises does: `EnvironmentFailed`, and the next call has a new process.

Simulations have no processes; there, with their engine, the call is made in place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple
from typing import Any, Final, Protocol

import trio

from p2p.errors import ConfigError, LimitExceeded, WorkerDied
from p2p.world import Worker, World
from roles.engines import codec
from roles.engines.config import MachineLimits
from roles.envs.base import Environment, Ration, Task, open_environment
from roles.envs.contained import EnvironmentFailed, reward_of, task_of
from roles.run import Run

WORKER_ARGV: Final = ("roles.envs.worker",)
"""What `World.open_worker` runs, as ``python -m``."""

Answers = Sequence[tuple[Task, Sequence[Sequence[int]]]]
"""Tasks, each with the completions that answer it."""


class ContainedEnvironment(Protocol):
    """Tasks and rewards of one environment, whatever its code does."""

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        """The task of each seed. Raises `EnvironmentFailed`."""
        ...

    async def rewards(self, answers: Answers) -> list[float]:
        """What each completion earns, from 0 to 1, in order. Raises `EnvironmentFailed`."""
        ...


class LocalEnvironment:
    """In this process: it may raise, and must return."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        """See `ContainedEnvironment`."""
        return [task_of(self._environment, seed) for seed in seeds]

    async def rewards(self, answers: Answers) -> list[float]:
        """See `ContainedEnvironment`."""
        return [
            reward_of(self._environment, task, tokens)
            for task, given in answers
            for tokens in given
        ]


class WorkerEnvironment:
    """In a process of its own, which is replaced when it has failed. Calls wait for their
    turn."""

    def __init__(self, world: World, name: str, ration: Ration, stack: AsyncExitStack) -> None:
        self._world = world
        self._name = name
        self._ration = ration
        self._stack = stack
        """Closes the process, if there is one."""
        self._worker: Worker | None = None
        self._turn = trio.Lock()

    async def open(self) -> None:
        """Start the first process. Raises `ConfigError` if the environment cannot be opened in
        it."""
        try:
            async with self._turn:
                await self._start()
        except EnvironmentFailed as error:
            raise ConfigError(f"{error}: ask the owner of the run, or its author") from error

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        """See `ContainedEnvironment`."""
        value = await self._ask("tasks", list(seeds))
        return [Task(tuple(prompt), tuple(answer)) for prompt, answer in value]

    async def rewards(self, answers: Answers) -> list[float]:
        """See `ContainedEnvironment`."""
        rows = [
            [list(task.prompt), list(task.answer), [list(tokens) for tokens in given]]
            for task, given in answers
        ]
        value: list[float] = await self._ask("rewards", rows)
        return value

    async def _ask(self, method: str, *arguments: object) -> Any:
        async with self._turn:
            if self._worker is None:
                await self._start()
            return await self._call(method, *arguments, patience=self._ration.patience)

    async def _start(self) -> None:
        self._worker = await self._stack.enter_async_context(
            self._world.open_worker(WORKER_ARGV, name=f"the environment {self._name!r}")
        )
        opening = self._ration.opening
        await self._call("open", self._name, *astuple(self._ration), patience=opening)

    async def _call(self, method: str, *arguments: object, patience: float) -> Any:
        """One call of the process that runs; one that gives no answer is its last."""
        assert self._worker is not None
        is_answered = False
        try:
            with trio.fail_after(patience):
                data = await self._worker.call(codec.encode_request(method, *arguments))
            is_answered = True
        except trio.TooSlowError:
            raise self._failure(method, f"no answer in {patience:g} s") from None
        except (WorkerDied, LimitExceeded) as error:
            limits = (
                f"{self._ration.cpu:g} s of CPU for one call, {self._ration.memory:,} bytes of"
                " memory"
            )
            raise self._failure(
                method, f"its process ended: it may use {limits}, or it crashed"
            ) from error
        finally:
            if not is_answered:
                self._worker = None
                await self._stack.aclose()
        reply = codec.decode_reply(data)
        if isinstance(reply, codec.Failure):
            raise (ConfigError if reply.kind == ConfigError.__name__ else EnvironmentFailed)(
                reply.message
            )
        return reply

    def _failure(self, method: str, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{method} of the environment {self._name!r}: {why}")


@asynccontextmanager
async def open_environment_of(
    world: World, run: Run, machine: MachineLimits
) -> AsyncIterator[ContainedEnvironment]:
    """The environment that ``run`` is trained on, for the length of the block.

    Raises `ConfigError` if it is not the one that the run pins, or cannot be opened.
    """
    run.check_environments()  # before any of it is imported
    name = run.terms.environments[0].name
    if run.terms.model.engine == "fake":
        yield LocalEnvironment(open_environment(name))
        return
    async with AsyncExitStack() as stack:
        ration = Ration(memory=machine.environment_memory)
        environment = WorkerEnvironment(world, name, ration, stack)
        await environment.open()
        yield environment
