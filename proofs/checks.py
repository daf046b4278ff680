"""Evidence, limits, and judgement of a submission: a verdict, never a bool.

Theory of operation
-------------------
Checks go from cheap to costly. `check_shape` needs no model: a claim that has the wrong shape
is not worth a prefill. `judge` compares the `Evidence` of one group, which one prefill gives,
with `Limits`; the first statistic outside its limit is the reason. `judge_pool` sees what no
single group shows: the evidence of a whole submission, where small shifts add up and honest
noise does not.

Every comparison is written so that NaN is outside the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Verdict(Enum):
    """The outcome of a verification."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    """The verifier could not decide, by its own fault or for too little evidence. No worker is
    punished."""


class Reason(Enum):
    """The reason of a verdict. Operators and ledgers see these values."""

    WITHIN_LIMITS = "within limits"
    NO_TOKENS = "no tokens"
    # Shape: no model needed.
    GROUP_SIZE = "wrong number of completions"
    LENGTH = "completion empty or too long"
    TOKEN = "token outside the vocabulary"
    AFTER_END = "tokens after the end token"
    UNFINISHED = "cut before the length limit"
    # Activations: other weights, precision or prompt.
    MALFORMED_PROOF = "malformed activation proof"
    EXPONENTS = "activation exponents differ"
    MANTISSA_MEAN = "activation mantissas differ on average"
    MANTISSA_CHUNK = "activation mantissas differ in one chunk"
    MANTISSA_MEDIAN = "activation mantissas differ at the median"
    # Sampling: other tokens than the seed gives.
    DRAW_DISTANCE = "a token is far from its seeded draw"
    DRAW_GAP = "a token scores far below its seeded draw"
    DRAW_GAPS = "tokens score below their seeded draws on average"
    DRAW_MISMATCHES = "too many tokens are off their seeded draws"
    # Plausibility.
    IMPROBABLE_END = "ended where an end was improbable"
    SURPRISE = "tokens implausible under the policy"


MEAN_POWER: Final = 0.75
"""The power with which the limit of a mean falls as the number of chunks grows
(`Limits.mantissa_limit`). It lies between 1/2, for normal errors, and 1, for a single outlier
(bench/README.md)."""

CHUNK_EXCESS: Final = 3.0
"""Limit of the worst chunk of a group, as a multiple of `Limits.mantissa_mean`. Now and then a
state amplifies noise: of 320,000 honest chunks the worst had 6.4, the next 4.9 and 4.8, while
no group of 16 answers had more than 1.6 in the mean (bench/README.md)."""

MAX_LIMIT: Final = 1e9
"""The largest value of any of `Limits`. A higher limit lets everything pass, or is a
mistake."""

LADDER: Final = (1e-5, 0.05, 0.1, 0.2, 0.4)
"""Steps, in nats (rule CDF: in probability), beyond each of which the tokens that are off are
counted. The first step means that a token differs by more than rounding."""

LARGEST: Final = 64
"""Number of largest offsets of a group that are kept as evidence. A calibration fits its tail
to the largest 256 of some hundred groups."""

FALSE_REJECTIONS: Final = 1e-4
"""Chance that an honest submission is rejected, by all tests of all its groups together. It is
one in 10,000; a node that works for a month submits fewer."""

TESTS: Final = 16
"""Upper bound of the number of tests of a group, a pool or a history. Each of the three gets a
third of `FALSE_REJECTIONS`, in equal parts for each test."""

GROUPS: Final = 256
"""Most groups that a submission may have, each of which is tested. Allowing for the largest
submission costs the groups of a small one little, since limits grow with the logarithm."""

POOL_CHANCE: Final = FALSE_REJECTIONS / 3 / TESTS
"""Chance that a test of a pool or a history rejects honest work: 2e-6."""

GROUP_CHANCE: Final = POOL_CHANCE / GROUPS
"""Chance that a test of a group rejects honest work: 8e-9."""

OVERDISPERSION: Final = 1.5
"""Variance of honest counts and sums, divided by that of independent tokens. Equal answers
share their states, so tokens that are far off come in clumps. It is 1.1 to 1.5 in groups of 16
(bench/README.md)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Statistics of one group, from the validator's own prefill.

    How far *off* a token is: rule CDF, the distance of its uniform to the interval of the token
    that was claimed; rule Gumbel, the gap of the best score to that of the claimed token.
    """

    tokens: int
    malformed: str
    """Reason why the proof is malformed; empty if it is well-formed."""
    exponent_mismatches: int
    """Largest number of differing exponents in any of the group's TOPLOC chunks."""
    mantissa_mean: float
    """Mean of the chunks' mean mantissa errors, each scaled to a whole chunk and weighted by
    its independence (`proofs.toploc.independence`)."""
    mantissa_median: float
    """Largest median mantissa error of any chunk, scaled to a whole chunk."""
    draw_distance: float
    """Largest distance of any token; 0 under the rule Gumbel."""
    off: tuple[int, ...]
    """Number of tokens that are further off than each step of `LADDER`."""
    gap_mean: float
    """Mean gap of the tokens; 0 under the rule CDF."""
    gap_max: float
    """Largest gap of any token."""
    end_probability: float
    """Smallest probability of the end token at a claimed end before the length limit; 1.0 if
    there is no such end."""
    surprise: float
    """z-statistic of the summed surprise of the tokens."""
    mantissa_worst: float
    """Largest mean mantissa error of any chunk, scaled to a whole chunk."""
    chunks: float
    """Number of whole, independent chunks that the group's chunks are worth as evidence. It is
    at least 1.0, which it is if all completions are equal and short."""
    largest: tuple[float, ...] = ()
    """The `LARGEST` offsets, largest first. They serve calibration; no limit applies to
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of honest numerical error, calibrated per model, dtype and engines into the run
    file. One set holds for all pairs of engines, since a worker may name any engine.

    `fp32` and `bf16` are starting points, measured on CPUs, decode against prefill
    (bench/README.md). ``shoal calibrate`` measures a run's own.
    """

    exponent_mismatches: int
    """Most exponents that may differ in a chunk of ``proof_values`` values."""

    mantissa_mean: float
    """Largest mean mantissa error of a group that counts as one chunk. This test finds other
    weights: a constant polynomial agrees in 121 of 128 exponents. The limit falls with the
    number of chunks (`mantissa_limit`); the worst chunk may exceed it (`CHUNK_EXCESS`)."""

    mantissa_median: float
    """Largest median mantissa error. In fp32 fewer than 1 value in 100 differ."""

    draw_distance: float
    """Rule CDF: largest distance of any token from its draw."""

    gap_max: float
    """Rule Gumbel: largest gap of any token, in nats, extrapolated from honest gaps."""

    off: tuple[tuple[float, float], ...]
    """For each distance of `LADDER`: largest honest share of tokens beyond it."""

    gap_mean: float
    """Rule Gumbel: largest honest mean gap of many tokens, in nats."""

    gap_scale: float
    """Rule Gumbel: scale of the exponential tail of honest gaps, in nats. With `gap_mean` it
    bounds the sum of any number of them: `gap_limit`."""

    end_probability: float = 1e-12
    """Least probability of an end token. An honest draw ends with a token of probability p in a
    share p of cases, so the chance that any of n tokens falls below this is at most n times as
    much."""

    surprise: float = 20.0
    """Most standard deviations of the surprise of drawn tokens. Only gross lies fail it, since
    the surprise of a policy that is nearly sure has a heavy tail."""

    pooled_mantissa_mean: float
    """Largest mean mantissa error over many chunks: 1.2 times the honest mean. `mantissa_limit`
    interpolates between one chunk and many."""

    def __post_init__(self) -> None:
        numbers = [(name, getattr(self, name)) for name in self.__slots__ if name != "off"]
        for name, value in (*numbers, *(("a share in off", share) for _, share in self.off)):
            if not 0 <= value <= MAX_LIMIT:
                raise ValueError(f"{name} must be from 0 to {MAX_LIMIT:g}, not {value}")
        if any(share > 1 for _, share in self.off):
            raise ValueError("a share in off is of all tokens: at most 1")
        steps = [step for step, _ in self.off]
        if len(set(steps)) < len(steps) or not {*steps} <= {*LADDER}:
            raise ValueError(
                f"off has steps of {', '.join(map(str, LADDER))}, each once, not {steps}"
            )

    def mantissa_limit(self, chunks: float) -> float:
        """Return the largest mean error of `chunks` independent chunks.

        It is `pooled_mantissa_mean`, plus the excess of `mantissa_mean` over it divided by
        ``chunks ** MEAN_POWER``."""
        share = 1.0 if chunks <= 1 else chunks**-MEAN_POWER
        above = self.mantissa_mean - self.pooled_mantissa_mean
        return self.pooled_mantissa_mean + above * share

    def gap_limit(self, tokens: int, chance: float) -> float:
        """Return the bound that the summed gaps of ``tokens`` honest tokens exceed with
        `chance` at most.

        The model is compound Poisson: gaps of exponential size with the mean `gap_mean` a
        token. The square is Chernoff's bound on their sum: ``gap_scale * ln(1 / chance)`` for
        few tokens, ``gap_mean`` a token for many.
        """
        sure = OVERDISPERSION * self.gap_scale * math.log(1 / chance)
        return (math.sqrt(self.gap_mean * tokens) + math.sqrt(sure)) ** 2

    def off_limits(self, tokens: int, chance: float) -> dict[float, int]:
        """Map each step to the largest count of honest tokens beyond it.

        Honest work exceeds the count with `chance` at most, by a Poisson model of clumps of
        `OVERDISPERSION` tokens.
        """
        clumps = {step: share * tokens / OVERDISPERSION for step, share in self.off}
        return {
            step: math.floor(OVERDISPERSION * poisson_limit(mean, chance))
            for step, mean in clumps.items()
        }

    @classmethod
    def fp32(cls) -> Limits:
        """Return limits for runs that compute in float32, where any violation is a lie."""
        return cls(
            exponent_mismatches=2,
            mantissa_mean=0.05,
            mantissa_median=0.0,
            draw_distance=1e-4,
            gap_max=1e-3,
            off=((1e-5, 1e-4),),
            gap_mean=1e-6,
            gap_scale=1e-4,
            pooled_mantissa_mean=0.012,
        )

    @classmethod
    def bf16(cls) -> Limits:
        """Return limits for runs in bfloat16 with Gumbel draws, where single groups are noisy
        and pools are not."""
        return cls(
            exponent_mismatches=22,
            mantissa_mean=5.0,
            mantissa_median=8.0,
            draw_distance=0.15,
            gap_max=1.5,
            off=((1e-5, 0.02), (0.05, 0.01), (0.1, 0.005), (0.2, 0.0016), (0.4, 2e-4)),
            gap_mean=0.0015,
            gap_scale=0.09,
            pooled_mantissa_mean=1.7,
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, with the number that decided it and the limit that it was compared with."""

    verdict: Verdict
    reason: Reason
    statistic: float = 0.0
    limit: float = 0.0

    def __str__(self) -> str:
        match self.verdict:
            case Verdict.ACCEPTED:
                return "accepted"
            case Verdict.INCONCLUSIVE:
                return f"inconclusive: {self.reason.value}"
            case Verdict.REJECTED:
                return (
                    f"rejected: {self.reason.value} ({self.statistic:g}, limit {self.limit:g})"
                )


ACCEPTED = Judgement(Verdict.ACCEPTED, Reason.WITHIN_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The form that a group must have before a validator runs a model for it."""

    group_size: int
    """Number of completions per group."""
    max_new_tokens: int
    vocabulary: int
    """Number of tokens; they count from 0."""
    end_tokens: frozenset[int]
    """Tokens that end a turn, and also a completion of one turn."""
    turns: int = 1
    """Most turns of a completion."""


def check_shape(tokens: Sequence[Sequence[int]], shape: Shape) -> Judgement:
    """Judge the tokens of one group's completions by their shape alone.

    A completion ends with an end token, or has exactly ``max_new_tokens``; each end token in it
    ends a turn. What the environment says to each turn is not looked at.
    """
    if len(tokens) != shape.group_size:
        return _rejected(Reason.GROUP_SIZE, len(tokens), shape.group_size)
    for completion in tokens:
        judgement = _check_tokens(completion, shape)
        if judgement.verdict is not Verdict.ACCEPTED:
            return judgement
    return ACCEPTED


def _check_tokens(completion: Sequence[int], shape: Shape) -> Judgement:
    length, turns = len(completion), 1
    if not 1 <= length <= shape.max_new_tokens:
        return _rejected(Reason.LENGTH, length, shape.max_new_tokens)
    for position, token in enumerate(completion, start=1):
        if not 0 <= token < shape.vocabulary:
            return _rejected(Reason.TOKEN, token, shape.vocabulary)
        if token in shape.end_tokens and position < length:
            turns += 1
            if turns > shape.turns:
                return _rejected(Reason.AFTER_END, length, position)
    if completion[-1] not in shape.end_tokens and length < shape.max_new_tokens:
        return _rejected(Reason.UNFINISHED, length, shape.max_new_tokens)
    return ACCEPTED


def judge(evidence: Evidence, limits: Limits) -> Judgement:
    """Compare one group's evidence with the limits. The first violation is the reason."""
    if evidence.malformed:
        return _rejected(Reason.MALFORMED_PROOF, 1, 0)
    if evidence.tokens <= 0:
        return Judgement(Verdict.INCONCLUSIVE, Reason.NO_TOKENS)
    upper: tuple[tuple[Reason, float, float], ...] = (
        (Reason.EXPONENTS, evidence.exponent_mismatches, limits.exponent_mismatches),
        (
            Reason.MANTISSA_MEAN,
            evidence.mantissa_mean,
            limits.mantissa_limit(evidence.chunks),
        ),
        (
            Reason.MANTISSA_CHUNK,
            evidence.mantissa_worst,
            CHUNK_EXCESS * limits.mantissa_mean,
        ),
        (Reason.MANTISSA_MEDIAN, evidence.mantissa_median, limits.mantissa_median),
        (Reason.DRAW_DISTANCE, evidence.draw_distance, limits.draw_distance),
        (Reason.DRAW_GAP, evidence.gap_max, limits.gap_max),
        (Reason.SURPRISE, abs(evidence.surprise), limits.surprise),
    )
    for reason, statistic, limit in upper:
        if not statistic <= limit:
            return _rejected(reason, statistic, limit)
    if not evidence.end_probability >= limits.end_probability:
        return _rejected(
            Reason.IMPROBABLE_END, evidence.end_probability, limits.end_probability
        )
    return _judge_draws([evidence], limits, GROUP_CHANCE)


def judge_pool(pool: Sequence[Evidence], limits: Limits) -> Judgement:
    """Judge the groups of one submission together, in addition to each by itself.

    Three sums are compared with the limits for this number of tokens and chunks: the counts of
    tokens beyond each step of the ladder, the sum of their gaps, and the mean mantissa error.
    """
    malformed = sum(bool(evidence.malformed) for evidence in pool)
    if malformed:
        return _rejected(Reason.MALFORMED_PROOF, malformed, 0)
    if sum(evidence.tokens for evidence in pool) <= 0:
        return Judgement(Verdict.INCONCLUSIVE, Reason.NO_TOKENS)
    chunks = sum(evidence.chunks for evidence in pool)
    total = sum(evidence.mantissa_mean * evidence.chunks for evidence in pool)
    limit = limits.mantissa_limit(chunks)
    if not total <= limit * chunks:
        return _rejected(Reason.MANTISSA_MEAN, total / chunks if chunks else total, limit)
    return _judge_draws(pool, limits, POOL_CHANCE)


def judge_draws(pool: Sequence[Evidence], limits: Limits) -> Judgement:
    """Judge the draws of several submissions of one worker together, in addition to each
    submission by itself."""
    return _judge_draws(pool, limits, POOL_CHANCE)


def _judge_draws(pool: Sequence[Evidence], limits: Limits, chance: float) -> Judgement:
    """Judge the counts of tokens off by each distance, and the sum of gaps. Each test rejects
    honest work with ``chance`` at most."""
    tokens = sum(evidence.tokens for evidence in pool)
    total = sum(evidence.gap_mean * evidence.tokens for evidence in pool)
    limit = limits.gap_limit(tokens, chance)
    if not total <= limit:
        return _rejected(Reason.DRAW_GAPS, total / tokens, limit / tokens)
    for step, allowed in limits.off_limits(tokens, chance).items():
        count = sum(evidence.off[LADDER.index(step)] for evidence in pool)
        if not count <= allowed:
            return _rejected(Reason.DRAW_MISMATCHES, count, allowed)
    return ACCEPTED


def poisson_limit(mean: float, false_alarm: float) -> int:
    """Return the smallest count that a Poisson variable exceeds with at most the probability
    ``false_alarm`` (up to 0.5)."""
    if mean <= 0:
        return 0
    # Beyond mean + 10 sd + 40 the tail is below 1e-17 whatever the mean.
    low, high = -1, math.ceil(mean + 10 * math.sqrt(mean) + 40)
    while high - low > 1:
        middle = (low + high) // 2
        if _poisson_tail(mean, middle) <= false_alarm:
            high = middle
        else:
            low = middle
    return high


def _poisson_tail(mean: float, count: int) -> float:
    """Return the probability of more than ``count``, summed upwards from the first term."""
    if count < mean - 1:
        return 1.0  # it is above one half here: the median is at least mean - ln 2
    term = math.exp((count + 1) * math.log(mean) - mean - math.lgamma(count + 2))
    tail = 0.0
    number = count + 1
    while term > tail * 1e-12:
        tail += term
        number += 1
        term *= mean / number
    return tail


def _rejected(reason: Reason, statistic: float, limit: float) -> Judgement:
    return Judgement(Verdict.REJECTED, reason, statistic, limit)
