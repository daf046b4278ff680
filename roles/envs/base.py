"""What an environment is: a source of tasks and a checker of answers, versioned by the hash of its source.

Tasks are functions of a seed that nobody chooses (run, policy, node and group are hashed into it), so a
worker cannot pick easy ones and a validator can recompute them. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from random import Random
from typing import Final, Protocol, cast

from p2p.errors import ConfigError

ENTRY_POINTS: Final = "shoal.envs"
"""Packages add environments under this entry point group: ``name = module:Class``."""

_BUILT_IN: Final = {"sort": "roles.envs.sort:SortEnvironment"}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the answer that earns the full reward, as tokens; the answer includes the end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Environment(Protocol):
    """A task source and a verifier. Implementations are deterministic and hold no state."""

    name: str
    """As the run file names it."""

    digest: bytes
    """sha256 of the source: two nodes with different digests do not play the same game."""

    vocabulary: str
    """One character per token id."""

    end_token: int
    """Ends a completion; also pads."""

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """The task of a seed of 32 bytes; ``held_out`` draws from those that are never trained on."""
        ...

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """What a completion earns, 0 to 1; never raises, whatever the tokens."""
        ...

    def solution(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """A completion that earns 1, end token included. Raises ValueError if it is no prompt of ours."""
        ...

    def evaluation(self) -> list[Task]:
        """The fixed held-out tasks that progress is measured on."""
        ...

    def warm_up(self, rng: Random, count: int) -> list[Task]:
        """Fresh clean examples for supervised learning, never held-out ones."""
        ...


def source_digest(environment: type) -> bytes:
    """sha256 of the source of the module that defines ``environment``."""
    module = inspect.getmodule(environment)
    if module is None:
        raise ConfigError(f"the environment {environment.__qualname__} has no source to hash")
    return hashlib.sha256(inspect.getsource(module).encode()).digest()


def open_environment(name: str) -> Environment:
    """Find an environment: a built-in name, an installed entry point, or ``module:Class``.

    Raises `ConfigError` if there is none.
    """
    target = name if ":" in name else _BUILT_IN.get(name)
    if target is None:
        found = list(entry_points(group=ENTRY_POINTS, name=name))
        if not found:
            known = sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})
            raise ConfigError(f"there is no environment {name!r}; installed are {', '.join(known)}")
        target = found[0].value
    module, _, attribute = target.partition(":")
    try:
        return cast(Environment, getattr(importlib.import_module(module), attribute)())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the environment {name!r} cannot be loaded from {target}: {error}") from error
