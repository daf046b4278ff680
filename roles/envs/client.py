"""An environment as a role sees it.

``async with open_environment_of(world, run, machine) as environment``.

Theory of operation
-------------------
An environment is foreign code, called for every stranger's completions, and code that does not
return cannot be ended from within: a thread that runs it is lost for good, and holds the
interpreter while it spins. What strangers wrote may even be evaluated by it. So it runs in a
process of its own (`roles.envs.worker`), which reaches nothing of this machine
(`p2p.sandbox`), with limits on time and memory. What exceeds them, or ends the process
otherwise, fails like what raises does: `EnvironmentFailed`, and the next call has a new
process.

Simulations have no processes; there, with their engine, the call is made in place.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import trio

from p2p.errors import BadMessage, ConfigError, LimitExceeded, MissingDependency, WorkerDied
from p2p.node.tables import write_table
from p2p.sandbox import Confinement, Containment
from p2p.world import World
from roles.contract import Run
from roles.contract.core.shape import MAX_CONTEXT
from roles.envs.base import (
    Environment,
    EnvironmentLimits,
    Ration,
    Task,
    TurnLimits,
    check_pins,
    environment_places,
    evaluates_nothing,
    runs_python,
)
from roles.envs.check import why_not_repeatable
from roles.envs.contained import (
    MAX_EVALUATION,
    EnvironmentDied,
    EnvironmentFailed,
    Payment,
    Tally,
    evaluation_of,
    task_of,
    texts_of,
)
from roles.envs.frames import (
    ITEMS_AROUND,
    TOKENS,
    heard_untrusted,
    payment_untrusted,
    sentence_untrusted,
    task_to_wire,
    tasks_untrusted,
    texts_untrusted,
)
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.text import LengthTargets, TextModel
from roles.envs.turns import Heard
from roles.envs.wasm import prepare
from roles.workers.calls import MAX_ITEMS
from roles.workers.client import Remote

logger = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_ARGV: Final = ("roles.envs.worker",)
"""Module that `World.open_worker` runs, as ``python -m``."""

MOST_DEATHS: Final = 4
"""Answers of one submission that may end a process each. What its author can cost a validator
stays within some 5 CPU seconds for each; an environment that ends at most answers is broken."""

PART: Final = 8
"""Completions that an environment is asked about in one call: 8 programs without an end use up
their fuel in 6 CPU seconds, within its patience also on a busy machine."""

Answers = Sequence[tuple[Task, Sequence[Sequence[int]]]]
"""Tasks, each with the completions that answer it."""


Sample = tuple[str, str, float]
"""Question, answer and reward, for people."""


class ContainedEnvironment(Protocol):
    """Tasks and rewards of one environment, whatever its code does."""

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        """Return the task of each seed.

        Raises:
            EnvironmentFailed: The environment gave none.
        """
        ...

    async def hear(self, answers: Answers) -> list[Heard]:
        """Return the environment's answers within each completion, in order. A completion may
        be finished or still growing.

        Raises:
            EnvironmentFailed: The environment gave no valid reply.
        """
        ...

    async def rewards(self, answers: Answers) -> list[float]:
        """Return the reward of each completion, from 0 to 1, in order.

        Raises:
            EnvironmentFailed: The environment gave none.
        """
        ...

    async def pay(self, answers: Answers) -> Payment:
        """Return the rewards, and the completions on which the environment failed.

        Raises:
            EnvironmentFailed: The environment gave no answer at all.
        """
        ...

    async def confirm(self, answers: Answers, rewards: Sequence[float]) -> None:
        """Compute these rewards twice more before anybody is blamed for different rewards.

        The first time in reverse, since a reward may depend on what was paid before.

        Raises:
            EnvironmentFailed: They are not the same: it is the environment that differs.
        """
        ...

    async def evaluation(self) -> list[Task]:
        """Return the fixed held-out tasks.

        Raises:
            EnvironmentFailed: The environment gave none.
        """
        ...

    async def texts(self, answers: Answers) -> list[tuple[str, str]]:
        """Return question and answer of each completion as people read them, cut to their ends.

        A text is empty if its tokens have no text.

        Raises:
            EnvironmentFailed: The environment gave none.
        """
        ...


async def read_along(
    environment: ContainedEnvironment, answers: Answers, rewards: Sequence[float]
) -> list[Sample]:
    """Return the readable texts of answers with these rewards.

    The result is empty if tokens have no text or the environment fails: the texts are only for
    people.
    """
    try:
        texts = await environment.texts(answers)
    except EnvironmentFailed as error:
        logger.info("samples_unreadable: %s", error)
        return []
    return [(*text, reward) for text, reward in zip(texts, rewards, strict=True) if any(text)]


class LocalEnvironment:
    """An environment in this process: it may raise, and must return."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tally = Tally()

    async def hear(self, answers: Answers) -> list[Heard]:
        mix: Any = self._environment
        return [mix.hear(task, tokens) for task, given in answers for tokens in given]

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        return [task_of(self._environment, seed) for seed in seeds]

    async def rewards(self, answers: Answers) -> list[float]:
        return (await self.pay(answers)).rewards

    async def pay(self, answers: Answers) -> Payment:
        payment = Payment()
        for task, given in answers:
            for tokens in given:
                payment.pay(self._environment, task, tokens)
        self._tally.count(payment)
        return payment

    async def confirm(self, answers: Answers, rewards: Sequence[float]) -> None:
        for asked, paid in _twice(answers, rewards):
            _compare(await self.rewards(asked), paid, self._environment.name)

    async def evaluation(self) -> list[Task]:
        return evaluation_of(self._environment)

    async def texts(self, answers: Answers) -> list[tuple[str, str]]:
        return [
            texts_of(self._environment, task, tokens)
            for task, given in answers
            for tokens in given
        ]


class WorkerEnvironment:
    """An environment in a process of its own, which is replaced after a failure. Calls wait for
    their turn.
    """

    def __init__(
        self,
        world: World,
        setup: EnvironmentSetup,
        ration: Ration,
        stack: AsyncExitStack,
        *,
        vocabulary: int = TOKENS,
        context: int = MAX_CONTEXT,
        required: bool = True,
    ) -> None:
        """Prepare the process of an environment.

        Args:
            vocabulary: Tokens of the model; no engine could look up others.
            context: Most tokens of a prompt and its answer together.
            required: True if the environment must not run where this machine contains no
                process.
        """
        self._remote = Remote(
            world, WORKER_ARGV, stack, name=f"the environment {setup}",
            otherwise=EnvironmentFailed, raises=(ConfigError, MissingDependency),
            confined=confinement_of(setup, ration, required=required), keeps=False,
        )  # fmt: skip
        self._vocabulary = vocabulary
        self._context = context
        self._setup = setup
        self._ration = ration
        self._tally = Tally()

    async def open(self) -> None:
        """Start the first process.

        Raises:
            ConfigError: The environment cannot be opened in it.
        """
        setup, ration = write_table(self._setup), write_table(self._ration)
        patience = self._ration.opening
        call = self._remote.start("open", setup, ration, patience=patience)
        try:
            await self._answered("open", patience, call)
        except EnvironmentFailed as error:
            raise ConfigError(f"{error}: ask the owner of the run, or its author") from error

    async def why_not_repeatable(self) -> str:
        """Return the result of `roles.envs.check.why_not_repeatable` in the process.

        Nothing if the process says nothing: what fails, fails again when there is work.
        """
        try:
            return await self._ask(
                "repeats", read=sentence_untrusted, patience=self._ration.opening,
                max_items=ITEMS_AROUND,
            )  # fmt: skip
        except EnvironmentFailed as error:
            logger.warning("the environment was not tried: %s", error)
            return ""

    async def tasks(self, seeds: Sequence[bytes]) -> list[Task]:
        return await self._ask_tasks("tasks", len(seeds), len(seeds), list(seeds))

    async def evaluation(self) -> list[Task]:
        return await self._ask_tasks(
            "evaluation", 1, MAX_EVALUATION, patience=self._ration.opening
        )

    async def _ask_tasks(
        self, method: str, least: int, most: int, *arguments: object, patience: float = 0.0
    ) -> list[Task]:
        read = partial(
            tasks_untrusted, least=least, most=most, vocabulary=self._vocabulary,
            context=self._context,
        )  # fmt: skip
        items = min(MAX_ITEMS, (most + 1) * (self._context + ITEMS_AROUND))
        return await self._ask(
            method, *arguments, read=read, max_items=items, patience=patience
        )

    async def hear(self, answers: Answers) -> list[Heard]:
        if self._setup.turns is None:
            return [() for _, given in answers for _ in given]
        parts = await self._in_parts(answers, self._hear, self._hear_before)
        return [said for part in parts for said in part]

    async def _hear(self, answers: Answers) -> list[Heard]:
        turns, count = self._setup.turns, sum(len(given) for _, given in answers)
        assert turns is not None
        read = partial(
            heard_untrusted, count=count, most=turns.heard, vocabulary=self._vocabulary
        )
        items = ITEMS_AROUND + count * (turns.heard + 2 * turns.most + 2)
        return await self._ask(
            "hear", _rows(answers), read=read, max_items=min(MAX_ITEMS, items),
            patience=self._ration.for_turns(turns.most).patience,
        )  # fmt: skip

    async def _hear_before(self, task: Task, tokens: Sequence[int], why: str) -> list[Heard]:
        """Return the environment's answers before the last turn, on which its process ended: an
        honest completion is over there."""
        assert self._setup.turns is not None
        is_end = self._setup.turns.end_tokens.__contains__
        *_, before, _ = 0, 0, *(at for at, token in enumerate(tokens, 1) if is_end(token))
        logger.warning("%s: such a completion is over, and void", why)
        with suppress(EnvironmentDied):
            (said,) = await self._hear([(task, [tokens[:before]])])
            return [(*said, None)]
        return [(None,)]

    async def texts(self, answers: Answers) -> list[tuple[str, str]]:
        count = sum(len(given) for _, given in answers)
        read = partial(texts_untrusted, count=count)
        items = 3 * count + ITEMS_AROUND
        return await self._ask("texts", _rows(answers), read=read, max_items=items)

    async def rewards(self, answers: Answers) -> list[float]:
        return (await self.pay(answers)).rewards

    async def pay(self, answers: Answers) -> Payment:
        payment = await self.try_to_pay(answers)
        self._tally.count(payment)
        return payment

    async def try_to_pay(self, answers: Answers) -> Payment:
        """Pay without logging the errors that the environment raised on answers."""

        async def nothing(_task: Task, _tokens: Sequence[int], why: str) -> Payment:
            payment = Payment()
            payment.fail(why, "its process ended")
            return payment

        payment = Payment()
        for part in await self._in_parts(answers, self._pay, nothing):
            payment.add(part)
        return payment

    async def confirm(self, answers: Answers, rewards: Sequence[float]) -> None:
        """Check the rewards in a new process, which has paid nothing before."""
        await self._remote.stop()
        for asked, paid in _twice(answers, rewards):
            _compare((await self.try_to_pay(asked)).rewards, paid, str(self._setup))

    async def _pay(self, answers: Answers) -> Payment:
        count = sum(len(given) for _, given in answers)
        read = partial(payment_untrusted, count=count)
        items = count + ITEMS_AROUND
        return await self._ask("rewards", _rows(answers), read=read, max_items=items)

    async def _in_parts(
        self,
        answers: Answers,
        ask: Callable[[Answers], Awaitable[T]],
        without: Callable[[Task, Sequence[int], str], Awaitable[T]],
    ) -> list[T]:
        """Ask about a few completions at a time, each time with the patience of a call. If the
        process dies, ask about each completion alone: ``without`` gives the result of one that
        kills the process again, and the others are unaffected.

        Raises `EnvironmentFailed` beyond `MOST_DEATHS`, or if a call is too slow. The scorer
        bounds the whole (`roles.protocol.scorer.ASKED`).
        """
        found, deaths = list[T](), 0
        for part in _parts(answers):
            with suppress(EnvironmentDied):
                found.append(await ask(part))
                continue
            for task, tokens in ((task, tokens) for task, given in part for tokens in given):
                try:
                    found.append(await ask([(task, [tokens])]))
                except EnvironmentDied as error:
                    deaths += 1
                    if deaths > MOST_DEATHS:
                        raise
                    found.append(await without(task, tokens, str(error)))
        return found

    async def _ask(
        self,
        method: str,
        *arguments: object,
        read: Callable[[object], T],
        max_items: int,
        patience: float = 0.0,
    ) -> T:
        """Call the process. Waits as long as for a submission, unless told otherwise."""
        patience = patience or self._ration.patience
        call = self._remote.call(
            method, *arguments, read=read, max_items=max_items, patience=patience
        )
        try:
            return await self._answered(method, patience, call)
        except (ConfigError, MissingDependency) as error:
            # It could be opened when the role began: a file has gone since, or rotted.
            raise self._failure(method, f"it cannot be opened again: {error}") from None

    async def _answered(self, method: str, patience: float, call: Awaitable[T]) -> T:
        """Await a call and return its result.

        Raises:
            EnvironmentFailed: The process gave no answer.
        """
        try:
            return await call
        except BadMessage as error:
            raise self._failure(method, f"its process answers nonsense: {error}") from None
        except trio.TooSlowError:
            raise self._failure(method, f"no answer in {patience:g} s") from None
        except (WorkerDied, LimitExceeded) as error:
            raise EnvironmentDied(
                f"{self._failure(method, 'its process ended')}: it may use"
                f" {self._ration.cpu:g} s of CPU for one call, {self._ration.memory:,} bytes of"
                " memory, or it crashed"
            ) from error

    def _failure(self, method: str, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{method} of the environment {self._setup}: {why}")


def _twice(
    answers: Answers, rewards: Sequence[float]
) -> tuple[tuple[Answers, Sequence[float]], ...]:
    """Return answers with their rewards twice: in reverse order, and as they are."""
    backwards = [(task, list(reversed(given))) for task, given in reversed(answers)]
    return (backwards, list(reversed(rewards))), (answers, rewards)


def _compare(again: Sequence[float], before: Sequence[float], name: str) -> None:
    """Check that an environment has paid the same twice.

    Raises:
        EnvironmentFailed: It has not.
    """
    differ = sum(one != other for one, other in zip(again, before, strict=True))
    if differ:
        raise EnvironmentFailed(
            f"the environment {name} pays {differ:,} of {len(again):,} answers another reward"
            " when asked again: it depends on more than task and text, and its author must"
            " mend it"
        )


def _parts(answers: Answers) -> Iterator[Answers]:
    """Yield the same in parts of `PART` completions."""
    part, room = list[tuple[Task, list[Sequence[int]]]](), PART
    for task, given in answers:
        for at, tokens in enumerate(given):
            if not room:
                yield part
                part, room = [], PART
            if part and at and part[-1][0] is task:
                part[-1][1].append(tokens)
            else:
                part.append((task, [tokens]))
            room -= 1
    if part:
        yield part


def _rows(answers: Answers) -> list[list[object]]:
    return [[task_to_wire(task), [list(tokens) for tokens in given]] for task, given in answers]


@asynccontextmanager
async def open_environment_of(
    world: World,
    run: Run,
    machine: EnvironmentLimits,
    folder: str | None = None,
    *,
    trusted: bool = False,
    takes_capsules: bool = True,
) -> AsyncIterator[ContainedEnvironment]:
    """Open the environments of ``run`` as one, for the length of the block.

    ``folder``, of the world's disk, holds the tokenizer of a run with a base, and its capsules;
    its files are those that the run pins. ``trusted``: whether this machine's owner lets
    environments run where nothing contains them; ``takes_capsules``: whether it runs capsules.
    Raises `ConfigError` if an environment is not the one that the run pins, cannot be opened,
    must not run here, or does not pay the same reward twice (`roles.envs.check`).
    """
    check_pins(run)  # before any of it is imported
    capsules = [pin.name for pin in run.terms.environments if pin.is_capsule]
    if capsules and not (takes_capsules or trusted):
        raise ConfigError(
            f"{capsules[0]} is code of the run's owner, which comes with its policies and runs"
            " in an interpreter that reaches nothing of this machine: to lend it the CPU, start"
            " the node with --accept-capsules"
        )
    if any(runs_python(pin.name) for pin in run.terms.environments):
        await world.run_blocking(prepare, ("cpython",), cost=0.0)  # compiles it once
    setup = setup_of(run, machine, folder and world.disk.locate(folder))
    if run.terms.model.engine == "fake":
        mix = open_mix(setup)
        _require_repeatable(why_not_repeatable(mix))
        yield LocalEnvironment(mix)
        return
    required = not trusted and not all(
        pin.is_capsule or evaluates_nothing(pin.name) for pin in run.terms.environments
    )
    if required:
        _require(await world.containment(), setup)
    async with AsyncExitStack() as stack:
        ration = Ration(memory=machine.environment_memory)
        model = run.terms.model
        environment = WorkerEnvironment(
            world, setup, ration, stack, vocabulary=model.shape.vocabulary,
            context=model.context, required=required,
        )  # fmt: skip
        await environment.open()
        _require_repeatable(await environment.why_not_repeatable())
        yield environment


def _require_repeatable(why: str) -> None:
    if why:
        raise ConfigError(f"{why}: tell the owner of the run")


def _require(containment: Containment, setup: EnvironmentSetup) -> None:
    """Check that this machine can contain an environment.

    Raises:
        ConfigError: Nothing contains it here.
    """
    if not containment.holds:
        raise ConfigError(
            f"this machine contains no process ({containment.reason}), and the environment"
            f" {setup} may evaluate what strangers write: make bwrap work (docs/node.md), or"
            " start the node with --trust-environments if nothing on this machine is worth"
            " stealing"
        )


def confinement_of(
    setup: EnvironmentSetup, ration: Ration, *, required: bool = True
) -> Confinement:
    """Return the confinement of an environment's process.

    It may read its own package, the tokenizer, and the files that the run pins.
    """
    readable = [place for part in setup.parts for place in environment_places(part.name)]
    readable += [] if setup.model is None else [setup.model.folder]
    readable += [setup.modules] if setup.modules else []
    readable += [
        f"{setup.place_of(part.data)}/{part.data.name}"
        for part in setup.parts
        if part.data is not None
    ]
    return Confinement(
        readable=tuple(dict.fromkeys(readable)),
        memory=ration.memory,
        required=required,
    )


def setup_of(
    run: Run, machine: EnvironmentLimits, folder: str | None = None
) -> EnvironmentSetup:
    """Return the setup with which this machine opens the environments of ``run``.

    Raises:
        ConfigError: A run of text has no ``folder``.
    """
    model, sampling = run.terms.model, run.terms.sampling
    if model.base and folder is None:
        raise ConfigError(
            f"run {run.name!r} speaks text: its environments need the folder of its base"
        )
    text = TextModel(
        folder=folder or "",
        end_tokens=model.end_tokens,
        vocabulary=model.shape.vocabulary,
        context=model.context,
        max_new_tokens=sampling.max_new_tokens + sampling.heard,
    )
    turns = TurnLimits(
        most=sampling.turns,
        heard=sampling.heard,
        max_new_tokens=sampling.max_new_tokens,
        end_tokens=model.end_tokens,
    )
    parts = tuple(
        EnvironmentPart(
            name=pin.name,
            weight=pin.weight,
            kinds=pin.kinds,
            data=pin.data,
            lengths=(
                LengthTargets(pin.length_targets, pin.length_penalty)
                if pin.length_targets
                else None
            ),
        )
        for pin in run.terms.environments
    )
    folder_of_data = machine.environment_data
    return EnvironmentSetup(
        parts=parts, model=text if model.base else None, folder=folder_of_data,
        turns=turns if sampling.turns > 1 else None, modules=modules_for(parts),
    )  # fmt: skip


def modules_for(parts: Sequence[EnvironmentPart]) -> str:
    """Compile the wasm interpreters that these environments use, and return their folder.

    Raises:
        ConfigError: An interpreter cannot be compiled.
    """
    return str(prepare(("cpython",))) if any(runs_python(part.name) for part in parts) else ""
