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
from typing import Final

import torch
from torch import Tensor

FURTHEST: Final = 20.0
"""Nats by which a log-prob may be above another before it counts as this far: e^20 is 5e8, and
no clip or cap of a recipe is above 1e6. Without it a ratio of e^89 is infinite, its gradient no
number, and the trainer ends, on the same groups each time it is started: a validator that signs
log-probs of -65,504 sees to that, or a model that moves a token of -400 nats in one step."""


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
