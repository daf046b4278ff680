"""The environments of a run as one: each task comes from one of them, by weight.

Which one follows from the task's seed, as the task itself does, so that a worker cannot choose
and a validator finds the same: the first eight bytes of sha256(`DOMAIN` + seed), as a
big-endian fraction of 2^64, fall into one of the intervals that the weights divide 0 to 1 into,
in the order of the run file. The environment gets the seed as it is. With one environment
nothing is drawn.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

from p2p.errors import ConfigError
from roles.contract.core.pin import FilePin
from roles.envs.base import (
    Environment,
    ReadableEnvironment,
    Task,
    TeachingEnvironment,
    TurnLimits,
    make_environment,
)
from roles.envs.contained import EnvironmentFailed, Failures
from roles.envs.data import lies_in, open_tokenizer, read_data
from roles.envs.text import (
    ChatTokenizer,
    LengthTargets,
    TextModel,
    TokenizedEnvironment,
    TokenizedTurns,
    is_text,
    is_turns,
)
from roles.envs.turns import Heard, hear
from roles.envs.wasm import use_modules
from roles.models.errors import BadModel

DOMAIN: Final = b"/shoal/environment/1.0.0"
"""Prefix of the hash that chooses an environment: so the choice is independent of what an
environment draws from the same seed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPart:
    """One environment of a run."""

    name: str
    """Name of its entry point."""

    weight: float = 1.0
    """Share of the tasks that come from it, relative to the other weights."""

    kinds: Mapping[str, float] = field(default_factory=dict)
    """Weights of its kinds of tasks; empty: as it likes."""

    data: FilePin | None = None
    """The file that it reads."""

    lengths: LengthTargets | None = None
    """Targets for the length of its answers; None: no targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetup:
    """The settings with which the environments of a run are opened."""

    parts: tuple[EnvironmentPart, ...]
    """The environments, at least one."""

    model: TextModel | None = None
    """The model of a run with a base, whose environments speak text; None: they speak
    tokens.
    """

    folder: str = ""
    """Folder of this machine with the files that the parts read."""

    turns: TurnLimits | None = None
    """Limits of completions of several turns; None: completions have one turn."""

    modules: str = ""
    """Folder of this machine for compiled interpreters (`roles.envs.wasm`), if one is used."""

    def place_of(self, data: FilePin) -> str:
        """Return the folder of this machine with a file: a capsule lies in the model's
        folder.
        """
        if self.model is not None and lies_in(self.model.folder, data.name):
            return self.model.folder
        return self.folder

    def __str__(self) -> str:
        return " and ".join(repr(part.name) for part in self.parts)


class MixedEnvironment:
    """Several environments of tokens as one."""

    def __init__(
        self,
        parts: Mapping[str, tuple[float, Environment]],
        turns: TurnLimits | None = None,
    ) -> None:
        """Weights and environments by their names in the run file."""
        self._turns, self._failures = turns, Failures()
        self.name = " and ".join(parts)
        self._names = list(parts)
        self.environments = {name: environment for name, (_, environment) in parts.items()}
        self._bounds = list(accumulate(weight for weight, _ in parts.values()))

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """Return the task of a seed, from the environment that the seed chooses."""
        name = self._chosen(seed)
        task = self.environments[name].task(seed, held_out=held_out)
        return replace(task, environment=name)

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """Return the reward that the task's own environment gives."""
        environment = self.environments.get(task.environment)
        if environment is None:
            raise EnvironmentFailed(f"a task is of the environment {task.environment!r:.80}")
        return environment.reward(task, tokens)

    def hear(self, task: Task, tokens: Sequence[int]) -> Heard:
        """Return the answers of the task's own environment within a completion."""
        environment = self.environments.get(task.environment)
        if environment is None or self._turns is None:
            raise EnvironmentFailed(f"nothing answers in a task of {task.environment!r:.80}")
        return hear(environment, task, tokens, self._turns, self._failures.tell)

    def expect(self, method: str, answers: Sequence[tuple[Task, Sequence[Any]]]) -> None:
        """Let environments that prefer calls in bulk prepare the coming calls."""
        for name, environment in self.environments.items():
            if isinstance(environment, TokenizedEnvironment):
                own = [pair for pair in answers if pair[0].environment == name]
                environment.expect(method, own)

    def text(self, task: Task, tokens: Sequence[int]) -> str:
        """Return tokens as people read them: by the environment, or by its vocabulary if it
        teaches.

        The text is empty if the environment does neither.
        """
        environment = self.environments.get(task.environment)
        if isinstance(environment, ReadableEnvironment):
            return environment.text(task, tokens)
        signs = environment.vocabulary if isinstance(environment, TeachingEnvironment) else ""
        return "".join(signs[token] for token in tokens if token < len(signs))

    def evaluation(self) -> list[Task]:
        """Return the held-out tasks of all environments, one environment after the other."""
        return [
            replace(task, environment=name)
            for name, environment in self.environments.items()
            for task in environment.evaluation()
        ]

    def _chosen(self, seed: bytes) -> str:
        if len(self._names) == 1:
            return self._names[0]
        number = int.from_bytes(hashlib.sha256(DOMAIN + seed).digest()[:8], "big")
        point = math.ldexp(number, -64) * self._bounds[-1]
        return self._names[bisect_right(self._bounds, point, hi=len(self._names) - 1)]


def kind_of(task: Task) -> str:
    """Return the name under which a task is counted: its environment, and its kind if there are
    several.
    """
    return f"{task.environment}/{task.kind}" if task.kind else task.environment


def open_mix(setup: EnvironmentSetup) -> MixedEnvironment:
    """Import and make the environments of a run, in their own process.

    Raises `ConfigError` if one cannot be made, reads another file, or does not speak what the
    run's model does.
    """
    if setup.modules:
        use_modules(setup.modules)
    try:
        tokenizer = None if setup.model is None else open_tokenizer(setup.model.folder)
        parts = {
            part.name: (part.weight, _open(part, setup, tokenizer)) for part in setup.parts
        }
    except BadModel as error:
        raise ConfigError(f"the run's model cannot be used: {error}") from error
    return MixedEnvironment(parts, setup.turns)


def _open(
    part: EnvironmentPart, setup: EnvironmentSetup, tokenizer: ChatTokenizer | None
) -> Environment:
    options: dict[str, object] = {"kinds": dict(part.kinds)} if part.kinds else {}
    if part.data is not None:
        options["data"] = read_data(part.data, setup.place_of(part.data))
    environment = make_environment(part.name, **options)
    if hasattr(environment, "respond") and setup.turns is None:
        raise ConfigError(
            f"the environment {part.name!r} answers the model, and this run has completions of"
            " one turn: set turns and heard in [sampling], such as 4 and 256"
        )
    if not is_text(environment) and tokenizer is None:
        tokens: Environment = environment
        return tokens
    if is_text(environment) and tokenizer is not None and setup.model is not None:
        if is_turns(environment):
            return TokenizedTurns(environment, tokenizer, setup.model, part.lengths)
        return TokenizedEnvironment(environment, tokenizer, setup.model, part.lengths)
    raise ConfigError(
        f"the environment {part.name!r} is of {'tokens' if tokenizer else 'text'}, the run's"
        f" model {'reads text' if tokenizer else 'has no base, and with it no tokenizer'}: the"
        " owner of the run must change the one or the other"
    )
