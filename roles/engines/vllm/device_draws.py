"""The draws of `proofs.draws` on a GPU: the logits stay where they are.

With a vocabulary of 152,000 a step of 256 completions has 156 MB of logits. To fetch them and
draw on one core takes about 0.15 s (0.4 ms a token), several times as long as the step itself;
here only tokens and log-probs leave the device. All is float64, so that a token differs from
the one that `proofs.draws` gives only where its own float32 bounds may: within 1e-6 of a
border, which the limits of a run allow for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from proofs.draws import DrawnTokens
from proofs.sampling import FIRST_FACTOR, SECOND_FACTOR, DrawRule, Words, uniforms

SLICE: Final = 1 << 23
"""Logits drawn from at once: 55 rows at a vocabulary of 152,000. Each takes 8 bytes in about
four tensors, together 270 MB of the device's memory."""

_WORD: Final = 0xFFFF_FFFF
"""The bits of the hash, in int64: products of two of its numbers stay below 2^63."""


def draw_on_device(
    logits: Tensor, words: Words, temperature: float, rule: DrawRule
) -> DrawnTokens:
    """As `proofs.draws.draw`: (rows, vocabulary) in float32 and (rows,)."""
    size = max(1, SLICE // logits.shape[1])
    parts = [
        _draw(logits[start : start + size], words[start : start + size], temperature, rule)
        for start in range(0, len(logits), size)
    ]
    tokens = torch.cat([tokens for tokens, _ in parts])
    logprobs = torch.cat([logprobs for _, logprobs in parts]).clamp(max=0.0)
    if not torch.isfinite(logprobs).all():
        raise ValueError("the logits hold NaN or plus infinity")
    return DrawnTokens(tokens.cpu().numpy().astype(np.intp), logprobs.cpu().numpy())


def _draw(
    logits: Tensor, words: Words, temperature: float, rule: DrawRule
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs."""
    scaled = logits.double()
    scaled = (scaled - scaled.max(1, keepdim=True).values) / (temperature or 1.0)
    if temperature == 0:
        tokens = scaled.argmax(1)
    elif rule is DrawRule.CDF:
        cumulative = scaled.exp().cumsum(1)
        target = torch.from_numpy(uniforms(words)).to(logits.device) * cumulative[:, -1]
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[1] - 1)  # NaN is found by its log-prob
    else:
        tokens = (scaled + _gumbel(words, logits)).argmax(1)
    chosen = scaled.gather(1, tokens[:, None])[:, 0]
    return tokens, chosen - scaled.logsumexp(1)


def _gumbel(words: Words, logits: Tensor) -> Tensor:
    """The noise of every token under each word: `proofs.sampling.noise_bits` and `gumbel`."""
    low, high = (
        torch.from_numpy(half.astype(np.int64)).to(logits.device)[:, None]
        for half in (words & np.uint64(_WORD), words >> np.uint64(32))
    )
    bits = torch.arange(logits.shape[1], device=logits.device) ^ low
    bits ^= bits >> 16
    bits = bits * int(FIRST_FACTOR) & _WORD
    bits ^= bits >> 15
    bits ^= high
    bits = bits * int(SECOND_FACTOR) & _WORD
    bits ^= bits >> 15
    below = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-below))
