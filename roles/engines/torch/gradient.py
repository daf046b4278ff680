"""The gradient of one minibatch: packed, in slices, never (tokens x vocabulary) at once.

Theory of operation
-------------------
The body of the model reads a batch of packed groups (`roles.engines.torch.packing`) and keeps
its activations. Its states are cut off there, and the head takes them `SLICE` drawn tokens at
a time. It first measures the log-prob and the entropy of each token. The algorithm sees these
for whole completions, and turns them into the batch's loss and so into a gradient for each
log-prob. Then the logits of a slice are made again, take that gradient, and are dropped; the
slice that was measured last is still there, so a batch of one slice pays nothing. When all
slices are through, one backward pass takes the states' gradients down the body. So the logits
of one slice are all that is there: 100 MB of them at a vocabulary of 49,152 in place of the 13
GB of 65,536 drawn tokens; and no loss needs to know of slices.

A batch adds its part of the minibatch's loss (`roles.rl.algorithms.base`), so how a step is cut
into batches changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2p.errors import ConfigError
from roles.engines.base import TrainingGroup
from roles.engines.torch.device import CPU, send, widest
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.packing import ROW_TOKENS, PackedBatch, pack
from roles.rl.algorithms.base import Sequences, Tokens, k3, ratio
from roles.rl.algorithms.find import Objective

SLICE: Final = 512
"""Drawn tokens that the head takes at a time. Their logits are 100 MB at a vocabulary of
49,152, 311 MB at 151,936, and there are about four tensors of that size at a time. Each slice
adds to the head's gradient (113 MB at 49,152 x 576), which is a tenth of its work at 512 tokens
and more with fewer."""


@dataclass(frozen=True, slots=True)
class LearningBatch:
    """Packed groups, and the data of each drawn token."""

    packed: PackedBatch
    sampler: Tensor
    """Log-probs of the drawn tokens under the policy that drew them."""
    advantages: Tensor

    def __len__(self) -> int:
        """Return the number of drawn tokens."""
        return len(self.sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The objective and the sizes that all batches of a step share."""

    objective: Objective
    temperature: float
    limit: int
    """Most tokens that a completion may have."""
    tokens: float
    """Mean number of drawn tokens per minibatch of the step."""
    sequences: float
    """Mean number of completions per minibatch of the step."""


@dataclass(slots=True)
class Tally:
    """Sums over drawn tokens."""

    tokens: int = 0
    loss: float = 0.0
    """Sum of the loss, already divided by the minibatch's normaliser."""
    ratio_max: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Sum of each metric: entropy; k3 between the policy before the step and the policy that
    drew; and the algorithm's own."""

    def __iadd__(self, other: Tally) -> Self:
        self.tokens += other.tokens
        self.loss += other.loss
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.sums = {
            name: self.sums.get(name, 0.0) + value for name, value in other.sums.items()
        }
        return self


def learning_batches(
    groups: Sequence[TrainingGroup],
    advantages: Sequence[NDArray[np.float32]],
    row_tokens: int = ROW_TOKENS,
    device: torch.device = CPU,
) -> list[LearningBatch]:
    """Pack every completion of every group, with one advantage for each completion."""
    packed = pack(
        [(one.prompt, one.completions) for one in groups],
        row_tokens=row_tokens,
        device=device,
    )
    return [
        LearningBatch(
            batch,
            send(
                np.concatenate(
                    [
                        np.array(
                            groups[piece.group].completions[piece.completion].logprobs, "<f4"
                        )
                        for piece in batch.pieces
                    ]
                ),
                device,
            ),
            send(
                np.concatenate(
                    [
                        np.full(piece.length, advantages[piece.group][piece.completion], "<f4")
                        for piece in batch.pieces
                    ]
                ),
                device,
            ),
        )
        for batch in packed
    ]


def old_log_probs(model: TransformerModel, batch: LearningBatch, temperature: float) -> Tensor:
    """Return the log-probs of the drawn tokens under the current model: (tokens,)."""
    with torch.no_grad():
        states, answers = batch.packed.hidden(model), batch.packed.answers
        return torch.cat(
            [
                _taken(_log_probs(model, states[part], temperature), answers[part])
                for part in _slices(len(batch))
            ]
        )


def add_gradient(
    model: TransformerModel,
    batch: LearningBatch,
    aim: Aim,
    old: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tally:
    """Add the gradient of a batch to the weights' own.

    Args:
        old: Log-probs of the drawn tokens before the step. Without them the weights are those
            before the step, and so are the log-probs.
        reference: Log-probs under the frozen base, where the objective asks for them.
    """
    states, answers = batch.packed.hidden(model), batch.packed.answers
    parts = _slices(len(batch))
    cuts = [states[part].detach().requires_grad_() for part in parts]
    measured = []
    for part, cut in zip(reversed(parts), reversed(cuts), strict=True):
        every = _log_probs(model, cut, aim.temperature)
        with torch.no_grad():
            measured.append((_taken(every, answers[part]), _entropies(every)))
    current, entropy = (
        torch.cat(one).requires_grad_() for one in zip(*reversed(measured), strict=True)
    )
    before = current.detach() if old is None else old
    cap = aim.objective.shared.importance_cap
    tokens = Tokens(
        logprobs=current,
        old=before,
        sampler=batch.sampler,
        reference=reference,
        entropy=entropy,
        advantages=batch.advantages,
        weights=ratio(before, batch.sampler).clamp(max=cap),
        total=aim.tokens,
    )
    loss, metrics = aim.objective.loss(tokens, _sequences(batch, aim))
    torch.autograd.backward(loss)
    if current.grad is None and entropy.grad is None:
        raise ConfigError(
            f"loss() of the algorithm {aim.objective.name!r} does not follow from"
            " tokens.logprobs: correct it, or choose another algorithm"
        )
    for part, cut in zip(parts, cuts, strict=True):
        if part.start:  # the first slice was measured last
            every = _log_probs(model, cut, aim.temperature)
        outputs, gradients = [], []
        if current.grad is not None:
            outputs.append(_taken(every, answers[part]))
            gradients.append(current.grad[part])
        if entropy.grad is not None:
            outputs.append(_entropies(every))
            gradients.append(entropy.grad[part])
        torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(states, torch.cat([_gradient(cut) for cut in cuts]))
    with torch.no_grad():
        metrics |= {"k3": k3(before, batch.sampler), "entropy": entropy}
        highest = ratio(current, before).max()
        sums = [loss, highest, *(metric.sum() for metric in metrics.values())]
        # the only numbers for which the host waits
        total, peak, *found = torch.stack(
            [one.to(widest(loss.device)) for one in sums]
        ).tolist()
    return Tally(len(batch), total, peak, dict(zip(metrics, found, strict=True)))


def _sequences(batch: LearningBatch, aim: Aim) -> Sequences:
    lengths = np.array([piece.length for piece in batch.packed.pieces])
    device = batch.sampler.device
    return Sequences(
        index=send(np.repeat(np.arange(len(lengths)), lengths), device),
        lengths=send(lengths.astype(np.float32), device),
        total=aim.sequences,
        limit=aim.limit,
    )


def _slices(tokens: int) -> list[slice]:
    return [slice(start, start + SLICE) for start in range(0, tokens, SLICE)]


def _log_probs(model: TransformerModel, states: Tensor, temperature: float) -> Tensor:
    """Return log-probs (tokens, vocabulary) at the sampling temperature, in float32 whatever
    dtype the states are multiplied in."""
    logits = model.logits(states)
    return (logits.float() / temperature).log_softmax(-1)


def _taken(log_probs: Tensor, answers: Tensor) -> Tensor:
    return log_probs.gather(-1, answers[:, None]).squeeze(-1)


def _entropies(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
