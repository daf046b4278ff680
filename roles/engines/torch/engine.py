"""The tiny engine in its worker process: one policy to sample and score with, one to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from p2p.errors import ConfigError
from proofs.checks import Evidence
from roles.engines.base import (
    EngineError,
    Group,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.files import load_weights
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.envs.base import TeachingEnvironment, open_teaching


class TorchEngine:
    """Implements `roles.engines.worker.LocalEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._end_tokens = frozenset(config.end_tokens)
        self._environment = None if config.environment is None else _teacher(config)
        self._policy: TransformerModel | None = None
        self._learner: TorchLearner | None = None

    def load(self, weights: str) -> None:
        """See `roles.engines.base.Generator`."""
        policy = self._policy or TransformerModel(self._config.shape)
        load_weights(policy, Path(weights))
        self._policy = policy

    def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        """See `roles.engines.base.Generator`."""
        return sampler.generate(self._loaded(), tasks, sampling, self._end_tokens)

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Evidence]:
        """See `roles.engines.base.Scorer`."""
        return scorer.score(self._loaded(), tasks, groups, sampling, self._end_tokens)

    def open(self, checkpoint: str, base: str = "") -> int:
        """See `roles.engines.base.Learner`."""
        learner = TorchLearner(self._config, self._environment)
        step = learner.open(Path(checkpoint), Path(base) if base else None)
        self._learner = learner
        return step

    def adopt(self, weights: str, step: int, base: str = "") -> None:
        """See `roles.engines.base.Learner`."""
        learner = TorchLearner(self._config, self._environment)
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

    def answer(
        self, prompts: Sequence[tuple[int, ...]], temperature: float
    ) -> list[tuple[int, ...]]:
        """See `roles.engines.base.Learner`."""
        return self._opened().answer(prompts, temperature)

    def _loaded(self) -> TransformerModel:
        if self._policy is None:
            raise EngineError("no weights were loaded")
        return self._policy

    def _opened(self) -> TorchLearner:
        if self._learner is None:
            raise EngineError("the learner was not opened")
        return self._learner


def _teacher(config: EngineConfig) -> TeachingEnvironment:
    """Raises `ConfigError` if it teaches no model, or not one with so few tokens."""
    environment = open_teaching(config.environment)
    tokens = len(environment.vocabulary)
    if tokens > config.shape.vocabulary:
        raise ConfigError(
            f"the environment {config.environment!r} has {tokens} tokens, the model"
            f" {config.shape.vocabulary}"
        )
    return environment
