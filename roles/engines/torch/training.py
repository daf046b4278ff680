"""A model that is trained on this machine: its weights, its optimisers, and one process's
share.

What it learns from is said by those that build on it: `roles.engines.torch.learner` by groups
of answers, `roles.diloco.pretrain` by text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roles.contract.core.shape import Dtype
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.engines.torch.device import CPU, uses_bfloat16
from roles.engines.torch.hosted import new_model
from roles.engines.torch.lora import Adapter
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.rank import ALONE, Rank
from roles.engines.torch.sharding import local, put, shard, whole

_MOMENTS: Final = {"AdamW": ("exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}
"""Maps torch's optimisers to the names of the state that they keep for each weight."""


class TrainedModel:
    """A model with its optimisers. Subclasses must set `_optimisers`."""

    _optimisers: Sequence[Optimizer]

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device = CPU,
        rank: Rank = ALONE,
        folder: Path | None = None,
    ) -> None:
        """Make the model; ``folder`` is that of the base, if there is one."""
        self._config, self._device, self._rank = config, device, rank
        self._folder = folder
        self._is_autocast = uses_bfloat16(config, device)
        self.model = self._new_model()
        self._adapter: Adapter | None = None
        """Low-rank matrices that are trained in place of all weights; None if all are
        trained."""
        self._updates = 0
        """Number of optimiser updates since the moments were zero."""

    def _new_model(self) -> TransformerModel:
        """Return a model with uninitialised weights, or this process's part of it."""
        mesh = self._rank.mesh
        # what is shared is laid out on the CPU: no device need hold all of it at a time
        device = CPU if mesh else self._device
        model = new_model(self._config.shape, Dtype.FLOAT32, device, self._folder)
        model.recomputes = self._config.gpus.recompute
        if mesh is not None:
            shard(model, mesh, offload=self._config.gpus.offload)
            model.move_to(self._device)
        return model

    def _learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable weights by name."""
        yield from (self._adapter or self.model).named_parameters()

    def _arithmetic(self) -> torch.autocast:
        """Return the autocast context of training. Weights, gradients and moments are float32
        always."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_autocast)

    def _descend(self, rate: float, most: float) -> float:
        """Take a step against the gradient and forget it.

        Args:
            rate: The learning rate.
            most: The norm that the gradient is cut to.

        Returns:
            The norm of the gradient before.

        Raises:
            EngineError: The norm is no number. No weight has changed.
        """
        learning = [weight for _, weight in self._learning()]
        found = float(whole(nn.utils.clip_grad_norm_(learning, most)))
        if not math.isfinite(found):
            raise EngineError(
                f"the gradient's norm is {found}: nothing can be learnt from this step"
            )
        for optimiser in self._optimisers:
            for parameters in optimiser.param_groups:
                parameters["lr"] = rate
            optimiser.step()
        self._forget_gradients()
        if self._adapter is not None:
            self._adapter.merge()
        self._updates += 1
        return found

    def _forget_gradients(self) -> None:
        for _, weight in self._learning():
            weight.grad = None

    def _complete(
        self, device: torch.device = CPU, dtype: Dtype = Dtype.FLOAT32
    ) -> TransformerModel:
        """Return a separate model with all weights; of several processes only the first's is
        filled."""
        model = self.model.like(dtype, device)
        copies = dict(model.named_parameters())
        for name, weight in self.model.named_parameters():
            full = whole(weight)
            if self._rank.is_first:
                put(copies[name], full)
        return model

    def _kept(self) -> Iterator[tuple[str, nn.Parameter, Optimizer, tuple[str, ...]]]:
        """Yield each weight with its name, its optimiser, and the names of the state kept for
        it."""
        owners = {
            weight: optimiser
            for optimiser in self._optimisers
            for parameters in optimiser.param_groups
            for weight in parameters["params"]
        }
        for name, weight in self._learning():
            optimiser = owners[weight]
            yield name, weight, optimiser, _MOMENTS[type(optimiser).__name__]

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimisers' state by name. With several processes only the first one has
        it."""
        tensors = {}
        for name, weight, optimiser, keys in self._kept() if self._updates else ():
            for key in keys:
                full = whole(optimiser.state[weight][key])
                if self._rank.is_first:
                    # what was gathered waits for the file in the CPU's memory
                    tensors[f"{key}.{name}"] = full.to(CPU) if self._rank.mesh else full
        return tensors

    def _shapes_of_moments(self, updates: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the result of `_moments` after ``updates`` updates."""
        return {
            f"{key}.{name}": tuple(weight.shape)
            for name, weight, _, keys in self._kept()
            for key in keys
            if updates
        }

    def _put_moments(self, found: Mapping[str, Tensor], updates: int) -> None:
        """Restore the result of `_moments` after ``updates`` updates; with 0 the state is
        reset."""
        for name, weight, optimiser, keys in self._kept():
            optimiser.state.pop(weight, None)
            if updates:
                state = {key: torch.empty_like(weight.detach()) for key in keys}
                for key, moment in state.items():
                    put(moment, found[f"{key}.{name}"])
                if "exp_avg" in state:
                    state["step"] = torch.tensor(float(updates), device=local(weight).device)
                optimiser.state[weight] = state
        self._updates = updates
