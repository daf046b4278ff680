"""The trainer's half of the recipe: warm-up, the GRPO step, checkpoints, evaluation."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from roles.engines.base import (
    EngineError,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
    previous_generation,
)
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler
from roles.engines.torch.files import (
    encode_weights,
    load_weights,
    open_seal,
    seal,
    write_atomically,
    write_generation,
)
from roles.engines.torch.model import TransformerModel
from roles.envs.base import Ration, Task, TeachingEnvironment
from roles.envs.ration import interrupted
from roles.rl.advantage import group_advantages
from roles.rl.losses import clipped_loss, importance_weight, is_clipped, k3

_CHUNK: Final = 64
"""Rows of the pass that recomputes log-probs: as many as the scorer reads at once
(`roles.engines.torch.scorer.CHUNK`), for the same reason."""

T = TypeVar("T")

_FORMAT: Final = "shoal torch checkpoint 2"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Prompts with completions, padded on the right. Column p of all but ``tokens`` is about
    token p + 1.
    """

    tokens: Tensor
    answer: Tensor
    """Whether token p + 1 belongs to the completion."""
    behaviour: Tensor
    """Log-probs that the sampler reported."""
    advantage: Tensor
    """(rows, 1)."""
    columns: int
    """Tokens of the longest completion."""

    def select(self, rows: Tensor) -> _Rows:
        """Some of the rows, without the columns that they do not need."""
        width = int(self.answer[rows].any(0).nonzero().max()) + 1
        return _Rows(
            self.tokens[rows, : width + 1], self.answer[rows, :width],
            self.behaviour[rows, :width], self.advantage[rows], self.columns,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Update:
    """One minibatch, after the fact."""

    loss: float
    ratio_max: float
    clipped: float
    gradient_norm: float


class TorchLearner:
    """A policy, its optimiser, and the step they are at."""

    def __init__(self, config: EngineConfig, environment: TeachingEnvironment | None) -> None:
        self._config = config
        self._recipe = config.recipe
        self._environment = environment
        self._shuffle = torch.Generator().manual_seed(config.seed)
        self.model = TransformerModel(config.shape)
        self.step_number = 0
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(),
            self._recipe.rate,
            self._recipe.betas,
            weight_decay=0.0,
            fused=True,
        )

    def open(self, checkpoint: Path) -> int:
        """Continue from the newest sound checkpoint, or initialise and warm up. Returns the
        step.
        """
        damage = []
        for path in (checkpoint, Path(previous_generation(str(checkpoint)))):
            if path.exists():
                try:
                    self._restore(path)
                except EngineError as error:
                    damage.append(str(error))
                else:
                    return self.step_number
        if damage:
            raise EngineError(
                f"{'; '.join(damage)}; to begin again from the warm-up, remove what is damaged"
            )
        self.start()
        return self.step_number

    def adopt(self, weights: Path, step: int) -> None:
        """Go on from ``weights``, the policy of ``step``, with a fresh optimiser."""
        load_weights(self.model, weights)
        self.step_number = step

    def start(self) -> None:
        """Draw the initial weights and warm them up. Raises `EngineError` without what teaches
        them."""
        if self._environment is None:
            raise EngineError("a model without an environment that teaches it needs a base")
        self.model.initialise(self._config.seed)
        self._warm_up(self._environment)

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """One optimiser step with advantages relative to each group."""
        epsilon = self._recipe.advantage_epsilon
        return self.update(
            groups, [group_advantages(group.rewards, epsilon) for group in groups]
        )

    def update(
        self, groups: Sequence[TrainingGroup], advantages: Sequence[Sequence[float]]
    ) -> StepReport:
        """One optimiser step: minibatches of shuffled rows, one epoch. Raises `EngineError`
        without rows.
        """
        if not any(group.completions for group in groups):
            raise EngineError("a step needs at least one group")
        rows = _rows(groups, advantages)
        old, entropy = self._old_logprobs(rows)
        drift = k3(old, rows.behaviour)[rows.answer]
        for parameters in self._optimiser.param_groups:
            parameters["lr"] = self._recipe.rate_at(self.step_number)
        order = torch.randperm(len(rows.tokens), generator=self._shuffle)
        updates = [
            self._update(rows.select(part), old[part])
            for part in order.chunk(min(self._recipe.minibatches, len(order)))
        ]
        self.step_number += 1
        return StepReport(
            step=self.step_number,
            loss=math.fsum(one.loss for one in updates) / len(updates),
            k3=float(drift.mean()),
            ratio_max=max(one.ratio_max for one in updates),
            clipped=math.fsum(one.clipped for one in updates) / len(updates),
            entropy=entropy,
            gradient_norm=math.fsum(one.gradient_norm for one in updates) / len(updates),
            tokens=int(rows.answer.sum()),
        )

    def save(self, checkpoint: Path, weights: Path) -> None:
        """Write everything that `open` needs, and the policy alone."""
        buffer = io.BytesIO()
        state = {
            "format": _FORMAT,
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "shuffle": self._shuffle.get_state(),
        }
        torch.save(state, buffer)
        write_generation(
            checkpoint, Path(previous_generation(str(checkpoint))), seal(buffer.getvalue())
        )
        write_atomically(weights, encode_weights(self.model))

    def answer(
        self, prompts: Sequence[tuple[int, ...]], temperature: float
    ) -> list[tuple[int, ...]]:
        """One completion of each prompt, with the recipe's evaluation seed."""
        seed = self._recipe.evaluation_seed
        tasks = [
            GroupTask(
                index,
                prompt,
                (hashlib.sha256(f"evaluation {seed} {index}".encode()).digest(),),
            )
            for index, prompt in enumerate(prompts)
        ]
        sampling = Sampling(temperature, self._recipe.max_new_tokens, 1)
        end_tokens = frozenset(self._config.end_tokens)
        drawn = sampler.draw(self.model, tasks, sampling, end_tokens)
        return [one.completions[0].tokens for one in drawn]

    def _warm_up(self, environment: TeachingEnvironment) -> None:
        """Supervised learning on clean examples; the loss is on the answers only."""
        recipe, rng = self._recipe.warm_up, Random(self._config.seed)
        optimiser = torch.optim.AdamW(
            self.model.parameters(),
            recipe.rate,
            recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        for step in range(recipe.steps):
            for parameters in optimiser.param_groups:
                parameters["lr"] = recipe.rate_at(step)
            with interrupted(Ration()):
                examples = environment.warm_up(rng, recipe.batch)
            tokens, answer = _examples(examples)
            logits = self.model.lm_head(self.model(tokens[:, :-1])[answer])
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(logits, tokens[:, 1:][answer]))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_norm)
            optimiser.step()

    @torch.no_grad()
    def _old_logprobs(self, rows: _Rows) -> tuple[Tensor, float]:
        """Log-probs before the step, shaped as `_Rows.answer`, and the mean entropy over the
        answers.
        """
        old = torch.zeros_like(rows.behaviour)
        entropy = 0.0
        order = (
            rows.answer.long()
            .mul(torch.arange(rows.answer.shape[1]))
            .amax(1)
            .argsort(stable=True)
        )
        for start in range(0, len(order), _CHUNK):
            part = order[start : start + _CHUNK]
            chunk = rows.select(part)
            log_probs = self._log_probs(chunk)
            width = chunk.answer.shape[1]
            values = torch.zeros_like(chunk.behaviour)
            values[chunk.answer] = _take(log_probs, chunk)
            old[part, :width] = values
            entropy -= float((log_probs.exp() * log_probs).sum())
        return old, entropy / int(rows.answer.sum())

    def _update(self, rows: _Rows, old: Tensor) -> _Update:
        """One minibatch: loss, clipped gradient, optimiser."""
        answer, recipe = rows.answer, self._recipe
        before = old[:, : answer.shape[1]][answer]
        advantage = rows.advantage.expand_as(answer)[answer]
        current = _take(self._log_probs(rows), rows)
        losses = clipped_loss(
            current, before, advantage, clip=recipe.clip, clip_negative=recipe.clip_negative
        )
        weight = importance_weight(before, rows.behaviour[answer], recipe.importance_cap)
        loss = (losses * weight).sum() / (len(answer) * rows.columns)
        self._optimiser.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), recipe.gradient_norm, error_if_nonfinite=True
        )
        self._optimiser.step()
        current = current.detach()
        clipped = is_clipped(
            current, before, advantage, clip=recipe.clip, clip_negative=recipe.clip_negative
        )
        ratio = float((current - before).exp().max())
        return _Update(float(loss.detach()), ratio, float(clipped.float().mean()), float(norm))

    def _log_probs(self, rows: _Rows) -> Tensor:
        """(answer tokens, vocabulary) log-probs at the sampling temperature."""
        hidden = self.model(rows.tokens[:, :-1])[rows.answer]
        logits: Tensor = self.model.lm_head(hidden)
        return (logits / self._recipe.temperature).log_softmax(-1)

    def _restore(self, checkpoint: Path) -> None:
        try:
            state = torch.load(
                io.BytesIO(open_seal(checkpoint.read_bytes())), weights_only=True
            )
        except (EngineError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise EngineError(f"the checkpoint {checkpoint} is damaged: {error}") from error
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise EngineError(f"{checkpoint} is no checkpoint of this engine")
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._shuffle.set_state(state["shuffle"])
        self.step_number = state["step"]


def _take(log_probs: Tensor, rows: _Rows) -> Tensor:
    """The log-prob of each answer token."""
    return log_probs.gather(-1, rows.tokens[:, 1:][rows.answer][:, None]).squeeze(-1)


def _rows(groups: Sequence[TrainingGroup], advantages: Sequence[Sequence[float]]) -> _Rows:
    """Every completion of every group as one row."""
    texts, answers, behaviours, weights = [], [], [], []
    for group, mine in zip(groups, advantages, strict=True):
        before = len(group.prompt) - 1
        for one, advantage in zip(group.completions, mine, strict=True):
            texts.append(group.prompt + one.tokens)
            answers.append([False] * before + [True] * len(one.tokens))
            behaviours.append([0.0] * before + list(one.logprobs))
            weights.append([advantage])
    width = max(len(text) for text in texts)
    return _Rows(
        torch.tensor(_padded(texts, width, 0)),
        torch.tensor(_padded(answers, width - 1, False)),
        torch.tensor(_padded(behaviours, width - 1, 0.0)),
        torch.tensor(weights),
        max(len(one.tokens) for group in groups for one in group.completions),
    )


def _examples(tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Tokens of prompts with answers, and which of them (from the second) belong to an
    answer.
    """
    width = max(len(task.prompt) + len(task.answer) for task in tasks)
    tokens = _padded([task.prompt + task.answer for task in tasks], width, 0)
    answer = [[False] * (len(task.prompt) - 1) + [True] * len(task.answer) for task in tasks]
    return torch.tensor(tokens), torch.tensor(_padded(answer, width - 1, False))


def _padded(rows: Sequence[Sequence[T]], width: int, filler: T) -> list[list[T]]:
    return [[*row, *[filler] * (width - len(row))] for row in rows]
