"""The inputs of an algorithm, and the formulas that algorithms share.

Log-probs are those of softmax(logits / temperature) at the sampling temperature, one for each
drawn token. A step is cut into minibatches, and a minibatch into batches that fit the memory;
`loss` is called once for each batch and returns that batch's part of the minibatch's loss. So
it divides by the totals of the minibatch, which come with the batch, and never by a length of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

FURTHEST: Final = 20.0
"""Nats by which a log-prob may be above another before it counts as this far: e^20 is 5e8,
above every clip and cap. Without it a ratio of e^89 is infinite, its gradient is no number, and
the trainer ends at the same groups each time it is started: a liar that claims log-probs of
-65,504 sees to that, or a model that moves a token of -400 nats in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one task."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Drawn tokens of each completion."""
    ended: tuple[bool, ...]
    """False for a completion that was cut at ``limit``."""
    limit: int
    """Most tokens of a completion in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The drawn tokens of a batch: float32 tensors of shape (tokens,)."""

    logprobs: Tensor
    """Under the weights in training; carries the gradient."""
    old: Tensor
    """Under the weights before the step."""
    sampler: Tensor
    """Under the policy that drew them, as the scorer recomputed it."""
    reference: Tensor | None
    """Under the frozen base; None unless `kl_reference` is set."""
    entropy: Tensor
    """Entropy of the distribution that each token was drawn from, in nats; carries the
    gradient.
    """
    advantages: Tensor
    """The advantage of each token's completion."""
    weights: Tensor
    """min(exp(old - sampler), importance_cap): how much a token of a stale sampler counts."""
    total: float
    """Tokens of the whole minibatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The completions of a batch, whole: none is cut by a border of batches."""

    index: Tensor
    """(tokens,) int64: the completion that each token belongs to."""
    lengths: Tensor
    """(sequences,) float32: tokens of each completion."""
    total: float
    """Completions of the whole minibatch."""
    limit: int
    """Most tokens of a completion in this run."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` (tokens,) over each completion: (sequences,)."""
        sums = values.new_zeros(len(self.lengths)).index_add(0, self.index, values)
        return sums / self.lengths


class Algorithm(Protocol):
    """An algorithm: two pure functions, whose options are the fields of the dataclass."""

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        """Return one advantage for each completion of each group."""
        ...

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the batch's part of the loss, and metrics.

        A metric is a tensor of shape (tokens,); the learner reports its mean over the step.
        """
        ...


def has_spread(rewards: Sequence[float]) -> bool:
    """Return True if the rewards differ: a group that is all right or all wrong teaches
    nothing."""
    return len(rewards) > 1 and min(rewards) != max(rewards)


def centred(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean of its group."""
    if len(rewards) < 2:
        raise ValueError("an advantage needs at least two completions to compare")
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def normalised(rewards: Sequence[float], epsilon: float) -> NDArray[np.float32]:
    """Return (reward - mean) / (standard deviation with n - 1 + ``epsilon``) of one group."""
    differences = centred(rewards)
    variance = math.fsum(one**2 for one in differences) / (len(rewards) - 1)
    scale = math.sqrt(variance) + epsilon
    return np.array([one / scale for one in differences], dtype=np.float32)


def ratio(one: Tensor, other: Tensor) -> Tensor:
    """Return exp(one - other), bounded so that value and gradient are finite."""
    return (one - other).clamp(max=FURTHEST).exp()


def k3(reference: Tensor, current: Tensor) -> Tensor:
    """Return exp(q - l) - (q - l) - 1: Schulman's non-negative estimate of KL(l || q) per
    token."""
    difference = reference - current
    return difference.clamp(max=FURTHEST).exp() - difference - 1


def clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, negative: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss, and where it has no gradient.

    The loss is -min(min(r, negative) A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347).
    ``negative`` is the second side of INTELLECT-2 (2505.07291): it bounds -r A where A is
    negative.
    """
    bounded = ratio.clamp(max=negative) * advantages
    cut = ratio.clamp(1 - low, 1 + high) * advantages
    risen = (advantages > 0) & (ratio > 1 + high)
    fallen = (advantages < 0) & ((ratio < 1 - low) | (ratio > negative))
    return -bounded.minimum(cut), risen | fallen


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Check that an option is a number from ``low`` to ``high``.

    Raises:
        ValueError: It is not.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} is from {low:g} to {high:g}, not {value!r:.40}")
