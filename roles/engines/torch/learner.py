"""The trainer's half of the recipe: warm-up, the GRPO step, checkpoints, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from p2p.errors import ConfigError
from p2p.shardcast.adapter import LORA
from roles.contract.core.shape import Dtype
from roles.engines.adapters import NUMBERS, TRAVELS, WEIGHT
from roles.engines.base import (
    Answers,
    EngineError,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
    previous_generation,
    seen_by_algorithm,
)
from roles.engines.config import EngineConfig
from roles.engines.torch import sampler
from roles.engines.torch.checkpoint import read_checkpoint, write_checkpoint
from roles.engines.torch.device import CPU, send_numbers
from roles.engines.torch.files import load_weights, write_atomically
from roles.engines.torch.gradient import (
    Aim,
    LearningBatch,
    Tally,
    add_gradient,
    learning_batches,
    old_log_probs,
)
from roles.engines.torch.lora import Adapter
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.policy import write_policy
from roles.engines.torch.rank import ALONE, Rank
from roles.engines.torch.sharding import local, put, reshard, whole
from roles.engines.torch.training import TrainedModel
from roles.envs.base import Ration, Task, TeachingEnvironment, open_teaching
from roles.envs.ration import interrupted
from roles.rl.algorithms.find import find_algorithm
from roles.rl.learner import LearnerConfig, WarmUp

T = TypeVar("T")

_SHUFFLE: Final = "shuffle"
"""Name of the tensor with the state of the generator that shuffles groups."""


class TorchLearner(TrainedModel):
    """A policy, its optimiser, and their step."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device = CPU,
        rank: Rank = ALONE,
        folder: Path | None = None,
    ) -> None:
        if config.learner is None:
            raise EngineError("an engine without a learner's configuration cannot learn")
        super().__init__(config, device, rank, folder)
        self._recipe, self._sampling = config.learner, config.sampling
        self.objective = find_algorithm(config.learner.algorithm, config.learner.options)
        self._shuffle = torch.Generator(device=CPU).manual_seed(config.seed)
        self._base: Path | None = None
        """Folder of the model that the run begins with; None if weights are drawn."""
        self._reference: TransformerModel | None = None
        self.step_number = 0
        if config.learner.lora is not None:
            if rank.mesh is not None:
                raise ConfigError("[lora] needs a learner of one process: leave out ranks")
            self._adapter = Adapter(self.model, config.learner.lora, config.seed)
        self._optimisers = [self._new_optimiser(self._recipe)]

    def _new_optimiser(self, recipe: LearnerConfig | WarmUp) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [weight for _, weight in self._learning()],
            recipe.rate,
            recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def _begin_with(self, base: Path | None) -> None:
        """Take the run's base, and keep a frozen copy if the objective needs one."""
        self._base = base
        if self._adapter is not None:
            if base is None:
                raise ConfigError(
                    "[lora] adds to a model that is there, and this run draws its first"
                    " weights: leave it out, or begin with a model"
                )
            load_weights(self.model, base)
            self._adapter.take_base()
        if not self.objective.shared.kl_reference:
            return
        if base is None:
            raise ConfigError(
                "kl_reference is the distance to the model that a run begins with, and this run"
                " draws its first weights: set kl_reference = 0, or begin with a model"
            )
        self._reference = self._new_model().requires_grad_(False)
        load_weights(self._reference, base)

    def open(self, checkpoint: Path, base: Path | None = None) -> int:
        """Continue from the newest sound checkpoint, or begin: at ``base``, a model's folder,
        or with drawn weights and the warm-up. Returns the step."""
        self._begin_with(base)
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
                f"{'; '.join(damage)}; to begin again from the first policy, remove what is"
                " damaged"
            )
        self.start()
        return self.step_number

    def adopt(self, weights: Path, step: int, base: Path | None = None) -> float:
        """Go on from ``weights``, the policy of ``step``, with a fresh optimiser. Returns the
        share of the weights that changed."""
        if self._adapter is not None:
            raise ConfigError(
                "the checkpoint is lost, and with it what [lora] has learnt: leave it out to go"
                " on from the last policy with every weight"
            )
        self._begin_with(base)
        before = self._rounded()
        load_weights(self.model, weights)
        self._optimisers, self._updates = [self._new_optimiser(self._recipe)], 0
        self.step_number = step
        return self._changed(before)

    def start(self) -> None:
        """Load the first policy: the base, or drawn weights after the warm-up.

        Raises `ConfigError` if the environment cannot warm up a model, or has more tokens than
        the model.
        """
        if self._adapter is not None:
            return
        if self._base is not None:
            load_weights(self.model, self._base)
            return
        if self._recipe.warm_up is None:
            self.model.initialise(self._config.seed)
            return
        environment = open_teaching(self._config.environment)
        if len(environment.vocabulary) > self._config.shape.vocabulary:
            raise ConfigError(
                f"the environment {environment.name!r} has {len(environment.vocabulary)}"
                f" tokens, the model {self._config.shape.vocabulary}"
            )
        self.model.initialise(self._config.seed)
        self._warm_up(environment, self._recipe.warm_up)

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Take one optimiser step with the algorithm's advantages."""
        return self.update(groups, self.advantages(groups))

    def advantages(self, groups: Sequence[TrainingGroup]) -> list[NDArray[np.float32]]:
        """Return the algorithm's advantages for each completion of each group."""
        ends, limit = self._config.end_tokens, self._sampling.max_new_tokens
        return self.objective.advantages(
            [seen_by_algorithm(group, ends, limit) for group in groups]
        )

    def update(
        self, groups: Sequence[TrainingGroup], advantages: Sequence[NDArray[np.float32]]
    ) -> StepReport:
        """Take one optimiser step: minibatches of shuffled groups, one epoch. Raises
        `EngineError` without groups."""
        if not any(group.completions for group in groups):
            raise EngineError("a step needs at least one group")
        rate = self._recipe.rate_at(self.step_number, self._sampling.steps)
        before = self._rounded()
        parts = self._parts(len(groups))
        # Groups may be a mapped file: of each minibatch they are taken when it is its turn.
        minibatches = [
            partial(_batches, groups, advantages, self._device, part) for part in parts
        ]
        # A first minibatch is at the policy before the step: it needs no pass to find it.
        old: list[list[Tensor | None]] = [[], *map(self._old_log_probs, minibatches[1:])]
        # Each minibatch is divided by the mean of their tokens and completions, so that every
        # one of the step counts the same; the processes' gradients are averaged, so each is as
        # many times too large.
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        completions = sum(len(group.completions) for group in groups)
        parts_of_all = len(minibatches) * self._rank.size
        aim = Aim(
            objective=self.objective,
            temperature=self._sampling.temperature,
            limit=self._sampling.max_new_tokens,
            tokens=tokens / parts_of_all,
            sequences=completions / parts_of_all,
        )
        tally, norms = Tally(), []
        for make_batches, theirs in zip(minibatches, old, strict=True):
            self._forget_gradients()
            tally += self._minibatch(make_batches(), theirs, aim)
            norms.append(self._descend(rate, self._recipe.gradient_norm))
        self.step_number += 1
        tally = self._rank.total(tally)
        means = {name: value / tally.tokens for name, value in tally.sums.items()}
        return StepReport(
            step=self.step_number,
            loss=tally.loss / len(minibatches),
            k3=means.pop("k3"),
            ratio_max=tally.ratio_max,
            clipped=means.pop("clipped", 0.0),
            capped=means.pop("capped"),
            entropy=means.pop("entropy"),
            gradient_norm=math.fsum(norms) / len(norms),
            tokens=tally.tokens,
            changed=self._changed(before),
            metrics=means,
        )

    def _minibatch(
        self, batches: Sequence[LearningBatch], old: Sequence[Tensor | None], aim: Aim
    ) -> Tally:
        """Add the gradient of a minibatch. ``old`` are the log-probs of this process's batches
        before the step; None if the weights are those before the step."""
        tally = Tally()
        mine = list(self._share(batches))
        nothing = replace(aim, tokens=math.inf, sequences=math.inf)
        for (batch, counts), before in zip(mine, old or [None] * len(mine), strict=True):
            with self._arithmetic():
                reference = self._reference_log_probs(batch)
                found = add_gradient(
                    self.model, batch, aim if counts else nothing, before, reference
                )
            found.loss /= self._rank.size
            # what does not count still names its metrics, which all processes add up together
            tally += found if counts else Tally(sums=dict.fromkeys(found.sums, 0.0))
        return tally

    def _reference_log_probs(self, batch: LearningBatch) -> Tensor | None:
        if self._reference is None:
            return None
        found = old_log_probs(self._reference, batch, self._sampling.temperature)
        if self._rank.mesh is not None:
            reshard(self._reference)
        return found

    def _share(self, batches: Sequence[LearningBatch]) -> Iterator[tuple[LearningBatch, bool]]:
        """Yield the batches that this process reads, and whether each counts.

        All processes make as many passes, since each pass gathers what the others keep: one
        that has no batch left repeats another's, which counts nothing.
        """
        for start in range(0, len(batches), self._rank.size):
            at = start + self._rank.number
            yield (batches[at], True) if at < len(batches) else (batches[start], False)

    def save(self, checkpoint: Path | None, weights: Path | None) -> None:
        """Write the checkpoint that `open` needs, and the policy; a path of None is skipped.
        With several processes the first one writes."""
        model = self._complete() if self._rank.mesh and weights is not None else self.model
        state = self._state() if checkpoint is not None else {}
        if not self._rank.is_first:
            return
        if weights is not None:
            write_policy(model, weights, self._base, is_base=self.step_number == 0)
            if self._adapter is not None:
                write_atomically(Path(f"{weights}{TRAVELS}"), self._adapter.encode())
        if checkpoint is not None:
            previous = Path(previous_generation(str(checkpoint)))
            write_checkpoint(checkpoint, previous, state)

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """Return the tokens of each completion of each task under this policy. With several
        processes the first one answers."""
        ends = frozenset(self._config.end_tokens)
        model = self._answering()
        if not self._rank.is_first:
            return []
        drawn = sampler.draw(model, tasks, sampling, ends)
        return [tuple(completion.tokens for completion in one.completions) for one in drawn]

    def _answering(self) -> TransformerModel:
        """Return the model that answers. Where this machine trains in bfloat16, it has bfloat16
        weights, as they are published: 606 questions of ``arithmetic``, answered twice by 135 M
        parameters, took 24 and 22 CPU s; in float32, with MKL's products, they took over 120
        s."""
        if not self._is_autocast:
            return self._complete(self._device) if self._rank.mesh else self.model
        return self._complete(self._device, Dtype.BFLOAT16)

    def _warm_up(self, environment: TeachingEnvironment, recipe: WarmUp) -> None:
        """Train on clean examples by supervised learning. The loss is on the answers only."""
        rng = Random(self._config.seed)
        optimiser = self._new_optimiser(recipe)
        for step in range(recipe.steps):
            for parameters in optimiser.param_groups:
                parameters["lr"] = recipe.rate_at(step)
            with interrupted(Ration()):
                examples = environment.warm_up(rng, recipe.batch)
            tokens, answer = supervised(examples, self._device)
            logits = self.model.logits(self.model(tokens[:, :-1])[answer])
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(logits, tokens[:, 1:][answer]))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_norm)
            optimiser.step()

    def _parts(self, groups: int) -> list[list[int]]:
        """Split shuffled groups into the recipe's number of minibatches, or fewer if there are
        fewer groups."""
        order = torch.randperm(groups, generator=self._shuffle, device=CPU)
        chunks = order.chunk(min(self._recipe.minibatches, len(order)))
        return [chunk.tolist() for chunk in chunks]

    def _old_log_probs(
        self, minibatch: Callable[[], list[LearningBatch]]
    ) -> list[Tensor | None]:
        """Return the log-probs of every answer token under the policy before the step."""
        with self._arithmetic():
            found: list[Tensor | None] = [
                old_log_probs(self.model, one, self._sampling.temperature)
                for one, _ in self._share(minibatch())
            ]
        if self._rank.mesh is not None:
            reshard(self.model)
        return found

    def _rounded(self) -> list[Tensor]:
        return [local(weight).detach().bfloat16() for weight in self.model.parameters()]

    @torch.no_grad()
    def _changed(self, before: Sequence[Tensor]) -> float:
        """Return the share of weights whose published value has changed, which is what
        travels."""
        pairs = zip(self.model.parameters(), before, strict=True)
        changed = torch.stack(
            [(local(weight).bfloat16() != was).sum() for weight, was in pairs]
        ).sum()
        mine = [float(changed), float(sum(one.numel() for one in before))]
        of_all, everything = self._rank.sums(mine)
        return of_all / everything

    def _state(self) -> dict[str, Tensor]:
        """Return all state that decides the next steps. With several processes only the first
        one has it."""
        tensors = {
            NUMBERS: torch.tensor([self.step_number, self._updates], device=CPU),
            _SHUFFLE: self._shuffle.get_state(),
        }
        if self._adapter is not None:
            lora = self._adapter.lora
            tensors[LORA] = torch.tensor([lora.rank, lora.alpha], device=CPU)
        for name, weight in self._learning():
            full = whole(weight)
            if self._rank.is_first:
                # what was gathered waits for the file in the CPU's memory
                tensors[f"{WEIGHT}{name}"] = full.to(CPU) if self._rank.mesh else full
        return tensors | self._moments()

    def _restore(self, checkpoint: Path) -> None:
        found = read_checkpoint(checkpoint)
        numbers = found.get(NUMBERS)
        updates = 0 if numbers is None else int(numbers[1])
        expected = {NUMBERS: (2,), _SHUFFLE: tuple(self._shuffle.get_state().shape)}
        expected |= self._shapes_of_moments(updates)
        if self._adapter is not None:
            expected[LORA] = (2,)
        for name, weight in self._learning():
            expected[WEIGHT + name] = tuple(weight.shape)
        if {name: tuple(one.shape) for name, one in found.items()} != expected:
            raise EngineError(
                f"{checkpoint} is no checkpoint of this model, or of one with another [lora]:"
                " the names or the shapes of its tensors differ"
            )
        if self._adapter is not None:
            self._adapter.load({name: found[WEIGHT + name] for name, _ in self._learning()})
        else:
            for name, weight in self.model.named_parameters():
                put(weight, found[WEIGHT + name])
        self._put_moments(found, updates)
        self._shuffle.set_state(found[_SHUFFLE].clone())
        self.step_number = int(found[NUMBERS][0])


def _batches(
    groups: Sequence[TrainingGroup],
    advantages: Sequence[NDArray[np.float32]],
    device: torch.device,
    part: Sequence[int],
) -> list[LearningBatch]:
    """Return the packed groups of one minibatch."""
    return learning_batches(
        [groups[one] for one in part], [advantages[one] for one in part], device=device
    )


def supervised(tasks: Sequence[Task], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens of prompts with answers, and which of them (from the second) belong to an
    answer."""
    width = max(len(task.prompt) + len(task.answer) for task in tasks)
    tokens = _padded([task.prompt + task.answer for task in tasks], width, 0)
    answer = [[False] * (len(task.prompt) - 1) + [True] * len(task.answer) for task in tasks]
    is_answer = torch.tensor(_padded(answer, width - 1, False), device=device)
    return send_numbers(tokens, device), is_answer


def _padded(rows: Sequence[Sequence[T]], width: int, filler: T) -> list[list[T]]:
    return [[*row, *[filler] * (width - len(row))] for row in rows]
