"""Inner steps: a model trained on a schedule, and the way to a vector and back.

A model is one vector of float32, its parameters end to end in the order of their names, for
all that members exchange. The outer weights that a round begins from stay in the file of their
state; here is the model that leaves them, with the learner's own optimiser, precision and
processes (`roles.engines.torch.training`). The optimiser's moments stay across rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from roles.contract.core.diloco import DilocoTerms, Inner, Outer
from roles.diloco.core.outer import RAMP
from roles.diloco.material import Rewards
from roles.diloco.objectives import RewardLoss, TextLoss
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.engines.hardware import threads_of
from roles.engines.torch.checkpoint import read_checkpoint, write_checkpoint
from roles.engines.torch.device import CPU, send_numbers
from roles.engines.torch.files import load_weights, save_folder
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.rank import ALONE, Rank
from roles.engines.torch.sharding import local, put, reshard, whole
from roles.engines.torch.training import TrainedModel

_STEPS: Final = "steps"
"""Key in a file of moments for the number of optimiser updates."""

Vector = NDArray[np.float32]


class Pretrainer(TrainedModel):
    """One member's model, in its worker process."""

    def __init__(
        self,
        terms: DilocoTerms,
        base: Path | None,
        rewards: Rewards | None,
        config: EngineConfig,
        device: torch.device = CPU,
        rank: Rank = ALONE,
    ) -> None:
        """Make the model on ``device``.

        Args:
            terms: The run's.
            base: Folder of the first weights; None: drawn from the run's seed.
            rewards: Questions and what answers earn; None: it learns from text.
            config: The engine's.
            device: Where weights and moments are; vectors come and go in the host's memory.
            rank: This process among those that share the model.
        """
        torch.set_num_threads(threads_of(config))
        super().__init__(config, device, rank)
        self._terms = terms
        if base is None:
            self.model.initialise(config.seed)
        else:
            load_weights(self.model, base)
        self._objective = (
            TextLoss(terms, self._arithmetic)
            if rewards is None
            else RewardLoss(config, terms, rewards, self._arithmetic)
        )
        named = dict(self.model.named_parameters())
        matrices = [name for name in named if terms.inner is Inner.MUON and _is_inner(name)]
        others = [weight for name, weight in named.items() if name not in matrices]
        self._optimisers = [
            AdamW(others, terms.rate, terms.betas, weight_decay=terms.weight_decay, fused=True)
        ]
        if matrices:
            self._optimisers.append(
                Muon(
                    [named[name] for name in matrices],
                    terms.rate,
                    terms.weight_decay,
                    terms.betas[1],
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self._outer: Vector = self.vector()
        self._sent: Vector | None = None
        """The inner weights of the last update, from which steps go on during an exchange."""
        self._gradient: Vector | None = None
        """Gradient of the newest step, if the outer step takes the members' mean gradient."""

    def _places(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each parameter with its slice of the vector of all weights."""
        at = 0
        for _, weight in sorted(self.model.named_parameters()):
            yield weight, slice(at, at + weight.numel())
            at += weight.numel()

    @property
    def size(self) -> int:
        """Number of weights in the model."""
        return sum(weight.numel() for weight in self.model.parameters())

    def vector(self) -> Vector:
        """Return all weights as one vector."""
        return self._joined(lambda weight: weight)

    def _joined(self, value: Callable[[nn.Parameter], Tensor]) -> Vector:
        found = np.empty(self.size, np.float32)
        for weight, place in self._places():
            found[place] = whole(value(weight)).reshape(-1).cpu().numpy()
        return found

    def load_from(self, path: str, start: int, stop: int, is_ahead: bool) -> None:
        """Begin a round from the weights in a state's file, which stay there: see `load`."""
        outer = np.memmap(path, "<f4", "r", shape=(self.size,))
        self.load(outer, start, stop, is_ahead=is_ahead)

    def load(
        self, outer: Vector, start: int = 0, stop: int = sys.maxsize, *, is_ahead: bool = False
    ) -> None:
        """Begin a round.

        Args:
            outer: The weights that all members hold.
            start: Index of the first weight to replace.
            stop: Index behind the last weight to replace.
            is_ahead: If True, keep the steps taken since the last update was sent.

        Raises:
            EngineError: The weights do not fit this model.
        """
        if outer.size != self.size:
            raise EngineError(
                f"{outer.size} outer weights are not the {self.size} of this model"
            )
        self._outer = outer
        for weight, place in self._places():
            first, end = max(start, place.start), min(stop, place.stop)
            if first >= end:
                continue
            values = whole(weight).reshape(-1).cpu().numpy().copy()
            part = values[first - place.start : end - place.start]
            if is_ahead and self._sent is not None:
                part -= self._sent[first:end]
                part += outer[first:end]
            else:
                part[:] = outer[first:end]
            if not np.isfinite(values).all():
                raise EngineError("outer weights are no numbers")
            put(weight, torch.from_numpy(values).view(weight.shape))

    @contextmanager
    def _at_outer(self) -> Iterator[None]:
        """Put the outer weights into the model for the length of the block."""
        inner = [local(weight).detach().clone() for weight, _ in self._places()]
        for weight, place in self._places():
            put(weight, torch.from_numpy(np.array(self._outer[place])).view(weight.shape))
        try:
            yield
        finally:
            if self._rank.mesh is not None:
                reshard(self.model)
            with torch.no_grad():
                for (weight, _), before in zip(self._places(), inner, strict=True):
                    local(weight).copy_(before)

    def update(self) -> Vector:
        """Return this member's update for the others: outer minus inner weights, or the newest
        step's gradient if members average gradients. Steps from now on count as ahead."""
        if self._gradient is not None:
            return self._gradient
        inner = self.vector()
        self._sent = inner if self._terms.overlap else None
        difference: Vector = self._outer - inner
        return difference

    def train(self, batches: Sequence[Any], first: int) -> tuple[int, int, float]:
        """Take an inner step for each batch, of text (sequences, window + 1) tokens.

        Args:
            batches: Batches of text, one for each step.
            first: Number of the first step in the run's schedule.

        Returns:
            Steps, tokens learnt from, and nats a token in the mean.
        """
        objective, count, total = self._objective, 0, 0.0
        for number, batch in enumerate(batches, first):
            self.model.zero_grad()
            mine, share = self._share(batch)
            # gradients are averaged over the processes
            found = objective.add_gradient(self.model, mine, number, share * self._rank.size)
            (loss,) = self._rank.sums([found * share])
            if self._terms.outer is Outer.PARALLEL:
                self._gradient = self._joined(_gradient)
            elif any(weight.grad is not None for weight in self.model.parameters()):
                ramp = min(1.0, (self._updates + 1) / RAMP)
                self._descend(objective.rate_at(number) * ramp, self._terms.gradient_norm)
            total += loss * objective.size(batch)
            count += objective.size(batch)
        return len(batches), count, total / max(1, count)

    def _share(self, batch: Any) -> tuple[Any, float]:
        """Return this process's part of a batch, and the share of the batch that it is.

        All processes make a pass, since each gathers what the others keep; one without a part
        repeats the first row, which counts nothing.
        """
        if self._rank.mesh is None:
            return batch, 1.0
        mine = batch[self._rank.number :: self._rank.size]
        return (mine, len(mine) / len(batch)) if len(mine) else (batch[:1], 0.0)

    def loss(self, batches: Sequence[Any]) -> float:
        """Return the held-out loss of the outer weights: nats a token, or the share of wrong
        answers.
        """
        total = 0.0
        with torch.no_grad(), self._at_outer():
            for batch in batches:
                mine, share = self._share(batch)
                found = self._objective.total(self.model, mine)
                total += found if share else 0.0
        (whole_total,) = self._rank.sums([total])
        return whole_total / sum(map(self._objective.size, batches))

    def continue_text(self, tokens: Sequence[int], count: int, seed: int) -> list[int]:
        """Return the tokens that the outer weights would write after these, at a temperature of
        0.7.
        """
        generator = torch.Generator(device=CPU).manual_seed(seed)
        read = list(tokens)
        with torch.no_grad(), self._outer_model() as model:
            for _ in range(count if self._rank.is_first else 0):
                context = send_numbers([read[-self._terms.window :]], model.device)
                odds = torch.softmax(model.logits(model(context)[0, -1:]).float()[0] / 0.7, -1)
                read.append(int(torch.multinomial(odds.cpu(), 1, generator=generator)))
        return read[len(tokens) :]

    def export(self, folder: Path) -> None:
        """Write the outer weights as a folder that transformers and vLLM load."""
        context, end_tokens = self._config.context, self._config.end_tokens
        with self._outer_model() as model:
            if self._rank.is_first:
                save_folder(model, folder, context=context, end_tokens=end_tokens)

    @contextmanager
    def _outer_model(self) -> Iterator[TransformerModel]:
        """Yield a model with the outer weights. With several processes only the first one has
        all weights.
        """
        with self._at_outer():
            yield self._complete(self._device) if self._rank.mesh else self.model

    def save(self, folder: Path, step: int) -> None:
        """Write the optimiser's state after the outer step ``step`` durably. Keep the newest
        state of another step too: a member that is killed now begins from it."""
        tensors = self._moments()
        if not self._rank.is_first:
            return
        tensors[_STEPS] = torch.tensor([self._updates], device=CPU)
        path = folder / f"moments-{step}"
        write_checkpoint(path, path, tensors)
        for number, other in self._saved(folder)[:-2]:
            if number != step:
                other.unlink()

    def _saved(self, folder: Path) -> list[tuple[int, Path]]:
        found = []
        for path in folder.glob("moments-*"):
            with suppress(ValueError):  # what a crash left unfinished
                found.append((int(path.name.partition("-")[2]), path))
        return sorted(found)

    def restore(self, folder: Path, step: int) -> list[str]:
        """Load the state saved after the outer step ``step``, else the newest state, else none.
        Return the errors of files that were passed over."""
        found = sorted(self._saved(folder), key=lambda one: (one[0] == step, one[0]))
        damage = []
        for _, path in reversed(found):
            try:
                self._restore(path)
            except EngineError as error:
                damage.append(str(error))
            else:
                return damage
        self._put_moments({}, 0)
        return damage

    def _restore(self, path: Path) -> None:
        found = read_checkpoint(path)
        steps = found.get(_STEPS)
        updates = 0 if steps is None else int(steps[0])
        expected = {_STEPS: (1,), **self._shapes_of_moments(updates)}
        if {name: tuple(one.shape) for name, one in found.items()} != expected:
            raise EngineError(f"{path} holds the optimiser of another model")
        self._put_moments(found, updates)


def _is_inner(name: str) -> bool:
    """Return True for a matrix between embedding and head."""
    return name.endswith("weight") and "proj" in name


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
