"""`proofs.draws` on a GPU: the logits stay where they are.

With a vocabulary of 152,000 a step of 256 completions has 156 MB of logits. To fetch them and
draw on one core takes about 0.15 s (0.4 ms a token), several times as long as the step itself;
here only a few numbers a token leave the device. The noise is whole numbers in int32, the same
to the bit on every device and in numpy (docs/protocols/sampling.md has vectors). All else is
float64, so that a token differs from the one that `proofs.draws` gives only where its own
float32 bounds may: within 1e-6 of a border, which the limits of a run allow for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs.draws import LOWEST, DrawnTokens, Replay
from proofs.sampling import FIRST_FACTOR, SECOND_FACTOR, DrawRule, Words, uniforms
from roles.engines.torch.device import send

SLICE: Final = 1 << 24
"""Number of logits that are drawn from at once: 110 rows at a vocabulary of 152,000. Each takes
8 bytes in about four tensors, together 540 MB of the device's memory."""


def draw_on_device(
    logits: Tensor, words: Words, temperature: float, rule: DrawRule
) -> DrawnTokens:
    """Draw as `proofs.draws.draw` does, from logits (rows, vocabulary) in float32 and words
    (rows,)."""
    parts = []
    for at in _slices(logits):
        block = _Rows(logits[at], temperature)
        tokens = block.draw(words[at], rule).best
        parts.append(torch.stack([tokens.double(), block.logprob(tokens)]))
    tokens, logprobs = _fetched(torch.cat(parts, 1)) if parts else np.empty((2, 0))
    if not np.isfinite(logprobs).all():
        raise ValueError("the logits hold NaN or plus infinity")
    return DrawnTokens(tokens.astype(np.intp), logprobs)


def replay_on_device(
    logits: Tensor,
    tokens: Sequence[int] | NDArray[np.integer],
    words: Words,
    temperature: float,
    rule: DrawRule = DrawRule.CDF,
) -> Replay:
    """Return statistics of claimed tokens as `proofs.draws.replay` does, a few numbers for
    each."""
    claimed = np.asarray(tokens, dtype=np.int64)
    known = (claimed >= 0) & (claimed < logits.shape[1])
    inside = send(np.where(known, claimed, 0), logits.device)
    parts = []
    for at in _slices(logits):
        block, mine = _Rows(logits[at], temperature), inside[at]
        choice = block.draw(words[at], rule)
        off = choice.how_far(mine)
        rows = [choice.best.double(), off, block.logprob(mine), *block.moments(), block.total]
        parts.append(torch.stack(rows))
    found = _fetched(torch.cat(parts, 1)) if parts else np.empty((6, 0))
    best, off, logprob, entropy, variance, total = found
    sound = np.isfinite(total) & known
    mismatch = (best != claimed) | ~sound
    distance, gap = np.zeros((2, len(claimed)))
    if rule is DrawRule.CDF:
        distance = off
    else:
        gap = np.where(mismatch, off, 0.0)
    return Replay(
        mismatch,
        np.where(sound, distance, inf),
        np.where(sound, gap, inf),
        np.where(sound, logprob, -inf),
        entropy,
        variance,
    )


def _slices(logits: Tensor) -> Iterator[slice]:
    size = max(1, SLICE // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _fetched(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.cpu().numpy()
    return found


@dataclass(frozen=True, slots=True)
class _DeviceChoice:
    """The token that a draw gives for each row."""

    best: Tensor
    far: Any
    """Function that returns the distance or gap, by the rule, of one token of each row."""

    def how_far(self, tokens: Tensor) -> Tensor:
        """Return the distance or gap of one token of each row, not below 0."""
        off: Tensor = self.far(tokens[:, None])[:, 0]
        return off.clamp(min=0.0)


class _Rows:
    """Some rows of logits, in float64."""

    def __init__(self, logits: Tensor, temperature: float) -> None:
        self._is_greedy = temperature == 0
        scaled = logits.double()
        scaled -= scaled.amax(1, keepdim=True)
        if temperature not in (0, 1):
            scaled /= temperature
        self.scaled = scaled
        """Logits minus the largest of the row, divided by the temperature."""
        # NaN stays NaN, by which a row without a distribution is found
        self._finite = scaled.clamp(min=LOWEST)
        self.weights = self._finite.exp().masked_fill_(scaled <= LOWEST, 0.0)
        self.total = self.weights.sum(1)

    def logprob(self, tokens: Tensor) -> Tensor:
        """Return the log-prob of one token in each row."""
        chosen = self.scaled.gather(1, tokens[:, None])[:, 0]
        return (chosen - self.total.log()).clamp(max=0.0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of -log p in each row."""
        first = (self.weights * self._finite).sum(1) / self.total
        second = (self.weights * self._finite.square()).sum(1) / self.total
        return self.total.log() - first, (second - first.square()).clamp(min=0.0)

    def draw(self, words: Words, rule: DrawRule) -> _DeviceChoice:
        """Choose a token of each row."""
        if self._is_greedy:
            return _DeviceChoice(self.scaled.argmax(1), self._below_the_best(rule))
        if rule is DrawRule.CDF:
            return self._inverse(words)
        return self._race(words)

    def _below_the_best(self, rule: DrawRule) -> Any:
        """Return a function that measures the distance of tokens to the most probable token: in
        logits (Gumbel) or in probability (CDF)."""
        if rule is DrawRule.GUMBEL:
            return lambda tokens: -self.scaled.gather(1, tokens)
        return lambda tokens: (1.0 - self.weights.gather(1, tokens)) / self.total[:, None]

    def _inverse(self, words: Words) -> _DeviceChoice:
        cumulative = self.weights.cumsum(1)
        total = cumulative[:, -1:]
        target = send(uniforms(words), cumulative.device)[:, None] * total
        best = torch.searchsorted(cumulative, target, right=True)[:, 0]
        best = best.clamp(max=cumulative.shape[1] - 1)  # NaN is found by its log-prob

        def distance(tokens: Tensor) -> Tensor:
            upper = cumulative.gather(1, tokens)
            lower = upper - self.weights.gather(1, tokens)
            return torch.maximum(lower - target, target - upper) / total

        return _DeviceChoice(best, distance)

    def _race(self, words: Words) -> _DeviceChoice:
        scores = self.scaled - _negative_gumbel(noise_bits_on(words, *_place(self.scaled)))
        best = scores.argmax(1)
        highest = scores.gather(1, best[:, None])

        def gap(tokens: Tensor) -> Tensor:
            return (highest - scores.gather(1, tokens)).nan_to_num(nan=inf, posinf=inf)

        return _DeviceChoice(best, gap)


def _place(scores: Tensor) -> tuple[int, torch.device]:
    return scores.shape[1], scores.device


def noise_bits_on(words: Words, vocabulary: int, device: torch.device) -> Tensor:
    """Return `proofs.sampling.noise_bits` of all tokens, (rows, vocabulary), in int32 on
    ``device``.

    Products wrap in int32 as in uint32, and so do the bits of a shift to the right, once those
    that carry the sign are masked.
    """
    low, high = (
        send(half.astype(np.uint32).view(np.int32), device)[:, None]
        for half in (words & np.uint64(0xFFFF_FFFF), words >> np.uint64(32))
    )
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device) ^ low
    bits ^= (bits >> 16) & 0xFFFF
    bits *= int(FIRST_FACTOR)
    bits ^= (bits >> 15) & 0x1FFFF
    bits ^= high
    bits *= int(SECOND_FACTOR)
    bits ^= (bits >> 15) & 0x1FFFF
    return bits


def _negative_gumbel(bits: Tensor) -> Tensor:
    """Return the negated `proofs.sampling.gumbel` of int32 patterns. Each step is a pass over
    the device's memory, which is its only cost, so there are as few steps as possible."""
    from_lowest = bits ^ -(2**31)  # as if they were unsigned, less 2 ** 31
    below = from_lowest.double().add_(2.0**31 + 0.5).mul_(-(2.0**-32))
    return below.log1p_().neg_().log_()
