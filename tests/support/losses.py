"""Batches of drawn tokens for tests of losses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roles.rl.algorithms.base import Sequences, Tokens, ratio


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(
    current: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    *,
    sampler: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    cap: float = 2.0,
    limit: int = 16,
) -> tuple[Tokens, Sequences]:
    """A whole minibatch in one batch: completions of ``lengths``, one after the other."""
    before, drawn_by = vector(*old), vector(*(old if sampler is None else sampler))
    tokens = Tokens(
        logprobs=vector(*current).requires_grad_(),
        old=before,
        sampler=drawn_by,
        reference=None if reference is None else vector(*reference),
        entropy=vector(*(1.0 + 0.1 * one for one in range(len(current)))).requires_grad_(),
        advantages=vector(*advantages),
        weights=ratio(before, drawn_by).clamp(max=cap),
        total=len(current),
    )
    sequences = Sequences(
        index=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        lengths=vector(*lengths),
        total=len(lengths),
        limit=limit,
    )
    return tokens, sequences
