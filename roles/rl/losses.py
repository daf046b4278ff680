"""Policy-gradient losses per token, as pure functions of log-probs.

Notation, all of answer tokens: ``current`` is the log-prob that carries the gradient, ``old``
the one under the policy at the start of the step (recomputed by the trainer), ``behaviour`` the
one the sampler reported. Everything but ``current`` is detached. The log-probs are those of
softmax(logits / temperature) with the sampling temperature. All losses are minimised; the
caller sums and divides.

Sources: PPO 1707.06347, GRPO 2402.03300, two-sided clip INTELLECT-2 2505.07291, truncated
importance sampling Yao et al. (August 2025), k3 Schulman.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FURTHEST: Final = 20.0
"""Nats by which a log-prob may be above another before it counts as this far: e^20 is 5e8, and
no clip or cap of a recipe is above 1e6. Without it a ratio of e^89 is infinite, its gradient no
number, and the trainer ends, on the same groups each time it is started: a validator that signs
log-probs of -65,504 sees to that, or a model that moves a token of -400 nats in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions:
    """Options of the algorithm ``grpo``."""

    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation: it changes nothing but a division by zero."""
    clip: float = 0.2
    """PPO's epsilon: the ratio is clipped to 1 +- this."""
    clip_negative: float = 4.0
    """Bounds the ratio where the advantage is negative: INTELLECT-2's delta."""
    importance_cap: float = 2.0
    """Cap of the weight exp(old - behaviour) by which a stale token counts (TIS)."""
    kl: float = 0.0
    """Weight of k3 between the policy that drew and the one that is trained."""

    def __post_init__(self) -> None:
        if self.clip_negative <= 1 + self.clip:
            raise ValueError(
                f"clip_negative must exceed 1 + clip ({1 + self.clip}), not"
                f" {self.clip_negative}"
            )


def clipped_loss(
    current: Tensor,
    old: Tensor,
    advantage: Tensor,
    *,
    clip: float,
    clip_negative: float = math.inf,
) -> Tensor:
    """-min(min(r, d) A, clip(r, 1-e, 1+e) A): PPO's clip, and a bound on -r A where A is
    negative."""
    ratio = _ratio(current, old)
    bounded = torch.clamp(ratio, max=clip_negative) * advantage
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip) * advantage
    return -torch.minimum(bounded, clipped)


def is_clipped(
    current: Tensor, old: Tensor, advantage: Tensor, *, clip: float, clip_negative: float
) -> Tensor:
    """Where `clipped_loss` has no gradient."""
    ratio = _ratio(current, old)
    risen = (advantage > 0) & (ratio > 1 + clip)
    fallen = (advantage < 0) & ((ratio < 1 - clip) | (ratio > clip_negative))
    return risen | fallen


def importance_weight(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """min(exp(old - behaviour), cap): how much a token of a stale sampler counts (TIS)."""
    return torch.clamp(_ratio(old, behaviour), max=cap)


def k3(reference: Tensor, current: Tensor) -> Tensor:
    """exp(q - l) - (q - l) - 1: Schulman's non-negative estimate of KL(l || q) per token."""
    difference = reference - current
    return torch.exp(difference.clamp(max=FURTHEST)) - difference - 1


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """exp(one - other), always a number, and so is its gradient."""
    return torch.exp((one - other).clamp(max=FURTHEST))


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs of ``tokens`` (N,) under softmax of ``logits`` (N, V) / temperature."""
    scaled = logits / temperature if temperature != 1.0 else logits
    return scaled.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
