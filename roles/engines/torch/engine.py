"""The torch engine in its worker process: one policy to sample and score with, one to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from roles.engines.base import (
    Answers,
    EngineError,
    Group,
    GroupTask,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.files import load_weights
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel


class TorchEngine:
    """Implements `roles.engines.worker.LocalEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._end_tokens = frozenset(config.end_tokens)
        self._policy: TransformerModel | None = None
        self._learner: TorchLearner | None = None

    def load(self, weights: str) -> None:
        """See `roles.engines.base.Generator`."""
        policy = self._policy
        self._policy = None  # until it is whole again
        if policy is None:
            policy = TransformerModel(self._config.shape, self._config.dtype)
            policy.lay_for_reading()
        load_weights(policy, Path(weights))
        self._policy = policy

    def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        """See `roles.engines.base.Generator`."""
        self._check_lengths(tasks, sampling)
        return sampler.generate(
            self._loaded(), tasks, sampling, self._end_tokens, self._config.draw
        )

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """See `roles.engines.base.Scorer`."""
        self._check_lengths(tasks, sampling)
        return scorer.score(
            self._loaded(), tasks, groups, sampling, self._end_tokens, self._config.draw
        )

    def open(self, checkpoint: str, base: str = "") -> int:
        """See `roles.engines.base.Learner`."""
        learner = TorchLearner(self._config)
        step = learner.open(Path(checkpoint), Path(base) if base else None)
        self._learner = learner
        return step

    def adopt(self, weights: str, step: int, base: str = "") -> None:
        """See `roles.engines.base.Learner`."""
        learner = TorchLearner(self._config)
        learner.adopt(Path(weights), step, Path(base) if base else None)
        self._learner = learner

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """See `roles.engines.base.Learner`."""
        return self._opened().step(groups)

    def save(self, checkpoint: str, weights: str) -> None:
        """See `roles.engines.base.Learner`."""
        self._opened().save(
            Path(checkpoint) if checkpoint else None, Path(weights) if weights else None
        )

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """See `roles.engines.base.Learner`."""
        return self._opened().answer(tasks, sampling)

    def _loaded(self) -> TransformerModel:
        if self._policy is None:
            raise EngineError("no weights were loaded")
        return self._policy

    def _check_lengths(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Raise `EngineError` if a prompt leaves too little of the context for its answer."""
        longest = max((len(task.prompt) for task in tasks), default=0)
        if longest + sampling.max_new_tokens > self._config.context:
            raise EngineError(
                f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed"
                f" the context of {self._config.context}: lower max_new_tokens of the recipe,"
                " or let the environment ask shorter questions"
            )

    def _opened(self) -> TorchLearner:
        if self._learner is None:
            raise EngineError("the learner was not opened")
        return self._learner
