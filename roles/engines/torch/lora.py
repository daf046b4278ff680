"""LoRA (arXiv 2106.09685): some matrices learn a sum of few outer products, all others are
frozen.

Theory of operation
-------------------
The model that computes is always the merged one: of each target W = W0 + alpha / rank * B A, in
float32. So sampler, evaluation, policy and export need not know of adapters, and a policy is
rounded once, as any other. Learning asks for W's gradient G as ever; as soon as it is there, it
becomes B's, alpha / rank * G A^T, and A's, alpha / rank * B^T G, and is dropped. Both are what
a pass through A and B would give. W0 is kept in bfloat16 where that loses nothing.

`merged` adds its products up one by one, in the order of the rank, each operation rounded by
itself: every machine and every device gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from p2p.errors import ConfigError
from p2p.shardcast.adapter import DOWN, LORA, UP
from roles.engines.torch.device import CPU
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.sharding import put
from roles.models import safetensors
from roles.models.safetensors import RawTensor
from roles.rl.learner import Lora

_VALUES: Final = 1 << 16
"""Numbers that are merged at a time, few enough to stay in a core's cache."""


@torch.no_grad()
def merged(base: Tensor, down: Tensor, up: Tensor, scale: float, out: Tensor) -> None:
    """Write ``base`` (outputs, inputs) + scale * up (outputs, rank) down (rank, inputs) to
    ``out``, in float32."""
    rows = max(1, _VALUES // base.shape[1])
    for start in range(0, len(base), rows):
        part = slice(start, start + rows)
        total = up[part, :1] * down[:1]
        for one in range(1, len(down)):
            total += up[part, one : one + 1] * down[one : one + 1]
        total *= scale
        total += base[part].float()
        out[part] = total


class Adapter:
    """Matrices A and B of each target of a model, and the target's weights before."""

    def __init__(self, model: TransformerModel, lora: Lora, seed: int) -> None:
        """Make the adapter and freeze all other weights.

        Raises:
            ConfigError: The model has no such target.
        """
        self.lora = lora
        self._model = model
        self._scale = lora.alpha / lora.rank
        self._targets: dict[str, nn.Parameter] = {}
        self._base: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        """Maps the name of a target without ``.weight``, with the suffix of A or B, to the
        matrix."""
        generator = torch.Generator(device=CPU).manual_seed(seed)
        matrices = {
            name.removesuffix(".weight"): weight
            for name, weight in model.named_parameters()
            if weight.dim() == 2 and ".layers." in name
        }
        for name, weight in matrices.items():
            if name.rpartition(".")[2] not in lora.targets:
                continue
            self._targets[name] = weight
            outputs, inputs = weight.shape
            # as PEFT begins: A uniform, B zero, so that the first policy is the base
            bound = 1 / math.sqrt(inputs)
            down = torch.empty(lora.rank, inputs).uniform_(-bound, bound, generator=generator)
            self.weights[name + DOWN] = nn.Parameter(down.to(weight.device))
            self.weights[name + UP] = nn.Parameter(
                torch.zeros(outputs, lora.rank, device=weight.device)
            )
        known = {name.rpartition(".")[2] for name in matrices}
        if unknown := set(lora.targets) - known:
            raise ConfigError(
                f"[lora] targets {min(unknown)!r}, and the model has {', '.join(sorted(known))}"
            )
        model.requires_grad_(False)
        for name, weight in self._targets.items():
            weight.requires_grad_()
            weight.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def take_base(self) -> None:
        """Keep the model's weights as those that A and B are added to."""
        for name, weight in self._targets.items():
            short = weight.detach().bfloat16()
            is_exact = torch.equal(short.float(), weight)
            self._base[name] = short if is_exact else weight.detach().clone()

    def merge(self) -> None:
        """Set the model's weights to the base plus the product of A and B."""
        for name, weight in self._targets.items():
            down, up = self.weights[name + DOWN], self.weights[name + UP]
            merged(self._base[name], down, up, self._scale, weight)

    def load(self, found: dict[str, Tensor]) -> None:
        """Load A and B, and merge them."""
        for name, weight in self.weights.items():
            put(weight, found[name])
        self.merge()

    def encode(self) -> bytes:
        """Encode the difference between the policy and its base as an adapter of
        `p2p.shardcast.adapter`."""
        terms = torch.tensor([self.lora.rank, self._scale])
        return safetensors.encode(
            {
                name: RawTensor(
                    "F32", tuple(one.shape), one.detach().cpu().contiguous().numpy().tobytes()
                )
                for name, one in (*self.weights.items(), (LORA, terms))
            }
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable weights by name."""
        yield from self.weights.items()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def share(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient, weight.grad = weight.grad * self._scale, None
            down, up = self.weights[name + DOWN], self.weights[name + UP]
            with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
                for one, more in ((down, up.T @ gradient), (up, gradient @ down.T)):
                    one.grad = more if one.grad is None else one.grad + more

        return share
