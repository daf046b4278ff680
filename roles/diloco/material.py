"""The material of a member: windows of text, or questions of an environment, by number.

The run's record says which numbers are whose (`roles.diloco.core.windows`); a number leads to
the same window, and the same question, on every machine. All of this is used in the worker's
process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import ConfigError
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.core.windows import windows
from roles.diloco.corpus import Windows
from roles.engines.base import GroupTask
from roles.engines.config import EngineConfig
from roles.envs.base import Task, TeachingEnvironment
from roles.envs.contained import Payment, evaluation_of, task_of
from roles.envs.mix import MixedEnvironment

EVALUATED: Final = 32
"""Windows, or questions, whose loss is measured in one pass."""
DOMAIN: Final = b"/shoal/diloco/question/1.0.0"
"""Prefix of the hash that makes a question's seed, so that no other use gives the same seed."""


class Texts:
    """Windows of a corpus."""

    def __init__(self, corpus: Windows, config: EngineConfig, terms: DilocoTerms) -> None:
        self._corpus, self._seed, self._terms = corpus, config.seed, terms

    def batches(self, window: int, first: int, steps: int) -> list[NDArray[np.int64]]:
        """Return the rows of the inner steps from ``first`` on, from the number ``window`` on;
        the last steps are those of the annealing mixture."""
        corpus, sequences = self._corpus, self._terms.sequences
        plain = min(steps, max(0, self._terms.stable_steps - first))
        found = list[NDArray[np.int64]]()
        for begin, end, starts in (
            (0, plain, corpus.starts),
            (plain, steps, corpus.annealed),
        ):
            numbers = windows(
                self._seed, window + begin * sequences, (end - begin) * sequences,
                int(starts.size),
            )  # fmt: skip
            rows = corpus.read(starts[numbers])
            found.extend(rows.reshape(end - begin, sequences, corpus.width))
        return found

    def held_out(self) -> list[NDArray[np.int64]]:
        """Return the held-out text or tasks, in batches of one pass each."""
        held = self._corpus.held_out
        return [
            self._corpus.read(held[at : at + EVALUATED])
            for at in range(0, held.size, EVALUATED)
        ]


@dataclass(frozen=True, slots=True)
class SeededTask:
    """A task with the seed of its question and of its answers."""

    number: int
    seed: bytes
    task: Task

    def group(self, size: int) -> GroupTask:
        """Return the request to sample ``size`` answers to this question."""
        seeds = tuple(_drawn_from(self.seed + one.to_bytes(2, "big")) for one in range(size))
        return GroupTask(self.number, self.task.prompt, seeds)


class Rewards:
    """Questions of the run's environments, and the rewards of answers."""

    def __init__(
        self,
        environment: MixedEnvironment,
        teacher: TeachingEnvironment | None,
        config: EngineConfig,
        terms: DilocoTerms,
    ) -> None:
        """Prepare questions; ``teacher`` has the clean examples for a model without a base."""
        self._environment, self.teacher = environment, teacher
        self._config, self._terms = config, terms
        if teacher is not None and len(teacher.vocabulary) > config.shape.vocabulary:
            raise ConfigError(
                f"the environment {teacher.name!r} has {len(teacher.vocabulary)} tokens, the"
                f" model {config.shape.vocabulary}"
            )
        held = evaluation_of(environment)[: terms.held_out]
        self._held = [
            SeededTask(one, self._seed(-1 - one), task) for one, task in enumerate(held)
        ]

    def _seed(self, number: int) -> bytes:
        return _drawn_from(f"{self._config.seed} {number}".encode())

    def batches(self, window: int, first: int, steps: int) -> list[list[SeededTask]]:
        """Return the questions of each inner step, as `Texts.batches` does with windows."""
        each = self._terms.sequences
        return [
            [self._question(number) for number in range(start, start + each)]
            for start in range(window, window + steps * each, each)
        ]

    def _question(self, number: int) -> SeededTask:
        seed = self._seed(number)
        return SeededTask(number, seed, task_of(self._environment, seed))

    def held_out(self) -> list[list[SeededTask]]:
        """Return the held-out text or tasks, in batches of one pass each."""
        return [self._held[at : at + EVALUATED] for at in range(0, len(self._held), EVALUATED)]

    def pay(self, question: SeededTask, tokens: Sequence[int]) -> float:
        """Return the reward of an answer; the environment's failures earn nothing."""
        payment = Payment()
        payment.pay(self._environment, question.task, tokens)
        return payment.rewards[0]


def _drawn_from(data: bytes) -> bytes:
    return hashlib.sha256(DOMAIN + data).digest()
