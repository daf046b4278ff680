"""Inner steps: AdamW or Muon, clipped, on a schedule; and the way to a vector and back.

A model is one vector of float32, its parameters end to end in the order of their names, for
all that members exchange. `Pretrainer` holds the outer weights as such a vector, and a model
that begins from them; its optimiser's moments stay across rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roles.contract.core.diloco import DilocoTerms, Inner, Outer
from roles.diloco.core.outer import RAMP
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.engines.hardware import threads_of
from roles.engines.torch.checkpoint import read_checkpoint, write_checkpoint
from roles.engines.torch.device import uses_bfloat16
from roles.engines.torch.files import load_weights, save_folder
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.objectives import Objective, TextLoss

_STEPS: Final = "steps"
"""In a checkpoint: inner steps taken, and the outer step that they led to."""
_NEWTON: Final = (3.4445, -4.7750, 2.0315)
"""Muon's quintic, which brings all singular values near 1 in five turns."""
_TURNS: Final = 5


@dataclass(frozen=True, slots=True)
class Trained:
    """What some inner steps came to."""

    steps: int
    tokens: int
    loss: float
    """Nats a token, the mean over them."""


class Pretrainer:
    """One member's model, in its worker process."""

    def __init__(
        self,
        config: EngineConfig,
        terms: DilocoTerms,
        base: Path | None,
        objective: Objective | None = None,
    ) -> None:
        """``objective`` is what an inner step lowers; left out: the loss on text."""
        torch.set_num_threads(threads_of(config))
        self._config, self._terms = config, terms
        self.model = TransformerModel(config.shape)
        if base is None:
            self.model.initialise(config.seed)
        else:
            load_weights(self.model, base)
        self._parameters = [weight for _, weight in sorted(self.model.named_parameters())]
        self._names = [name for name, _ in sorted(self.model.named_parameters())]
        self._objective = objective or TextLoss(terms, uses_bfloat16(config))
        self._begin_moments()
        self._outer = self._sent = self.vector()
        self._gradient: NDArray[np.float32] | None = None
        """Of the newest step, where the members' mean gradient takes it."""

    def _begin_moments(self) -> None:
        self._first = [torch.zeros_like(weight) for weight in self._parameters]
        self._second = [torch.zeros_like(weight) for weight in self._parameters]
        self._taken = 0

    @property
    def size(self) -> int:
        """Weights of the model."""
        return sum(weight.numel() for weight in self._parameters)

    def vector(self) -> NDArray[np.float32]:
        """The weights end to end."""
        with torch.no_grad():
            return torch.cat([one.detach().reshape(-1) for one in self._parameters]).numpy()

    def load(self, vector: NDArray[np.float32], span: slice = slice(None)) -> None:
        """Begin a round from these outer weights; outside ``span`` from the inner ones. Raises
        `EngineError` if they are not this model's."""
        self._begin(vector, span, self.vector())

    def _begin(
        self, vector: NDArray[np.float32], span: slice, inner: NDArray[np.float32]
    ) -> None:
        """With ``inner`` weights, but for those in ``span``."""
        if vector.size != self.size or not np.isfinite(vector).all():
            raise EngineError(
                f"{vector.size} outer weights are not the {self.size} of this model"
            )
        self._outer = vector.copy()
        inner[span] = vector[span]
        self._put(inner)

    def shift(self, vector: NDArray[np.float32], span: slice = slice(None)) -> None:
        """The same with the steps that were taken since the last update went out. Raises
        `EngineError` as `load` does."""
        inner = self.vector()
        ahead = inner - self._sent
        self._begin(vector, span, inner)
        inner[span] += ahead[span]
        self._put(inner)

    def _put(self, vector: NDArray[np.float32]) -> None:
        at = 0
        with torch.no_grad():
            for weight in self._parameters:
                part = torch.from_numpy(vector[at : at + weight.numel()])
                weight.copy_(part.view(weight.shape))
                at += weight.numel()

    @contextmanager
    def _at(self, vector: NDArray[np.float32]) -> Iterator[None]:
        """With these weights in the model, for the length of the block."""
        inner = self.vector()
        self._put(vector)
        try:
            yield
        finally:
            self._put(inner)

    def update(self) -> NDArray[np.float32]:
        """Outer minus inner weights: what the others get. Steps from now on are ahead. Of data
        parallel the gradient."""
        if self._gradient is not None:
            return self._gradient
        self._sent = self.vector()
        difference: NDArray[np.float32] = self._outer - self._sent
        return difference

    def train(self, batches: Sequence[Any], first: int) -> Trained:
        """An inner step for each batch, of text (sequences, window + 1) tokens; ``first`` is
        the number of the first in the run's schedule."""
        objective, count, total = self._objective, 0, 0.0
        for number, batch in enumerate(batches, first):
            loss = objective.add_gradient(self.model, batch, number)
            if self._terms.outer is Outer.PARALLEL:
                self._gradient = self._taken_gradient()
            else:
                self._take_step(objective.rate_at(number))
            total += loss * objective.size(batch)
            count += objective.size(batch)
        return Trained(len(batches), count, total / max(1, count))

    def _taken_gradient(self) -> NDArray[np.float32]:
        """The gradient end to end, as `vector` lays out the weights; it is forgotten here."""
        parts = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self._parameters
        ]
        for weight in self._parameters:
            weight.grad = None
        return torch.cat([one.detach().reshape(-1) for one in parts]).numpy()

    def _take_step(self, rate: float) -> None:
        """Of the optimiser, against the clipped gradient; none without one."""
        if all(weight.grad is None for weight in self._parameters):
            return
        nn.utils.clip_grad_norm_(self._parameters, self._terms.gradient_norm)
        self._taken += 1
        ramp = min(1.0, self._taken / RAMP)
        with torch.no_grad():
            for place, weight in enumerate(self._parameters):
                self._descend(place, weight, rate * ramp)
                weight.grad = None

    def _descend(self, place: int, weight: Tensor, rate: float) -> None:
        gradient, first, second = weight.grad, self._first[place], self._second[place]
        assert gradient is not None
        terms = self._terms
        early, late = terms.betas
        weight.mul_(1 - rate * terms.weight_decay)
        if terms.inner is Inner.MUON and _is_inner_matrix(self._names[place], weight):
            first.mul_(late).add_(gradient)
            weight.add_(orthogonal(gradient.add(first, alpha=late)), alpha=-0.2 * rate
                        * math.sqrt(max(weight.shape)))  # fmt: skip
            return
        first.lerp_(gradient, 1 - early)
        second.mul_(late).addcmul_(gradient, gradient, value=1 - late)
        size = rate / (1 - early**self._taken)
        spread = second.sqrt().div_(math.sqrt(1 - late**self._taken)).add_(1e-8)
        weight.addcdiv_(first, spread, value=-size)

    def loss(self, batches: Sequence[Any]) -> float:
        """What is lowered, of the outer weights, on what no member learns from: nats a token,
        or the share of wrong answers."""
        losses, sizes = self._losses(self._outer, batches)
        return float(np.average(losses, weights=sizes))

    def _losses(
        self, vector: NDArray[np.float32], batches: Sequence[Any]
    ) -> tuple[list[float], list[int]]:
        """Of each batch, and what it counts."""
        sizes = [self._objective.size(one) for one in batches]
        with torch.no_grad(), self._at(vector):
            sums = [self._objective.total(self.model, one) for one in batches]
        return [total / size for total, size in zip(sums, sizes, strict=True)], sizes

    def continue_text(self, tokens: Sequence[int], count: int, seed: int) -> list[int]:
        """Tokens that the outer weights would write behind these, at a temperature of 0.7."""
        generator = torch.Generator().manual_seed(seed)
        read = list(tokens)
        with torch.no_grad(), self._at(self._outer):
            for _ in range(count):
                context = torch.tensor([read[-self._terms.window :]])
                hidden = self.model(context)[0, -1:]
                odds = torch.softmax(self.model.logits(hidden).float()[0] / 0.7, -1)
                read.append(int(torch.multinomial(odds, 1, generator=generator)))
        return read[len(tokens) :]

    def save(self, path: Path, previous: Path, step: int) -> None:
        """The optimiser's state after the outer step ``step``, atomically; what was there is
        kept at ``previous``."""
        tensors = {_STEPS: torch.tensor([self._taken, step])}
        for name, first, second in zip(self._names, self._first, self._second, strict=True):
            tensors |= {f"first.{name}": first, f"second.{name}": second}
        write_checkpoint(path, previous, tensors)

    def restore(self, path: Path) -> int | None:
        """Take up what `save` wrote, and say after which outer step; None if there is nothing.
        Raises `EngineError` on a damaged file."""
        if not path.exists():
            self._begin_moments()
            return None
        found = read_checkpoint(path)
        expected = {f"{kind}.{name}" for kind in ("first", "second") for name in self._names}
        if found.keys() != {_STEPS, *expected} or found[_STEPS].numel() != 2:
            raise EngineError(f"{path} holds the optimiser of another model")
        for name, first, second in zip(self._names, self._first, self._second, strict=True):
            first.copy_(found[f"first.{name}"])
            second.copy_(found[f"second.{name}"])
        self._taken = int(found[_STEPS][0])
        return int(found[_STEPS][1])

    def export(self, folder: Path) -> None:
        """The outer weights as a folder that transformers and vLLM load."""
        context, end_tokens = self._config.context, self._config.end_tokens
        with self._at(self._outer):
            save_folder(self.model, folder, context=context, end_tokens=end_tokens)


def _is_inner_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and "embed" not in name and "head" not in name


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton and Schulz."""
    a, b, c = _NEWTON
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_TURNS):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    found: Tensor = x.t() if tall else x
    return found
