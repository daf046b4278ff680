"""The objective of a DiLoCo member's inner steps: the loss on text, or GRPO on its own answers.

A batch is whatever the member's `roles.diloco.material` gives for a step: rows of tokens, or
questions. An objective adds the gradient of one to the weights' own; what steps with it is
`roles.diloco.pretrain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roles.contract.core.diloco import DilocoTerms
from roles.diloco.material import Rewards, SeededTask
from roles.engines.base import Completion, Group, Sampling, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.torch.device import send
from roles.engines.torch.gradient import (
    SLICE,
    Aim,
    add_gradient,
    learning_batches,
    old_log_probs,
)
from roles.engines.torch.learner import supervised
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sampler import draw
from roles.rl.algorithms.base import has_spread, normalised
from roles.rl.algorithms.find import find_algorithm

Arithmetic = Callable[[], torch.autocast]
"""A function that opens the precision in which training computes, as a context."""
GREEDY: Final = 0.0
"""The temperature at which an answer is the most probable one: how progress is measured."""


class TextLoss:
    """Nats a token, with max-z-loss. The head takes `SLICE` tokens at a time, as it does of
    drawn ones (`roles.engines.torch.gradient`)."""

    def __init__(self, terms: DilocoTerms, arithmetic: Arithmetic) -> None:
        self._terms, self._arithmetic = terms, arithmetic

    def rate_at(self, number: int) -> float:
        """Return the learning rate of the run's inner step ``number``."""
        return self._terms.rate_at(number)

    def add_gradient(
        self, model: TransformerModel, batch: Any, number: int, weight: float = 1.0
    ) -> float:
        """Add ``weight`` times the gradient of a batch to the weights' gradients. Return the
        mean loss."""
        read = send(batch, model.device)
        with self._arithmetic():
            states = model(read[:, :-1]).flatten(0, 1)
        total, gradients = 0.0, list[Tensor]()
        for part, wanted in _sliced(states, read[:, 1:].flatten()):
            cut = part.detach().requires_grad_()
            logits = model.logits(cut).float()
            loss = F.cross_entropy(logits, wanted, reduction="sum")
            z_loss = self._terms.z_loss
            penalty = z_loss * logits.amax(-1).square().sum() if z_loss else 0.0
            torch.autograd.backward((loss + penalty) * (weight / len(states)))
            assert cut.grad is not None
            gradients.append(cut.grad)
            total += float(loss.detach())
        torch.autograd.backward(states, torch.cat(gradients))
        return total / len(states)

    def total(self, model: TransformerModel, batch: Any) -> float:
        """Return the loss summed over a held-out batch."""
        read = send(batch, model.device)
        states = model(read[:, :-1]).flatten(0, 1)
        return math.fsum(
            float(F.cross_entropy(model.logits(part).float(), wanted, reduction="sum"))
            for part, wanted in _sliced(states, read[:, 1:].flatten())
        )

    def size(self, batch: Any) -> int:
        """Return the number of tokens that a batch counts."""
        return int(batch[:, 1:].size)


class RewardLoss:
    """One less the reward, by GRPO on groups that the model being trained draws itself; so the
    ratio is 1 throughout, and neither clip nor importance weight binds. A model without a base
    first learns the environment's clean examples, as in other runs."""

    def __init__(
        self,
        config: EngineConfig,
        terms: DilocoTerms,
        rewards: Rewards,
        arithmetic: Arithmetic,
    ) -> None:
        assert config.learner is not None
        self._config, self._terms, self._rewards = config, terms, rewards
        self._arithmetic = arithmetic
        self._warm_up = None if rewards.teacher is None else config.learner.warm_up

    def rate_at(self, number: int) -> float:
        """Return the learning rate of a step; the warm-up has a schedule of its own."""
        if self._warm_up is not None and number < self._warm_up.steps:
            return self._warm_up.rate_at(number)
        return self._terms.rate_at(number)

    def add_gradient(
        self, model: TransformerModel, batch: Any, number: int, weight: float = 1.0
    ) -> float:
        """Add the gradient of a batch and return the share of wrong answers, or a warm-up's
        loss.

        Groups whose rewards do not differ have no gradient.
        """
        if self._warm_up is not None and number < self._warm_up.steps:
            return self._learn_examples(model, batch[0].seed, self._warm_up.batch)
        sampling = self._config.sampling
        groups, rewards = self._draw(model, batch, sampling.temperature, sampling.group_size)
        taught = [
            TrainingGroup(question.task.prompt, _without_proofs(group), tuple(paid))
            for question, group, paid in zip(batch, groups, rewards, strict=True)
            if has_spread(paid)
        ]
        if taught:
            self._reinforce(model, taught)
        return 1.0 - sum(map(sum, rewards)) / sum(map(len, rewards))

    def _learn_examples(self, model: TransformerModel, seed: bytes, count: int) -> float:
        assert self._rewards.teacher is not None
        examples = self._rewards.teacher.warm_up(Random(seed), count)
        tokens, answer = supervised(examples, model.device)
        logits = model.logits(model(tokens[:, :-1])[answer])
        loss = F.cross_entropy(logits, tokens[:, 1:][answer])
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _draw(
        self,
        model: TransformerModel,
        batch: Sequence[SeededTask],
        temperature: float,
        size: int,
    ) -> tuple[list[Group], list[list[float]]]:
        """Return a group of answers to each question, and the reward of each answer."""
        sampling = Sampling(temperature, self._config.sampling.max_new_tokens, size)
        asked, ends = [one.group(size) for one in batch], frozenset(self._config.end_tokens)
        groups = draw(model, asked, sampling, ends, self._config.draw)
        return groups, [
            [self._rewards.pay(question, one.tokens) for one in group.completions]
            for question, group in zip(batch, groups, strict=True)
        ]

    def _reinforce(self, model: TransformerModel, groups: Sequence[TrainingGroup]) -> None:
        sampling = self._config.sampling
        advantages = [normalised(one.rewards, 1e-6) for one in groups]
        batches = learning_batches(groups, advantages, device=model.device)
        aim = Aim(
            objective=find_algorithm("grpo"),
            temperature=sampling.temperature,
            limit=sampling.max_new_tokens,
            tokens=sum(map(len, batches)),
            sequences=sum(len(one.completions) for one in groups),
        )
        with self._arithmetic():
            for batch in batches:
                drawn_by = old_log_probs(model, batch, sampling.temperature)
                add_gradient(model, replace(batch, sampler=drawn_by), aim, drawn_by)

    def total(self, model: TransformerModel, batch: Any) -> float:
        """Return the number of wrong answers when the most probable tokens are drawn."""
        _, rewards = self._draw(model, batch, GREEDY, 1)
        return len(rewards) - sum(map(sum, rewards))

    def size(self, batch: Any) -> int:
        """Return the number of questions."""
        return len(batch)


def _without_proofs(group: Group) -> tuple[Completion, ...]:
    """Return the completions in the form that a batch needs, without proofs and log-probs,
    which the model computes again."""
    return tuple(replace(one, logprobs=(0.0,) * len(one.tokens)) for one in group.completions)


def _sliced(states: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(states), SLICE):
        yield states[start : start + SLICE], wanted[start : start + SLICE]
