"""The gradient of one minibatch: packed, in slices, never (tokens x vocabulary) at once.

Theory of operation
-------------------
The body of the model reads a batch of packed groups (`roles.engines.torch.packing`) and keeps
its activations. Its states are cut off there, and the head takes them `SLICE` answer tokens at
a time: logits, loss, and at once the gradients of the head's weights and of these states.
Then the slice is dropped, and when all are through, one backward pass takes the states'
gradients down the body. So nothing is computed twice, and the logits of one slice are all that
is there: 100 MB of them at a vocabulary of 49,152 in place of the 13 GB of 65,536 answer
tokens.

The loss of a step is the sum over its answer tokens, divided by their number (DAPO, arXiv
2503.14476): a token counts the same in a short answer and in a long one. (It was divided by
rows times the longest completion, as GRPO's authors first did: one long answer then shrank the
step of all the others.) A batch adds its part of that sum, so how a step is cut into batches
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from roles.engines.base import TrainingGroup
from roles.engines.torch.device import CPU, send, widest
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.packing import ROW_TOKENS, PackedBatch, pack
from roles.rl.losses import (
    FURTHEST,
    GrpoOptions,
    clipped_loss,
    importance_weight,
    is_clipped,
    k3,
)

SLICE: Final = 512
"""Answer tokens that the head takes at a time. Their logits are 100 MB at a vocabulary of
49,152, 311 MB at 151,936, and there are about four tensors of that size at a time. With fewer
tokens the addition to the head's gradient (113 MB at 49,152 x 576), once a slice, is felt: at
512 it is a tenth of the slice's work."""


@dataclass(frozen=True, slots=True)
class LearningBatch:
    """Packed groups with what is known of each answer token."""

    packed: PackedBatch
    behaviour: Tensor
    """Log-probs of the policy that drew them."""
    advantage: Tensor

    def __len__(self) -> int:
        """Answer tokens."""
        return len(self.behaviour)


@dataclass(slots=True)
class Tally:
    """Sums over answer tokens."""

    tokens: int = 0
    loss: float = 0.0
    """Already divided."""
    drift: float = 0.0
    """Of k3 between the trainer's policy before the step and the one that drew."""
    entropy: float = 0.0
    clipped: float = 0.0
    """Tokens without gradient, because of the two-sided clip."""
    capped: float = 0.0
    """Tokens at the cap of the importance weight."""
    ratio_max: float = 0.0

    def __iadd__(self, other: Tally) -> Self:
        self.tokens += other.tokens
        self.loss += other.loss
        self.drift += other.drift
        self.entropy += other.entropy
        self.clipped += other.clipped
        self.capped += other.capped
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        return self


def learning_batches(
    groups: Sequence[TrainingGroup],
    advantages: Sequence[Sequence[float]],
    row_tokens: int = ROW_TOKENS,
    device: torch.device = CPU,
) -> list[LearningBatch]:
    """Every completion of every group, with one advantage for each."""
    packed = pack(
        [(one.prompt, [each.tokens for each in one.completions]) for one in groups],
        row_tokens=row_tokens,
        device=device,
    )
    return [
        LearningBatch(
            batch,
            _sent(
                [
                    logprob
                    for piece in batch.pieces
                    for logprob in groups[piece.group].completions[piece.completion].logprobs
                ],
                device,
            ),
            _sent(
                [
                    advantages[piece.group][piece.completion]
                    for piece in batch.pieces
                    for _ in range(piece.length)
                ],
                device,
            ),
        )
        for batch in packed
    ]


def _sent(values: Sequence[float], device: torch.device) -> Tensor:
    return send(np.asarray(values, dtype=np.float32), device)


def old_log_probs(model: TransformerModel, batch: LearningBatch, temperature: float) -> Tensor:
    """Log-probs of the answer tokens under the model as it is."""
    with torch.no_grad():
        states = batch.packed.hidden(model)
        return torch.cat(
            [
                _taken(_log_probs(model, states[part], temperature), batch.packed.answers[part])
                for part in _slices(len(batch))
            ]
        )


def add_gradient(
    model: TransformerModel,
    batch: LearningBatch,
    old: Tensor | None,
    recipe: GrpoOptions,
    temperature: float,
    tokens: float,
) -> Tally:
    """Add the gradient of a batch to the weights' own; the loss is divided by ``tokens``.

    ``old`` are the log-probs of the answer tokens before the step. Without them the weights are
    those before the step, and so are the log-probs.
    """
    states = batch.packed.hidden(model)
    sums, ratios, gradients = [], [], []
    for part in _slices(len(batch)):
        cut = states[part].detach().requires_grad_()
        log_probs = _log_probs(model, cut, temperature)
        current = _taken(log_probs, batch.packed.answers[part])
        before = current.detach() if old is None else old[part]
        behaviour, advantage = batch.behaviour[part], batch.advantage[part]
        losses = clipped_loss(
            current, before, advantage, clip=recipe.clip, clip_negative=recipe.clip_negative
        )
        weight = importance_weight(before, behaviour, recipe.importance_cap)
        loss = (losses * weight).sum() / tokens
        if recipe.kl:
            loss = loss + recipe.kl * k3(behaviour, current).sum() / tokens
        torch.autograd.backward(loss)
        assert cut.grad is not None
        gradients.append(cut.grad)
        sums.append(_summed(loss, log_probs, current, before, behaviour, advantage, recipe))
        ratios.append((current.detach() - before).clamp(max=FURTHEST).exp().max())
    torch.autograd.backward(states, torch.cat(gradients))
    # the only numbers for which the host waits
    total, drift, entropy, clipped, capped = torch.stack(sums).sum(0).tolist()
    highest = float(torch.stack(ratios).max())
    return Tally(len(batch), total, drift, entropy, clipped, capped, highest)


@torch.no_grad()
def _summed(
    loss: Tensor, log_probs: Tensor, current: Tensor, before: Tensor, behaviour: Tensor,
    advantage: Tensor, recipe: GrpoOptions,
) -> Tensor:  # fmt: skip
    """What one slice adds to the report: the sums of a `Tally`, in its order."""
    clipped = is_clipped(
        current, before, advantage, clip=recipe.clip, clip_negative=recipe.clip_negative
    )
    capped = importance_weight(before, behaviour, recipe.importance_cap)
    sums = (
        loss,
        k3(before, behaviour).sum(),
        -(log_probs.exp() * log_probs).sum(),
        clipped.sum(),
        (capped >= recipe.importance_cap).sum(),
    )
    return torch.stack([one.to(widest(loss.device)) for one in sums])


def _slices(tokens: int) -> Iterator[slice]:
    return (slice(start, start + SLICE) for start in range(0, tokens, SLICE))


def _log_probs(model: TransformerModel, states: Tensor, temperature: float) -> Tensor:
    """(tokens, vocabulary) log-probs at the sampling temperature, in float32 whatever the
    states are multiplied in."""
    logits: Tensor = model.lm_head(states)
    return (logits.float() / temperature).log_softmax(-1)


def _taken(log_probs: Tensor, answers: Tensor) -> Tensor:
    return log_probs.gather(-1, answers[:, None]).squeeze(-1)
