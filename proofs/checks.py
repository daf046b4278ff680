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
    """The verifier could not tell (its own fault, or too little evidence): no worker
    is punished.
    """


class Reason(Enum):
    """Reason of a verdict; operators and ledgers see these values."""

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
"""The power by which the limit of a mean falls with the number of chunks
(`Limits.mantissa_limit`): between 1/2, for normal errors, and 1, for a single outlier
(bench/README.md)."""

CHUNK_EXCESS: Final = 3.0
"""The worst chunk of a group may have so many times `Limits.mantissa_mean`. Now and then a
state amplifies noise: of 320,000 honest chunks the worst had 6.4, the next 4.9 and 4.8, while
no group of 16 answers had more than 1.6 in the mean (bench/README.md)."""

MAX_LIMIT: Final = 1e9
"""The largest value of any of `Limits`: beyond it a limit lets everything pass, or is a
mistake."""

LADDER: Final = (1e-5, 0.05, 0.1, 0.2, 0.4)
"""Tokens are counted that are further off than each of these, in nats (rule CDF: in
probability). The first says that a token differs by more than rounding."""

LARGEST: Final = 64
"""Largest offsets of a group that are kept as evidence: a calibration fits its tail to the
largest 256 of some hundred groups."""

FALSE_REJECTIONS: Final = 1e-4
"""Chance that an honest submission is rejected, by all tests of all its groups together. One
in 10,000: a node that works for a month hands in fewer."""

TESTS: Final = 16
"""Upper bound of the tests of a group, a pool or a history. Each of the three gets a third of
`FALSE_REJECTIONS`, in equal parts for each test."""

GROUPS: Final = 256
"""Groups that a submission may have, each of which is tested. A promise for the largest costs
a group of a small one little: limits grow with the logarithm."""

POOL_CHANCE: Final = FALSE_REJECTIONS / 3 / TESTS
"""Chance that a test of a pool or a history rejects honest work: 2e-6."""

GROUP_CHANCE: Final = POOL_CHANCE / GROUPS
"""Chance that a test of a group rejects honest work: 8e-9."""

OVERDISPERSION: Final = 1.5
"""Variance of honest counts and sums over that of independent tokens: equal answers share their
states, so what is far off comes in clumps. 1.1 to 1.5 in groups of 16 (bench/README.md)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Statistics of one group, from the validator's own prefill.

    How far *off* a token is: rule CDF, the distance of its uniform to the interval of the token
    that was claimed; rule Gumbel, the gap of the best score to that of the claimed token.
    """

    tokens: int
    malformed: str
    """Why the proof is not even a proof; empty when it is one."""
    exponent_mismatches: int
    """Largest count over the group's TOPLOC chunks."""
    mantissa_mean: float
    """Mean of the chunks' mean mantissa errors, each scaled to a whole chunk and weighted by
    its independence (`proofs.toploc.independence`)."""
    mantissa_median: float
    """Largest over the chunks, scaled."""
    draw_distance: float
    """Largest distance; 0 under the rule Gumbel."""
    off: tuple[int, ...]
    """Tokens that are further off than each step of `LADDER`."""
    gap_mean: float
    """Mean gap of the tokens; 0 under the rule CDF."""
    gap_max: float
    """The largest gap."""
    end_probability: float
    """Smallest probability of the end token at a claimed end before the length limit; 1.0
    without one.
    """
    surprise: float
    """z-statistic of the summed surprise of the tokens."""
    mantissa_worst: float
    """Largest mean mantissa error of a chunk, scaled."""
    chunks: float
    """Whole chunks that the group's are worth as evidence: what they weigh together. 1.0 if all
    completions are equal and short, and no less."""
    largest: tuple[float, ...] = ()
    """The `LARGEST` that are furthest off, the furthest first. For calibration: no limit is
    held against them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of honest numerical error, calibrated per model, dtype and engines into the run
    file. One set holds for all pairs of engines, since a worker may name any engine.

    `fp32` and `bf16` are starting points, measured on CPUs, decode against prefill
    (bench/README.md). ``shoal calibrate`` measures a run's own.
    """

    exponent_mismatches: int
    """Most exponents that may differ in a chunk, of its ``proof_values``."""

    mantissa_mean: float
    """Largest mean mantissa error of a group that counts as one chunk. This test finds other
    weights: a constant polynomial agrees in 121 of 128 exponents. The limit falls with the
    number of chunks (`mantissa_limit`); the worst chunk may exceed it (`CHUNK_EXCESS`)."""

    mantissa_median: float
    """Largest median mantissa error. In fp32 under 1 value in 100 differs."""

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
    share p of cases, so n tokens fall below it with a chance of n times as much at most."""

    surprise: float = 20.0
    """Most standard deviations of the surprise of drawn tokens. Only gross lies fail it, as a
    policy that is nearly sure has a surprise with a heavy tail."""

    pooled_mantissa_mean: float
    """Largest mean mantissa error over many chunks: 1.2 times the honest mean. Between one and
    many see `mantissa_limit`."""

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
        """Return the bound that the summed gaps of honest tokens exceed with `chance` at most.

        The model is compound Poisson: gaps of exponential size with the mean `gap_mean` a
        token. The square is Chernoff's bound on their sum: ``gap_scale * ln(1 / chance)`` for
        few tokens, ``gap_mean`` a token for many.
        """
        sure = OVERDISPERSION * self.gap_scale * math.log(1 / chance)
        return (math.sqrt(self.gap_mean * tokens) + math.sqrt(sure)) ** 2

    def off_limits(self, tokens: int, chance: float) -> dict[float, int]:
        """Map each step to the count of honest tokens beyond it that is exceeded with `chance`
        at most, by a Poisson model of clumps of `OVERDISPERSION` tokens."""
        clumps = {step: share * tokens / OVERDISPERSION for step, share in self.off}
        return {
            step: math.floor(OVERDISPERSION * poisson_limit(mean, chance))
            for step, mean in clumps.items()
        }

    @classmethod
    def fp32(cls) -> Limits:
        """Limits for runs that compute in float32: any violation is a lie."""
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
        """Limits for runs in bfloat16 with Gumbel draws: single groups are noisy, pools are
        not."""
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
    """A verdict with the number that decided it and the limit it was held against."""

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
    """Completions per group."""
    max_new_tokens: int
    vocabulary: int
    """Tokens are 0 up to, not including, this."""
    end_tokens: frozenset[int]
    """Tokens that end a turn, and a completion of one turn."""
    turns: int = 1
    """Turns of a completion, at most."""


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
    """Hold one group's evidence against the limits; the first violation is the reason."""
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
    """Judge the groups of one submission together; each was or will be judged by itself as
    well.

    What adds up is held against the limits of so many tokens and chunks: how many tokens are
    how far off, the sum of their gaps, the mean mantissa error.
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
    """Judge several submissions of one worker by their draws together; each was judged by
    itself as well."""
    return _judge_draws(pool, limits, POOL_CHANCE)


def _judge_draws(pool: Sequence[Evidence], limits: Limits, chance: float) -> Judgement:
    """Judge the numbers of tokens off by each distance, and the sum of gaps. Each test rejects
    honest work with this chance at most."""
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
    """The smallest count that a Poisson variable exceeds with at most this probability (up to
    0.5).
    """
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
    """The probability of more than ``count``, summed upwards from the first term."""
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
