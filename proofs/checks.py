"""What a validator saw, what is allowed, and the judgement: a verdict, never a bool.

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
    """Why a verdict is what it is; the values are what operators and ledgers see."""

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
    DRAW_MISMATCHES = "too many tokens differ from their seeded draws"
    # Plausibility.
    IMPROBABLE_END = "ended where an end was improbable"
    SURPRISE = "tokens implausible under the policy"


# Were the errors of chunks normal, the largest of their means would fall with the square root
# of their number. They are not: of 144 groups of sums two had errors 1.5 times those of the
# third, and a mean with such an outlier in it falls with their number. This is between both: of
# 20,000 pools of 2 to 32 honest groups none was above the limit, as with the square root, which
# finds int8 weights in one of 4 groups of open questions instead of all, and a step older in 8
# % of pools of 8 groups of sums instead of 93 %.
MEAN_POWER: Final = 0.75
"""How the limit of a mean falls with the number of chunks: `Limits.mantissa_limit`."""

MAX_LIMIT: Final = 1e9
"""The largest value of any of `Limits`: beyond it a limit lets everything pass, or is a
mistake.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Statistics of one group, from the validator's own prefill."""

    tokens: int
    malformed: str
    """Why the proof is not even a proof; empty when it is one."""
    exponent_mismatches: int
    """Largest count over the group's TOPLOC chunks."""
    mantissa_mean: float
    """Mean of the chunks' mean mantissa errors, each scaled as that of a whole chunk and
    weighted by how much of it is evidence of its own (`proofs.toploc.independence`)."""
    mantissa_median: float
    """Largest over the chunks, scaled."""
    draw_distance: float
    """Largest distance of a uniform to the CDF interval of the token that was claimed for it;
    0 under the rule Gumbel."""
    draw_mismatches: int
    """Tokens that the seed does not give; under the rule CDF those whose distance is above
    `Limits.mismatch_distance`."""
    gap_mean: float
    """Mean over the tokens of the best score less that of the claimed token; 0 under the rule
    CDF."""
    gap_max: float
    """The largest of them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What honest numerics may do. Calibrated per model, dtype and the engines of its nodes
    into the run file: one set for all pairs of them, since a worker's engine is its own word.

    `fp32` and `bf16` are starting points, measured on one CPU, decode against prefill: a model
    of 0.8 M parameters and 128 tokens (18,700 honest tokens, engines mixed), and one of 135 M
    and 49,152 tokens (18,300). ``shoal calibrate`` measures a run's own.
    """

    exponent_mismatches: int
    """Of up to `roles.rl.recipe.Recipe.proof_values` values a chunk, measured with 128. Honest:
    at most 1 in fp32, 11 in bf16 (one step older: 15); the TOPLOC paper's 38 (bf16, 7-8 B
    models, other GPUs) let everything small pass."""

    mantissa_mean: float
    """Of one chunk. This does the work: a constant polynomial agrees in 121 of 128 exponents.
    Honest: at most 0.017 in fp32. In bf16 the mean is 1.3 to 1.45, and of 144 groups of sums,
    in which a trained policy gives the same four tokens in all 16 answers and so one chunk in
    all, two had 3.5 to 3.7, the others 2.7 at most; int8 weights have 2.2 to 3.4 there, a real
    step older 1.7 to 5.2, fp8 weights 4.8 to 6.0. So a chunk proves little, and a limit that
    finds those out in one would refuse a tenth of honest groups (3.2 of the unscaled worst
    chunk did). What it takes is more chunks: `mantissa_limit`."""

    mantissa_median: float
    """Honest: 0 in fp32, where under 1 value in 100 differs at all. The paper allows 8 in
    bf16.
    """

    mismatch_distance: float
    """Rule CDF: how far a uniform may be from the interval of its token before the token counts
    as a mismatch. fp32: at a vocabulary of 49,152 honest work has 0.21 % of tokens, of
    probability e^-12 and less, at up to 1.3e-6; counted, they rejected two of four honest
    submissions. Cheats stay far above it: temperature 0.9 has 28 % of tokens at up to 0.12."""

    draw_distance: float
    """Rule CDF. Honest: at most 1.3e-6 in fp32, 0.092 in bf16. Greedy, best of n and a small
    model's tokens exceed 0.05 in 99 to 100 % of sequences."""

    gap_max: float
    """Rule Gumbel: by how much the score of a token may be below the best. Honest: no token
    differs in fp32; in bf16 at most 0.60 of 40,000 tokens (best of 4: 13; int8 weights and
    temperature 0.9, 0.3 to 1.3 a group, are known by other numbers)."""

    mismatch_share: float
    """Largest honest share of tokens that the seed does not give. fp32: none of 45,000 tokens
    (beyond ``mismatch_distance``), which bounds it by 1e-4 with 98 % confidence; bf16 under the
    rule Gumbel: 0.3 to 2.1 %, against int8 weights 4.4 to 4.8 and temperature 0.9 8.8 %."""

    false_alarm: float = 1e-4
    """Chance that honest work with that share exceeds the limit on the number of mismatches."""

    end_probability: float = 1e-6
    """Not INTELLECT-2's 0.1: an honest seeded draw does end with a token of probability p in a
    share p of cases, and the seed already proves the draw. This bounds false alarms to one in a
    million tokens, and stops an end that lies within the draw tolerance and has no
    probability."""

    surprise: float = 20.0
    """In standard deviations, either sign: a cross-check of the seeds that only gross lies
    fail. Not the usual 4: the surprise of a policy that is nearly sure has a heavy tail, and
    honest groups exceed 4. It was 10, and of the 11,000 submissions of nine demos (1,100 to
    1,400 in each) one honest one had 12.2. Where each token errs with a probability of 1e-4, an
    error has 9.2 nats, and each in a group of 128 tokens adds 4 here (their variance of 1.1 and
    `proofs.sampling.SURPRISE_FLOOR`): three of them make 12, and two more, which takes some
    100,000 times as many groups, 20."""

    pooled_mantissa_mean: float
    """Of many chunks: 1.2 times the honest mean. Between one and many see `mantissa_limit`."""

    pooled_gap_mean: float
    """Rule Gumbel: mean gap of very many tokens. Between ``pooled_tokens`` and these see
    `gap_limit`. bf16: honest 0.0005 to 0.0011, int8 weights 0.0068, temperature 0.9 0.022."""

    pooled_groups: int = 2
    """Groups of a submission below which no mean mantissa error over them is compared. Two: the
    limit already knows how many chunks there are, and a single group is judged by itself. It
    was 16 when a mean over any number of groups had one limit."""

    pooled_tokens: int = 1000
    """Tokens below which a mean gap says nothing: 1.4 % of honest tokens have one, of 0.05, and
    those of equal answers come together: one group of sums had six of its 78."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= MAX_LIMIT:
                raise ValueError(
                    f"{name} must be from 0 to {MAX_LIMIT:g}, not {getattr(self, name)}"
                )
        if not 0 < self.false_alarm <= 0.5:
            raise ValueError("false_alarm is a probability, above 0 and at most one half")

    def mantissa_limit(self, chunks: float) -> float:
        """Of the mean error of so many independent chunks: `pooled_mantissa_mean`, and what
        `mantissa_mean` is above it divided by their number to the power `MEAN_POWER`.

        In bf16 (5.0, 1.7): one chunk 5.0; 15 of a group of open questions 2.13 (honest 1.1 to
        1.6, int8 weights 2.2 to 2.8); 6 of four groups of sums 2.6, and 23 of 16 groups 2.0
        (honest 1.2 to 1.8; a step older 2.45 and 2.76, int8 2.85); 240 of 16 groups of open
        questions 1.75 (1.31; int8 2.5).
        """
        share = 1.0 if chunks <= 1 else chunks**-MEAN_POWER
        above = self.mantissa_mean - self.pooled_mantissa_mean
        return self.pooled_mantissa_mean + above * share

    def gap_limit(self, tokens: int) -> float:
        """Of the mean gap of so many tokens: `gap_max` below ``pooled_tokens``, twice
        `pooled_gap_mean` there, and less as the error of a mean falls.

        In bf16 (0.002) 0.004 for 1,000 tokens, 0.0027 for 8,000. Of 2,000 pools of honest
        groups with so many the largest means were 0.0036 (sums), 0.0027 and 0.0015 (open
        questions); the 0.002 that it was for any number refused one in thirty of the first.
        """
        if not tokens >= self.pooled_tokens:
            return self.gap_max
        return self.pooled_gap_mean * (1 + math.sqrt(self.pooled_tokens / max(tokens, 1)))

    @classmethod
    def fp32(cls) -> Limits:
        """For runs whose generators and validators compute in float32: any violation is a
        lie.
        """
        return cls(
            exponent_mismatches=2,
            mantissa_mean=0.05,
            mantissa_median=0.0,
            mismatch_distance=1e-5,
            draw_distance=1e-4,
            gap_max=1e-3,
            mismatch_share=1e-4,
            pooled_mantissa_mean=0.012,
            pooled_gap_mean=1e-5,
        )

    @classmethod
    def bf16(cls) -> Limits:
        """For runs in bfloat16 with Gumbel draws: single groups are noisy, pools are not."""
        return cls(
            exponent_mismatches=14,
            mantissa_mean=5.0,
            mantissa_median=4.0,
            mismatch_distance=0.05,
            draw_distance=0.15,
            gap_max=0.9,
            mismatch_share=0.025,
            pooled_mantissa_mean=1.7,
            pooled_gap_mean=0.002,
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
    """What a group must look like before a validator runs a model for it."""

    group_size: int
    """Completions per group."""
    max_new_tokens: int
    vocabulary: int
    """Tokens are 0 up to, not including, this."""
    end_tokens: frozenset[int]
    """Any of them ends a completion."""


def check_shape(tokens: Sequence[Sequence[int]], shape: Shape) -> Judgement:
    """Judge the tokens of one group's completions by their shape alone.

    A completion ends with an end token, the only one in it, or has exactly ``max_new_tokens``.
    """
    if len(tokens) != shape.group_size:
        return _rejected(Reason.GROUP_SIZE, len(tokens), shape.group_size)
    for completion in tokens:
        judgement = _check_tokens(completion, shape)
        if judgement.verdict is not Verdict.ACCEPTED:
            return judgement
    return ACCEPTED


def _check_tokens(completion: Sequence[int], shape: Shape) -> Judgement:
    length = len(completion)
    if not 1 <= length <= shape.max_new_tokens:
        return _rejected(Reason.LENGTH, length, shape.max_new_tokens)
    for position, token in enumerate(completion, start=1):
        if not 0 <= token < shape.vocabulary:
            return _rejected(Reason.TOKEN, token, shape.vocabulary)
        if token in shape.end_tokens and position < length:
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
    mismatches = poisson_limit(limits.mismatch_share * evidence.tokens, limits.false_alarm)
    upper: tuple[tuple[Reason, float, float], ...] = (
        (Reason.EXPONENTS, evidence.exponent_mismatches, limits.exponent_mismatches),
        (
            Reason.MANTISSA_MEAN,
            evidence.mantissa_mean,
            limits.mantissa_limit(evidence.chunks),
        ),
        (Reason.MANTISSA_CHUNK, evidence.mantissa_worst, limits.mantissa_limit(1.0)),
        (Reason.MANTISSA_MEDIAN, evidence.mantissa_median, limits.mantissa_median),
        (Reason.DRAW_DISTANCE, evidence.draw_distance, limits.draw_distance),
        (Reason.DRAW_GAP, evidence.gap_max, limits.gap_max),
        (Reason.DRAW_GAPS, evidence.gap_mean, limits.gap_limit(evidence.tokens)),
        (Reason.DRAW_MISMATCHES, evidence.draw_mismatches, mismatches),
        (Reason.SURPRISE, abs(evidence.surprise), limits.surprise),
    )
    for reason, statistic, limit in upper:
        if not statistic <= limit:
            return _rejected(reason, statistic, limit)
    if not evidence.end_probability >= limits.end_probability:
        return _rejected(
            Reason.IMPROBABLE_END, evidence.end_probability, limits.end_probability
        )
    return ACCEPTED


def judge_pool(pool: Sequence[Evidence], limits: Limits) -> Judgement:
    """Judge the groups of one submission together; each was or will be judged by itself as
    well.

    The number of tokens that differ from their seeded draws is held against the Poisson
    distribution of honest work; the mean gap, from ``pooled_tokens`` tokens on, and the mean
    mantissa error, from ``pooled_groups`` groups on, against the limits of so many tokens and
    chunks.
    """
    malformed = sum(bool(evidence.malformed) for evidence in pool)
    if malformed:
        return _rejected(Reason.MALFORMED_PROOF, malformed, 0)
    tokens = sum(evidence.tokens for evidence in pool)
    if tokens <= 0:
        return Judgement(Verdict.INCONCLUSIVE, Reason.NO_TOKENS)
    mismatches = sum(evidence.draw_mismatches for evidence in pool)
    allowed = poisson_limit(limits.mismatch_share * tokens, limits.false_alarm)
    if not mismatches <= allowed:
        return _rejected(Reason.DRAW_MISMATCHES, mismatches, allowed)
    if tokens >= limits.pooled_tokens:
        gap = sum(evidence.gap_mean * evidence.tokens for evidence in pool) / tokens
        limit = limits.gap_limit(tokens)
        if not gap <= limit:
            return _rejected(Reason.DRAW_GAPS, gap, limit)
    if len(pool) >= limits.pooled_groups:
        chunks = sum(evidence.chunks for evidence in pool)
        total = sum(evidence.mantissa_mean * evidence.chunks for evidence in pool)
        limit = limits.mantissa_limit(chunks)
        if not total <= limit * chunks:
            return _rejected(Reason.MANTISSA_MEAN, total / chunks if chunks else total, limit)
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
