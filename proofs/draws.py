"""Draws: tokens from logits and draw words, and a verifier's replay of claimed tokens.

Theory of operation
-------------------
A verifier with the worker's weights computes the logits by one prefill and draws again. Its
logits differ from the worker's in the last bits, so tokens may: how far off a claim is, is the
*distance* of the uniform to the interval of the claimed token (rule CDF), or the *gap* between
the best score and that of the claimed token (rule Gumbel). Honest numerics keep both small;
resampling, greedy decoding and another model's tokens do not.

Temperature is the only knob. Cut-offs such as top-p put a cliff into the distribution on which
honest numerics disagree. Temperature 0 is the most probable token, the first of equals, and
uses no words.

How it is fast: a row of 49,152 logits is 192 KiB, so rows are taken a few at a time, and all
passes over them find them in the second-level cache. All statistics share one float32
exponential. Its sums are float64, over blocks of 128 tokens: the inverse CDF walks through
block sums, and through single tokens in one block only. The Gumbel rule needs no logarithm per
token: the score of token v is ln(w_v / E_v), where w_v is its weight and E_v, exponentially
distributed, is -ln(1 - x_v) of its noise x_v. As E_v >= x_v, no token scores more than
ln(w_v / x_v), a division; the few that reach the score of the best of those are then compared
exactly, in float64. Cost of a token at a vocabulary of 49,152, CPU ms: draw 0.09 (CDF) and 0.18
(Gumbel), replay with all statistics 0.13 and 0.24. In float64 throughout it was 0.26, and 0.89.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from proofs.checks import LADDER, LARGEST
from proofs.sampling import DrawRule, Words, gumbel, noise_bits, uniforms

Logits: TypeAlias = NDArray[np.floating]
"""Scores, one row per token position: (rows, vocabulary)."""

SURPRISE_FLOOR: Final = 4.0
"""Squared nats added to the variance of the summed surprise. A policy that is sure of nearly
every token has next to no variance, and one unlikely token would condemn an honest worker."""

LOWEST: Final = -80.0
"""Scaled logit, relative to the best, below which a token is never drawn. Its probability is
below 2e-35, and no uniform of 53 bits nor noise of 32 reaches it. In float32 it would become a
denormal number, each of which costs a hundred times as much."""

# Values that are looked at together: 256 KiB of float32, which with two arrays of scratch stays
# in a second-level cache of 1 MiB. A row is never cut.
_BLOCK_VALUES: Final = 1 << 16

# Tokens of one block of the cumulative sum. A row of 49,152 has 384 blocks: walking through
# those and one block is 512 sequential additions instead of 49,152, which took 0.19 ms.
_SUM_BLOCK: Final = 128

# E in units of x: at most 1 + x for an x below one half, and at most -ln(2^-33) / (1/2) for all
# others.
_LONGEST: Final = np.float32(46.0)

# Relative error that the float32 bound of a Gumbel score may have: three roundings and an
# exponential, under 1e-6 together.
_SLACK: Final = 1e-5


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """One token per row, and its log-probability at the temperature (for greedy decoding, at
    1)."""

    tokens: NDArray[np.intp]
    logprobs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of drawing again, with one element per claimed token."""

    mismatch: NDArray[np.bool_]
    """True where the draw gives another token."""
    distance: NDArray[np.float64]
    """Rule CDF: distance from the uniform to the claimed token's interval, 0 to 1. Greedy:
    difference in probability to the most probable token. Infinite, under Gumbel too, where the
    token or the logits are invalid; otherwise 0 under Gumbel."""
    gap: NDArray[np.float64]
    """Rule Gumbel: the best score minus the claimed token's; for greedy decoding, of logits.
    Infinite where the distance is. Rule CDF: 0."""
    logprob: NDArray[np.float64]
    """The claimed token's log-probability, at the temperature (for greedy decoding, at 1)."""
    entropy: NDArray[np.float64]
    """The row's entropy in nats: the expected -logprob of an honest draw."""
    variance: NDArray[np.float64]
    """The variance of -logprob over honest draws from the row."""


# Infinity minus infinity is NaN, and a logarithm of it NaN again: that is how rows without a
# distribution are found. And what is far below the best is infinitely far below at a low
# temperature.
_quiet = np.errstate(invalid="ignore", divide="ignore", over="ignore")


@_quiet
def draw(
    logits: Logits, words: Words, temperature: float, rule: DrawRule = DrawRule.CDF
) -> DrawnTokens:
    """Return the token of each row, drawn from logits (rows, vocabulary) and words (rows,).

    A logit of minus infinity is a token that cannot be drawn. Raises `ValueError` when a row
    has no distribution (NaN, plus infinity).
    """
    _check(logits, words, temperature)
    tokens = np.empty(len(logits), dtype=np.intp)
    logprobs = np.empty(len(logits))
    for at, block in _blocks(logits, temperature):
        if not np.isfinite(block.total).all():
            raise ValueError("the logits hold NaN or plus infinity")
        tokens[at] = block.draw(words[at], rule).best
        logprobs[at] = block.logprob(tokens[at])
    return DrawnTokens(tokens, logprobs)


@_quiet
def replay(
    logits: Logits,
    tokens: Sequence[int] | NDArray[np.integer],
    words: Words,
    temperature: float,
    rule: DrawRule = DrawRule.CDF,
) -> Replay:
    """Draw again and compare with the claimed tokens. Invalid tokens raise no exception."""
    _check(logits, words, temperature)
    count, vocabulary = logits.shape
    known, claimed = _indices(tokens, vocabulary)
    if len(claimed) != count:
        raise ValueError(f"{count} rows of logits and {len(claimed)} tokens")
    mismatch = np.empty(count, dtype=np.bool_)
    distance, gap, logprob, entropy, variance = np.zeros((5, count))
    for at, block in _blocks(logits, temperature):
        choice = block.draw(words[at], rule)
        mine = claimed[at]
        mismatch[at] = choice.best != mine
        off = choice.how_far(mine)
        if rule is DrawRule.CDF:
            distance[at] = off
        else:
            gap[at] = np.where(mismatch[at], off, 0.0)
        logprob[at] = block.logprob(mine)
        entropy[at], variance[at] = block.moments()  # last: it takes the weights
        sound = np.isfinite(block.total) & known[at]
        mismatch[at] |= ~sound
        for values, unsound in ((distance, inf), (gap, inf), (logprob, -inf)):
            values[at] = np.where(sound, values[at], unsound)
    return Replay(mismatch, distance, gap, logprob, entropy, variance)


class DrawStatistics:
    """Statistics over all draws of one group, fed with blocks of rows of any size in any order.

    Every number is that of `replay` over all rows at once; only sums are rounded in another
    order.
    """

    def __init__(
        self,
        temperature: float,
        rule: DrawRule = DrawRule.CDF,
    ) -> None:
        self._temperature = temperature
        self._rule = rule
        self._off = np.zeros(len(LADDER), dtype=np.int64)
        self._excess = 0.0
        self._variance = 0.0
        self._gaps = 0.0
        self.tokens = 0
        """Number of rows added so far."""
        self.distance = 0.0
        """Largest distance so far."""
        self.gap_max = 0.0
        """Largest gap so far."""
        self._largest = np.empty(0)

    def add(
        self, logits: Logits, tokens: Sequence[int] | NDArray[np.integer], words: Words
    ) -> NDArray[np.float64]:
        """Add one block of rows; return the log-probabilities of its tokens."""
        return self.take(replay(logits, tokens, words, self._temperature, self._rule))

    def take(self, seen: Replay) -> NDArray[np.float64]:
        """Add a block that was already replayed, for example by the device that holds its
        logits."""
        off = seen.distance if self._rule is DrawRule.CDF else seen.gap
        self.tokens += len(seen.logprob)
        # not within a step: NaN, too, counts
        self._off += [np.count_nonzero(~(off <= step)) for step in LADDER]
        far = np.sort(np.concatenate([self._largest, off[~(off <= LADDER[0])]]))
        self._largest = far[::-1][:LARGEST]
        self.distance = _larger(self.distance, seen.distance)
        self.gap_max = _larger(self.gap_max, seen.gap)
        self._gaps += float(seen.gap.sum())
        self._excess += float((-seen.logprob - seen.entropy).sum())
        self._variance += float(seen.variance.sum())
        return seen.logprob

    @property
    def off(self) -> tuple[int, ...]:
        """Return the number of tokens off by more than each step of `proofs.checks.LADDER`."""
        return tuple(self._off.tolist())

    @property
    def largest(self) -> tuple[float, ...]:
        """The `proofs.checks.LARGEST` largest offsets, largest first, without those within the
        first step."""
        return tuple(self._largest.tolist())

    @property
    def gap_mean(self) -> float:
        """Mean gap of all rows; 0 without rows."""
        return self._gaps / self.tokens if self.tokens else 0.0

    @property
    def surprise(self) -> float:
        """z-statistic of the tokens' summed surprise, which is their -log p minus the entropy
        of each row.

        It is near 0 for honest draws, large for tokens that another model wrote, and negative
        for tokens picked for being likely. Greedy decoding has no surprise, so it is 0.
        `SURPRISE_FLOOR` is added to the variance.
        """
        if self._temperature == 0:
            return 0.0
        return self._excess / sqrt(self._variance + SURPRISE_FLOOR)


def _larger(so_far: float, values: NDArray[np.float64]) -> float:
    """Return the larger of the maximum so far and the values' maximum; NaN if any is NaN."""
    highest = float(values.max(initial=0.0))
    return nan if isnan(highest) or isnan(so_far) else max(so_far, highest)


def _check(logits: Logits, words: Words, temperature: float) -> None:
    if not 0 <= temperature < inf:
        raise ValueError(f"a temperature is finite and not negative, not {temperature}")
    if logits.ndim != 2 or words.shape != logits.shape[:1]:
        raise ValueError(f"logits are (rows, vocabulary) and words (rows,), not {words.shape}")


def _indices(
    tokens: Sequence[int] | NDArray[np.integer], vocabulary: int
) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """Return a mask of the tokens in the vocabulary, and an index for each token, 0 if it is
    outside."""
    if not isinstance(tokens, np.ndarray):
        # Numbers of any size are foreign here: what is no index must not reach an array.
        inside = [0 <= token < vocabulary for token in tokens]
        kept = [t if ok else 0 for t, ok in zip(tokens, inside, strict=True)]
        return np.array(inside, dtype=np.bool_), np.array(kept, dtype=np.intp)
    known = (tokens >= 0) & (tokens < vocabulary)
    return known, np.where(known, tokens, 0).astype(np.intp)


def _blocks(logits: Logits, temperature: float) -> Iterator[tuple[slice, _Block]]:
    """Yield the rows in blocks that fit the cache; all blocks share their arrays."""
    count, vocabulary = logits.shape
    rows = max(1, min(count, _BLOCK_VALUES // vocabulary))
    padded = -(-vocabulary // _SUM_BLOCK) * _SUM_BLOCK
    arrays = _Arrays(
        scaled=np.empty((rows, vocabulary), dtype=np.float32),
        weights=np.zeros((rows, padded), dtype=np.float32),
        bits=np.empty((rows, vocabulary), dtype=np.uint32),
        bounds=np.empty((rows, vocabulary), dtype=np.float32),
        tokens=np.arange(vocabulary, dtype=np.uint32),
    )
    for start in range(0, count, rows):
        at = slice(start, min(start + rows, count))
        mine = logits[at].astype(np.float32, copy=False)
        yield at, _Block(mine, temperature, arrays.of(len(mine)))


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Working memory for the rows of a block, reused for each block."""

    scaled: NDArray[np.float32]
    weights: NDArray[np.float32]
    """Weights, padded with zeros behind the vocabulary to whole blocks of the cumulative
    sum."""
    bits: NDArray[np.uint32]
    bounds: NDArray[np.float32]
    tokens: NDArray[np.uint32]
    """The numbers of the vocabulary's tokens."""

    def of(self, rows: int) -> _Arrays:
        """Return views of the arrays for ``rows`` rows."""
        return _Arrays(
            self.scaled[:rows],
            self.weights[:rows],
            self.bits[:rows],
            self.bounds[:rows],
            self.tokens,
        )


class _Choice(Protocol):
    """The token that a draw gives for each row of a block."""

    best: NDArray[np.intp]

    def how_far(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the distance or gap, by the rule, of one token of each row. It is never below
        0."""
        ...


class _Block:
    """Rows that are processed together, and share one computation of the exponential."""

    def __init__(
        self, logits: NDArray[np.float32], temperature: float, arrays: _Arrays
    ) -> None:
        self.logits = logits
        self.rows = np.arange(len(logits))
        self.arrays = arrays
        self.weights = arrays.weights[:, : logits.shape[1]]
        """Exponentials of the scaled logits, where the largest of each row is 1. Divided by
        ``total`` they are probabilities."""
        self._is_greedy = temperature == 0
        self._temperature = temperature or 1.0
        self._top = logits.max(axis=1)
        self._scaled = scaled = arrays.scaled
        np.subtract(logits, self._top[:, None], out=scaled)
        if self._temperature != 1.0:
            np.divide(scaled, np.float32(self._temperature), out=scaled)
        impossible = scaled <= LOWEST if not scaled.min(initial=0.0) > LOWEST else None
        if impossible is not None:
            scaled[impossible] = LOWEST
        np.exp(scaled, out=self.weights)
        if impossible is not None:
            self.weights[impossible] = 0.0
        self.parts = arrays.weights.reshape(len(logits), -1, _SUM_BLOCK)
        """The weights, divided into the blocks of the cumulative sum."""
        sums = np.einsum("ijk->ij", self.parts, dtype=np.float64, casting="safe")
        self.borders: NDArray[np.float64] = sums.cumsum(axis=1)
        """Cumulative weight at the end of each block."""
        self.total: NDArray[np.float64] = self.borders[:, -1]
        """Sum of the weights of each row; NaN where a row has no distribution."""

    def logprob(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the log-probability of one token in each row."""
        values = self.exact(self.rows, tokens) - np.log(self.total)
        # a certain token's may be a rounding above 0
        certain: NDArray[np.float64] = np.minimum(values, 0.0)
        return certain

    def moments(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean and variance of -log p in each row. The weights are overwritten, so
        this must be the last use."""
        first = np.einsum("ij,ij->i", self.weights, self._scaled) / self.total
        np.multiply(self.weights, self._scaled, out=self.weights)
        second = np.einsum("ij,ij->i", self.weights, self._scaled) / self.total
        return np.log(self.total) - first, np.maximum(second - first**2, 0.0)

    def draw(self, words: Words, rule: DrawRule) -> _Choice:
        """Choose a token of each row."""
        if self._is_greedy:
            return _Greedy(self, rule)
        return _Inverse(self, words) if rule is DrawRule.CDF else _Race(self, words)

    def exact(self, rows: NDArray[np.intp], tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the scaled logits of single tokens, in float64."""
        above = self.logits[rows, tokens].astype(np.float64) - self._top[rows]
        scaled: NDArray[np.float64] = above / self._temperature
        return scaled


class _Greedy:
    """Chooses the most probable token, the first of equals."""

    def __init__(self, block: _Block, rule: DrawRule) -> None:
        self._block = block
        self._rule = rule
        self.best = block.logits.argmax(axis=1)

    def how_far(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the distance in probability (CDF) or in logits (Gumbel)."""
        block = self._block
        if self._rule is DrawRule.GUMBEL:
            return -block.exact(block.rows, tokens)
        # the weight of the most probable token is 1
        below: NDArray[np.float64] = (1.0 - block.weights[block.rows, tokens]) / block.total
        return below


class _Inverse:
    """Chooses the first token whose cumulative weight exceeds the uniform's share of the
    total."""

    def __init__(self, block: _Block, words: Words) -> None:
        self._block = block
        self._target = uniforms(words) * block.total
        which = (block.borders > self._target[:, None]).argmax(axis=1)
        inside, _ = self._inside(which)
        self.best = which * _SUM_BLOCK + (inside > self._target[:, None]).argmax(axis=1)

    def _inside(
        self, which: NDArray[np.intp]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the cumulative weights within one block of each row, and the border before it.

        The block's own sum was rounded in another order: its last token, and those of no weight
        that follow, end exactly where the next block begins.
        """
        rows, borders = self._block.rows, self._block.borders
        before = np.where(which > 0, borders[rows, np.maximum(which - 1, 0)], 0.0)
        end = borders[rows, which][:, None]
        inside = before[:, None] + self._block.parts[rows, which].cumsum(
            axis=1, dtype=np.float64
        )
        return np.where(inside >= inside[:, -1:], end, np.minimum(inside, end)), before

    def how_far(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the distance of the uniform to the token's interval."""
        which, place = np.divmod(tokens, _SUM_BLOCK)
        inside, before = self._inside(which)
        rows = self._block.rows
        upper = inside[rows, place]
        lower = np.where(place > 0, inside[rows, np.maximum(place - 1, 0)], before)
        off = np.maximum(np.maximum(lower - self._target, self._target - upper), 0.0)
        distance: NDArray[np.float64] = off / self._block.total
        return distance


class _Race:
    """Chooses the token with the largest sum of scaled logit and Gumbel noise, the first of
    equals."""

    def __init__(self, block: _Block, words: Words) -> None:
        self._block = block
        self._words = words
        bits, bounds = block.arrays.bits, block.arrays.bounds
        noise_bits(words, block.arrays.tokens, out=bits)
        # ln(w / x) + 32 ln 2 bounds a token's score from above; the 2^32 is left out throughout
        np.copyto(bounds, bits, casting="unsafe")
        np.add(bounds, np.float32(0.5), out=bounds)
        np.divide(block.weights, bounds, out=bounds)
        likely = bounds.argmax(axis=1)
        noise = bits[block.rows, likely] * np.float32(2**-32)
        reached = bounds[block.rows, likely] / np.where(noise < 0.5, 1 + noise, _LONGEST)
        flat = np.flatnonzero(bounds >= (reached * np.float32(1 - _SLACK))[:, None])
        rows, columns = np.divmod(flat, bounds.shape[1])
        self.best = np.zeros(len(bounds), dtype=np.intp)
        self._highest = np.full(len(bounds), -inf)
        if len(rows):
            scores = self._scores(rows, columns)
            # the best of each row, of equals the first, comes last
            order = np.lexsort((-columns, scores, rows))
            ends = np.flatnonzero(np.diff(rows[order], append=len(bounds)))
            chosen = order[ends]
            self.best[rows[chosen]] = columns[chosen]
            self._highest[rows[chosen]] = scores[chosen]

    def _scores(self, rows: NDArray[np.intp], tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the exact scores of single tokens."""
        bits = noise_bits(self._words[rows], tokens[:, None])[:, 0]
        scores: NDArray[np.float64] = self._block.exact(rows, tokens) + gumbel(bits)
        return scores

    def how_far(self, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the best score minus the token's."""
        gap = self._highest - self._scores(self._block.rows, tokens)
        # a claimed score is no candidate's only if it is lower, or beyond the slack's rounding
        return np.where(gap > 0, gap, np.where(np.isnan(gap), inf, 0.0))
