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
    LOGPROBS = "log-probs missing, not finite or above 0"
    # Activations: other weights, precision or prompt.
    MALFORMED_PROOF = "malformed activation proof"
    EXPONENTS = "activation exponents differ"
    MANTISSA_MEAN = "activation mantissas differ on average"
    MANTISSA_MEDIAN = "activation mantissas differ at the median"
    # Sampling: other tokens than the seed gives.
    DRAW_DISTANCE = "a token is far from its seeded draw"
    DRAW_MISMATCHES = "too many tokens differ from their seeded draws"
    # Plausibility.
    IMPROBABLE_END = "ended where an end was improbable"
    SURPRISE = "tokens implausible under the policy"
    LOGPROB_ERROR = "claimed log-probs are not the policy's"


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
    """Largest mean mantissa error over the chunks."""
    mantissa_median: float
    draw_distance: float
    """Largest distance of a uniform to the CDF interval of the token that was claimed for
    it.
    """
    draw_mismatches: int
    """Tokens that the seed does not give."""
    end_probability: float
    """Smallest probability of the end token at a claimed end before the length limit; 1.0
    without one.
    """
    surprise: float
    """z-statistic of the summed surprise of the tokens."""
    logprob_error: float
    """Largest difference between claimed and recomputed log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What honest numerics may do. Calibrated per model, dtype and pair of engines into the run
    file.

    `fp32` and `bf16` are starting points, measured on small models on one CPU: 18,700 honest
    tokens of 192 sequences (the figures beside the fields), engines mixed, prefill against
    decode.
    """

    exponent_mismatches: int
    """Of up to 128 values a chunk. Honest: at most 1 in fp32, 6 in bf16; the TOPLOC paper's 38
    (bf16, 7-8 B models, other GPUs) let everything small pass."""

    mantissa_mean: float
    """Honest: at most 0.01 in fp32, 1.3 in bf16. This does the work: a constant polynomial
    agrees in 121 of 128 exponents."""

    mantissa_median: float
    """Honest: 0 in fp32, where under 1 value in 100 differs at all. The paper allows 8 in
    bf16.
    """

    draw_distance: float
    """Honest: no token differs in fp32; at most 0.013 in bf16. Greedy, best of n and a small
    model's tokens exceed 0.05 in 99 to 100 % of sequences."""

    mismatch_share: float
    """Largest honest share of tokens that the seed does not give. fp32: none of 45,000 tokens,
    which bounds it by 1e-4 with 98 % confidence; bf16: 0.06 to 0.15 %."""

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

    logprob_error: float
    """In nats. Honest: at most 2.6e-5 in fp32, 0.11 in bf16. Trainers recompute log-probs, so a
    lie within it gains nothing."""

    pooled_mantissa_mean: float
    """Mean of `Evidence.mantissa_mean` over a submission: 1.2 times the calibrated honest mean.
    In bf16 it sees weights ten steps old at lr 1e-6, where single groups show nothing."""

    pooled_groups: int = 16
    """Groups below which a mean over them says nothing: honest spread between sequences is 30
    %.
    """

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= MAX_LIMIT:
                raise ValueError(
                    f"{name} must be from 0 to {MAX_LIMIT:g}, not {getattr(self, name)}"
                )
        if not 0 < self.false_alarm <= 0.5:
            raise ValueError("false_alarm is a probability, above 0 and at most one half")

    @classmethod
    def fp32(cls) -> Limits:
        """For runs whose generators and validators compute in float32: any violation is a
        lie.
        """
        return cls(
            exponent_mismatches=2,
            mantissa_mean=0.05,
            mantissa_median=0.0,
            draw_distance=1e-4,
            mismatch_share=1e-4,
            logprob_error=1e-3,
            pooled_mantissa_mean=0.012,
        )

    @classmethod
    def bf16(cls) -> Limits:
        """For runs in bfloat16: single groups are noisy, pools are not."""
        return cls(
            exponent_mismatches=10,
            mantissa_mean=2.0,
            mantissa_median=2.0,
            draw_distance=0.05,
            mismatch_share=1.5e-3,
            logprob_error=0.25,
            pooled_mantissa_mean=1.2,
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


def check_shape(
    tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], shape: Shape
) -> Judgement:
    """Judge the tokens and claimed log-probs of one group's completions by their shape alone.

    A completion ends with an end token, the only one in it, or has exactly ``max_new_tokens``.
    """
    for count in (len(tokens), len(logprobs)):
        if count != shape.group_size:
            return _rejected(Reason.GROUP_SIZE, count, shape.group_size)
    for completion, claimed in zip(tokens, logprobs, strict=True):
        judgement = _check_tokens(completion, shape)
        if judgement.verdict is not Verdict.ACCEPTED:
            return judgement
        if len(claimed) != len(completion):
            return _rejected(Reason.LOGPROBS, len(claimed), len(completion))
        for logprob in claimed:
            if not -math.inf < logprob <= 0:
                return _rejected(Reason.LOGPROBS, logprob, 0)
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
        (Reason.MANTISSA_MEAN, evidence.mantissa_mean, limits.mantissa_mean),
        (Reason.MANTISSA_MEDIAN, evidence.mantissa_median, limits.mantissa_median),
        (Reason.DRAW_DISTANCE, evidence.draw_distance, limits.draw_distance),
        (Reason.DRAW_MISMATCHES, evidence.draw_mismatches, mismatches),
        (Reason.SURPRISE, abs(evidence.surprise), limits.surprise),
        (Reason.LOGPROB_ERROR, evidence.logprob_error, limits.logprob_error),
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
    distribution of honest work; the mantissa error, from ``pooled_groups`` groups on, against
    its honest mean.
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
    if len(pool) >= limits.pooled_groups:
        mean = sum(evidence.mantissa_mean for evidence in pool) / len(pool)
        if not mean <= limits.pooled_mantissa_mean:
            return _rejected(Reason.MANTISSA_MEAN, mean, limits.pooled_mantissa_mean)
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
