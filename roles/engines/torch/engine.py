"""The torch engine in its worker process: one policy to sample and score with, one to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from roles.engines.base import (
    Answers,
    EngineError,
    Group,
    GroupTask,
    Placement,
    Row,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
    check_numbers,
)
from roles.engines.config import EngineConfig, GpuOptions
from roles.engines.hardware import gpus, idle_gpus, threads_of, torch_version
from roles.engines.torch import scorer
from roles.engines.torch.device import find_device
from roles.engines.torch.files import load_weights
from roles.engines.torch.hosted import new_model
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sampler import Sampler

if TYPE_CHECKING:
    from roles.engines.torch.ranks import SharedLearner


class TorchEngine:
    """Implements `roles.engines.worker.LocalEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(threads_of(config))
        self._config = config
        self.device = find_device(config.device)
        self._end_tokens = frozenset(config.end_tokens)
        self._policy: TransformerModel | None = None
        self._sampler: Sampler | None = None
        self._learner: TorchLearner | SharedLearner | None = None
        self._shared: SharedLearner | None = None

    def placement(self) -> Placement:
        cards, seen = gpus(), torch.cuda.device_count()
        idle = idle_gpus(cards, self.device.type, seen, torch_version())
        return Placement("torch", str(self.device), torch.get_num_threads(), idle)

    def load(self, weights: str) -> None:
        if self._sampler is not None and self._sampler.has_work:
            raise EngineError(
                "groups are under way, and would be written by two policies: draw them to their"
                " end, or drop them, before other weights are loaded"
            )
        policy = self._policy
        self._policy = self._sampler = None  # until it is whole again
        if policy is None:
            shape, dtype = self._config.shape, self._config.dtype
            policy = new_model(shape, dtype, self.device, Path(weights))
            policy.lay_for_reading()
        load_weights(policy, Path(weights))
        self._policy = policy

    @property
    def has_room(self) -> bool:
        return self._sampler is None or self._sampler.has_room

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        self._check_lengths(tasks, sampling)
        policy = self._loaded()
        if self._sampler is None:
            self._sampler = Sampler(policy, self._end_tokens, self._config.draw, proves=True)
        check_numbers(tasks, self._sampler.numbers())
        self._sampler.add(tasks, sampling)

    def advance(self, seconds: float) -> list[Group]:
        sampler, end = self._sampler, perf_counter() + seconds
        if sampler is None:
            return []
        while sampler.can_step:
            sampler.step()
            if perf_counter() >= end:
                break
        return [group for _, group in sampler.take_ended()]

    @property
    def waiting(self) -> list[Row]:
        return [] if self._sampler is None else self._sampler.paused()

    def hear(self, answers: Sequence[Row]) -> None:
        if self._sampler is None:
            raise EngineError("nothing is under way that could hear an answer")
        self._sampler.hear(answers)

    def drop(self) -> None:
        self._sampler = None

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        self._check_lengths(tasks, sampling)
        return scorer.score(
            self._loaded(), tasks, groups, sampling, self._end_tokens, self._config.draw
        )

    def open(self, checkpoint: str, base: str = "") -> int:
        learner = self._new_learner(base)
        step = learner.open(Path(checkpoint), Path(base) if base else None)
        self._learner = learner
        return step

    def adopt(self, weights: str, step: int, base: str = "") -> float:
        learner = self._learner or self._new_learner(base)
        changed = learner.adopt(Path(weights), step, Path(base) if base else None)
        if self._learner is None:
            changed = 0.0
        self._learner = learner
        return changed

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        return self._opened().step(groups)

    def save(self, checkpoint: str, weights: str) -> None:
        self._opened().save(
            Path(checkpoint) if checkpoint else None, Path(weights) if weights else None
        )

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        return self._opened().answer(tasks, sampling)

    def _loaded(self) -> TransformerModel:
        if self._policy is None:
            raise EngineError("no weights were loaded")
        return self._policy

    def _check_lengths(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Raise `EngineError` if a prompt leaves too little of the context for its answer."""
        longest = max((len(task.prompt) for task in tasks), default=0)
        if longest + sampling.max_new_tokens + sampling.heard > self._config.context:
            more = sampling.max_new_tokens + sampling.heard
            raise EngineError(
                f"a prompt of {longest} tokens and {more} new ones exceed"
                f" the context of {self._config.context}: lower max_new_tokens in [sampling],"
                " or let the environment ask shorter questions"
            )

    def _new_learner(self, base: str) -> TorchLearner | SharedLearner:
        options, architecture = self._config.gpus, self._config.shape.architecture
        if architecture and options != GpuOptions():
            raise EngineError(
                f"transformers computes the {architecture} of this run, on one device and"
                " without recomputing: leave out ranks, recompute and offload"
            )
        if options.ranks == 1 and not options.offload:
            folder = Path(base) if base else None
            return TorchLearner(self._config, self.device, folder=folder)
        if self._shared is None:
            from roles.engines.torch.ranks import SharedLearner

            self._shared = SharedLearner(self._config)
        return self._shared

    def close(self) -> None:
        """End the other processes of the learner. They end with this process as well."""
        if self._shared is not None:
            self._shared.close()

    def _opened(self) -> TorchLearner | SharedLearner:
        if self._learner is None:
            raise EngineError("the learner was not opened")
        return self._learner
