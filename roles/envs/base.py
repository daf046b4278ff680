"""An environment: a source of tasks and a checker of answers.

It is versioned by the hash of its files.

Tasks are functions of a seed that no node chooses (run, policy, node and group are hashed into
it), so a worker cannot pick easy ones and a validator can recompute them. Nothing here imports
torch or numpy.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from random import Random
from typing import Any, Final, Protocol, runtime_checkable

from p2p.errors import ConfigError
from roles.contract import Run
from roles.contract.core.names import CAPSULES, NAME
from roles.envs.installed import module_digest, package_digest, package_places

ENTRY_POINTS: Final = "shoal.envs"
"""Packages add environments under this entry point group: ``name = module:Class``."""

_BUILT_IN: Final = {
    "sort": "roles.envs.sort:SortEnvironment",
    "calculator": "roles.envs.calculator:CalculatorEnvironment",
    "code": "roles.envs.code:CodeEnvironment",
    "guess": "roles.envs.guess:GuessEnvironment",
    "arithmetic": "roles.envs.arithmetic:ArithmeticEnvironment",
    "math": "roles.envs.questions:MathEnvironment",
    "math-exact": "roles.envs.questions:ExactEnvironment",
    "math-python": "roles.envs.python:PythonMathEnvironment",
    "reasoning-gym": "roles.envs.gym:GymEnvironment",
    "search": "roles.envs.search:SearchEnvironment",
}

EVALUATES_NOTHING: Final = frozenset(
    {"sort", "guess", "arithmetic", "calculator", "math-exact", "search"}
)
"""Built-in environments that only compare text or tokens: no parser of another package reads an
answer. A machine that contains no process runs these alone, unless its owner says otherwise.
"""
RUN_PYTHON: Final = frozenset({"code", "math-python", "capsule"})
"""Built-in environments that run Python as wasm; ``capsule`` stands for all capsules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLimits:
    """Limits that this machine's owner gives environments, in any run."""

    environment_memory: int = 4 * 1024**3
    """Bytes of address space for the process of the environment, libraries included
    (`Ration.memory`)."""

    environment_data: str = ""
    """Folder with the files of questions that runs may pin and this machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ration:
    """The CPU time, wall time and memory that an environment may spend."""

    memory: int = 4 * 1024**3
    """Bytes of address space of its process, libraries included, also what they map and never
    touch. It bounds what one task can take from the machine."""

    cpu: float = 5.0
    """CPU seconds for one task or one reward. Exact ones take microseconds, a computer algebra
    system that compares two formulas up to one second."""

    patience: float = 30.0
    """Seconds for all tasks of a submission, or for the rewards of a few of its completions
    (`roles.envs.client.PART`)."""

    opening: float = 120.0
    """Seconds for the start of its process: the largest libraries take ten, on a busy machine.
    And for the tasks of an evaluation, which the trainer asks for once: a family of
    reasoning-gym may take half a minute for its 32."""

    def for_turns(self, most: int) -> Ration:
        """Return the ration for a completion of ``most`` turns: this ration once for each turn,
        for eight at most."""
        times = max(1, min(most - 1, 8))
        return replace(self, cpu=times * self.cpu, patience=times * self.patience)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the data from which its reward is computed."""

    prompt: tuple[int, ...]

    answer: tuple[int, ...] = ()
    """The tokens that earn the full reward, end token included; empty where ``source`` says
    what is right."""

    source: bytes = b""
    """The task as its environment wants it back, if tokens are not enough: an environment of
    text packs its question and answer (`roles.envs.text`)."""

    environment: str = ""
    """Which of the run's environments it is of (`roles.envs.mix`)."""

    kind: str = ""
    """Name under which the task is counted in evaluations; empty if there is only one kind."""


class Environment(Protocol):
    """A task source and a verifier, in tokens. Implementations are deterministic and hold no
    state.

    What speaks text is a `roles.envs.text.TextEnvironment`.
    """

    name: str
    """Name of the environment in the run file."""

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """Return the task of a seed of 32 bytes; ``held_out`` draws from tasks that are never
        trained on.
        """
        ...

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """Return the reward of a completion, 0 to 1; never raises, whatever the tokens."""
        ...

    def evaluation(self) -> list[Task]:
        """Return the fixed held-out tasks that progress is measured on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """A run's limits of completions of several turns."""

    most: int
    """Most turns of a completion."""
    heard: int
    """Tokens that may be inserted in a completion."""
    max_new_tokens: int
    """Most tokens that are drawn in a completion."""
    end_tokens: tuple[int, ...]
    """Tokens that each end a turn."""


@runtime_checkable
class TurnEnvironment(Environment, Protocol):
    """An environment that answers the model within a completion (`roles.envs.turns`)."""

    def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
        """Return the environment's answer to ``tokens``, all tokens that the model has drawn,
        of which the last ends a turn: 1 to ``room`` tokens without an end token, or None to end
        the completion. The result depends on the arguments only: strangers compute it again."""
        ...


@runtime_checkable
class ReadableEnvironment(Environment, Protocol):
    """An environment that people can read along."""

    def text(self, task: Task, tokens: Sequence[int]) -> str:
        """Return ``tokens`` of a prompt or a completion of ``task`` as people read them."""
        ...


@runtime_checkable
class TeachingEnvironment(Environment, Protocol):
    """An environment that a model without a base can be taught from the first weights on."""

    vocabulary: str
    """One character per token id; the model's must be as large."""

    def solution(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return a completion that earns 1, end token included.

        Raises:
            ValueError: The prompt is not one of this environment's.
        """
        ...

    def warm_up(self, rng: Random, count: int) -> list[Task]:
        """Return fresh clean examples for supervised learning, never held-out ones."""
        ...


def environment_digest(name: str) -> bytes:
    """sha256 over the files of the package that holds an environment, none of which is imported
    for it.

    Of an environment that comes with Shoal, over the one module that defines it, and that which
    pins its interpreter: another version of Shoal may run the same game. Raises `ConfigError`
    if there is no such environment, or too much to hash.
    """
    module = find_environment(name).module
    is_ours = module.partition(".")[0] == __name__.partition(".")[0]
    digest = module_digest(module) if is_ours else package_digest(module.partition(".")[0])
    if digest is not None and runs_python(name):
        digest = hashlib.sha256(digest + (module_digest("roles.envs.wasm") or b"")).digest()
    if digest is None:
        raise ConfigError(
            f"the environment {name!r} has no files to hash: is {module} installed whole?"
        )
    return digest


def check_pins(run: Run) -> None:
    """Check that the environments of ``run`` are installed here with the same source.

    Nothing is imported.

    Raises:
        ConfigError: An environment is missing, or has other source.
    """
    for pin in run.terms.environments:
        if environment_digest(pin.name) != pin.digest:
            raise ConfigError(
                f"the environment {pin.name!r} installed here differs from the one of run"
                f" {run.name!r}; install the version that the owner of the run used"
            )


def is_ours(name: str) -> bool:
    """Return True if an environment comes with Shoal; another package may take its name."""
    return name in _BUILT_IN and find_environment(name).value == _BUILT_IN[name]


def environment_names() -> list[str]:
    """Return the names of all environments that are installed."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def evaluates_nothing(name: str) -> bool:
    """Return True if ``name`` is in `EVALUATES_NOTHING` and no other package has taken it."""
    return name in EVALUATES_NOTHING and is_ours(name)


def runs_python(name: str) -> bool:
    """Return True if an environment needs the interpreter of Python (`roles.envs.wasm`)."""
    return name.partition(".")[0] in RUN_PYTHON


def environment_places(name: str) -> tuple[str, ...]:
    """Return the absolute paths of an environment's package; none if there is no such
    package.
    """
    try:
        return package_places(find_environment(name).module.partition(".")[0])
    except ConfigError:
        return ()


def find_environment(name: str) -> EntryPoint:
    """Return the entry point of an environment, without importing it.

    Raises:
        ConfigError: There is none, or the name is ``module:Class`` (see `NAME`).
    """
    if name.startswith(CAPSULES) and NAME.fullmatch(name):
        return EntryPoint(name, "roles.envs.capsule:open_capsule", ENTRY_POINTS)
    found = list(entry_points(group=ENTRY_POINTS, name=name)) if NAME.fullmatch(name) else []
    if not found and name in _BUILT_IN:  # run from a source tree that is not installed
        return EntryPoint(name, _BUILT_IN[name], ENTRY_POINTS)
    if not found:
        known = sorted(
            {*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))}
        )
        raise ConfigError(
            f"there is no environment {name!r}; installed are {', '.join(known)} (packages add"
            f" their own under the entry point group {ENTRY_POINTS})"
        )
    return found[0]


def make_environment(name: str, **options: object) -> Any:
    """Find an environment by the name of its entry point, import it and make it: an
    `Environment`, or a `roles.envs.text.TextEnvironment`.

    ``options`` go to its class: ``kinds`` and ``data``, where a run pins them. Raises
    `ConfigError` if there is none, or its class takes no such option. A run's are compared with
    what the run pins first (`check_pins`).
    """
    point = find_environment(name)
    try:
        kind = getattr(importlib.import_module(point.module), point.attr)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"the environment {name!r} cannot be loaded from {point.value}: {error}"
        ) from error
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        given = f" with {' and '.join(options)}" if options else ""
        raise ConfigError(f"the environment {name!r} cannot be made{given}: {error}") from error


def open_teaching(name: str | None) -> TeachingEnvironment:
    """Return the environment that teaches a model without a base.

    Raises:
        ConfigError: The environment cannot teach.
    """
    if name is None:
        raise ConfigError("no environment teaches a model that has a base")
    environment = make_environment(name)
    if not isinstance(environment, TeachingEnvironment):
        raise ConfigError(
            f"the environment {name!r} teaches no model from its first weights on (it has no"
            " warm_up and solution): give the run a base, or the environment sort"
        )
    return environment
