"""Limits fitted to measured honest work, and their rate of false alarms.

Theory of operation
-------------------
A limit is for what one submission in 10,000 shows (`proofs.checks.FALSE_REJECTIONS`, shared out
over all tests), and no calibration draws so many. So limits are not the largest that was seen,
with a margin: the largest values are fitted, and the fit is read off at the chance that is
promised. The largest honest gaps fall exponentially; where they spread more than that, they are
fitted by a generalised Pareto distribution. What is one number a group is taken to fall
exponentially. Shares and scales are upper confidence bounds, for they come from samples.

What was fitted says nothing about how often it is wrong: that is counted on other work, in
submissions that are drawn from it again and again (`resampled`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from random import Random
from statistics import fmean, pvariance
from typing import Final

from p2p.errors import ConfigError
from proofs.checks import (
    CHUNK_EXCESS,
    LADDER,
    MEAN_POWER,
    OVERDISPERSION,
    POOL_CHANCE,
    Evidence,
    Limits,
    Verdict,
    judge,
    judge_pool,
)
from proofs.sampling import DrawRule
from roles.contract.core.file import Calibration

TAIL: Final = 128
"""Least number of largest values that a tail is fitted to: they give its scale within 9 %."""
RAREST: Final = 1 / 256
"""Share of all tokens that the tail holds, if that is more than `TAIL`. More frequent values
belong to the body of the distribution, which falls faster. In bfloat16 honest gaps are
exponential from 0.1 on, and 1 token in 260 has a larger gap."""
MIN_TOKENS: Final = round(TAIL / RAREST)
"""32,768 honest tokens to fit to, or no limit of a noisy dtype is written. The hard bound is
then extrapolated by a factor of a million, and its scale's error is in it."""
MIN_GROUPS: Final = 256
"""Honest groups, for what is one number a group: the largest 32 of them are its tail."""
GROUP_TAIL: Final = 8
"""One group in this many is in the tail that is fitted."""
MEAN_MARGIN: Final = 1.2
"""Factor by which the mean mantissa error of very many chunks, and the mean gap of tokens, may
exceed the measured ones: other questions, and another engine, had 0.95 to 1.1 times the error.
"""
POOL: Final = 16
"""Groups of the pools whose share of rejections is reported of cheats: two submissions of
eight, or one as it should be in bfloat16."""
RESAMPLED: Final = 2000
"""Honest submissions that are drawn from the groups that were held out."""
CONFIDENCE: Final = 0.95
"""Confidence of all reported bounds, and of scales."""
CONFIDENT: Final = 1.645
"""Standard deviations above the mean of a normal distribution, with `CONFIDENCE`."""
SHARE_CONFIDENCE: Final = 0.98
"""Confidence that the honest share of tokens that are so far off is below the limit's."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Counts of rejected and of all items."""

    rejected: int
    of: int

    @property
    def share(self) -> float:
        """Share that was rejected; 0 if there are no items."""
        return self.rejected / self.of if self.of else 0.0

    @property
    def bound(self) -> float:
        """Highest true share that is still plausible, with `CONFIDENCE`."""
        return binomial_bound(self.rejected, self.of)

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} %" if self.of else "-"


def check_enough(honest: Sequence[Evidence]) -> None:
    """Check that there is enough honest work to fit limits to.

    Where nothing is off by more than rounding there is no tail to fit: the limits are those of
    float32, and any number of tokens will do.

    Raises:
        ConfigError: There is too little.
    """
    tokens = sum(one.tokens for one in honest)
    if not any(one.off[0] for one in honest):
        return
    if tokens < MIN_TOKENS or len(honest) < MIN_GROUPS:
        raise ConfigError(
            f"{tokens:,} honest tokens in {len(honest)} groups are too few to fit limits to: a"
            f" hard bound that refuses one submission in {1 / POOL_CHANCE:,.0f} is extrapolated"
            f" from the {TAIL} largest gaps of {MIN_TOKENS:,} tokens at least, in {MIN_GROUPS}"
            " groups, and half of all honest work is held out: take"
            f" {_factor(tokens, len(honest)):.1f} times as many --sequences"
        )


def _factor(tokens: int, groups: int) -> float:
    return math.ceil(11 * max(MIN_TOKENS / tokens, MIN_GROUPS / groups)) / 10


def fit(honest: Sequence[Evidence], rule: DrawRule, groups: int) -> Limits:
    """Limits that refuse one honest submission of ``groups`` groups in 10,000.

    No limit is below that of the preset for float32, whose values are rounding errors.
    """
    floor = Limits.fp32()
    tokens = sum(one.tokens for one in honest)

    def of_group(value: Callable[[Evidence], float]) -> float:
        of = len(honest)
        return extrapolate(
            map(value, honest), of, POOL_CHANCE / groups, max(2, of // GROUP_TAIL)
        )

    chunks = sum(one.chunks for one in honest)
    mantissa = sum(one.mantissa_mean * one.chunks for one in honest) / chunks
    pooled = max(floor.pooled_mantissa_mean, MEAN_MARGIN * mantissa)
    above = of_group(
        lambda one: max(
            one.mantissa_worst / CHUNK_EXCESS - pooled,
            (one.mantissa_mean - pooled) * one.chunks**MEAN_POWER,
        )
    )
    chance = POOL_CHANCE / (groups * tokens / len(honest))
    furthest = [off for one in honest for off in one.largest]
    tail = max(TAIL, round(RAREST * tokens))
    hard = extrapolate(furthest, tokens, chance, tail)
    distance, gap = (hard, 0.0) if rule is DrawRule.CDF else (0.0, hard)
    mean = sum(one.gap_mean * one.tokens for one in honest) / tokens
    return Limits(
        exponent_mismatches=max(
            floor.exponent_mismatches, math.ceil(of_group(lambda one: one.exponent_mismatches))
        ),
        mantissa_mean=max(floor.mantissa_mean, pooled + above),
        mantissa_median=float(math.ceil(of_group(lambda one: one.mantissa_median))),
        draw_distance=max(floor.draw_distance, distance),
        gap_max=max(floor.gap_max, gap),
        off=_shares(honest, tokens),
        gap_mean=max(floor.gap_mean, MEAN_MARGIN * mean),
        gap_scale=max(floor.gap_scale, tail_scale(furthest, tail)),
        surprise=max(floor.surprise, of_group(lambda one: abs(one.surprise))),
        pooled_mantissa_mean=pooled,
    )


def _shares(honest: Sequence[Evidence], tokens: int) -> tuple[tuple[float, float], ...]:
    """Return upper bounds on the shares of tokens beyond each step of the ladder; for exact
    numerics those of float32."""
    counts = [sum(one.off[step] for one in honest) for step in range(len(LADDER))]
    if not any(counts):
        return Limits.fp32().off
    clumps = (OVERDISPERSION * poisson_bound(round(n / OVERDISPERSION)) for n in counts)
    return tuple(
        (step, min(1.0, many / tokens)) for step, many in zip(LADDER, clumps, strict=True)
    )


def extrapolate(values: Iterable[float], of: int, chance: float, tail: int) -> float:
    """Return the value that is exceeded with probability ``chance``.

    It follows from the ``tail`` largest of ``values``, which are part of ``of`` values.
    """
    threshold, excesses = _tail(values, tail)
    mean = _upper_mean(excesses)
    beyond = len(excesses) / (of * chance)
    if not mean or beyond <= 1:
        return threshold
    shape, spread = 0.0, pvariance(excesses)
    if spread and len(excesses) >= TAIL:  # fewer say too little about their spread
        shape = (1 - fmean(excesses) ** 2 / spread) / 2
    if shape * math.log(beyond) < 1e-6:
        return threshold + mean * math.log(beyond)
    return threshold + mean * (1.0 - shape) / shape * math.expm1(shape * math.log(beyond))


def tail_scale(values: Iterable[float], tail: int) -> float:
    """Return the scale of an exponential tail: the mean distance of the largest values from the
    least of them; 0 without values.
    """
    return _upper_mean(_tail(values, tail)[1])


def _tail(values: Iterable[float], tail: int) -> tuple[float, list[float]]:
    largest = sorted(values, reverse=True)[: tail + 1]
    if not largest:
        return 0.0, []
    *above, threshold = largest
    return threshold, [value - threshold for value in above]


def _upper_mean(excesses: Sequence[float]) -> float:
    """Return an upper confidence bound of the mean of exponential values."""
    if not excesses:
        return 0.0
    return fmean(excesses) * (1 + CONFIDENT / math.sqrt(len(excesses)))


def loosest(found: Sequence[Limits]) -> Limits:
    """Return limits that accept everything that any of ``found`` accepts.

    They are for a run whose nodes compute with several engines.

    There are no limits by pair of engines, since a worker's engine is what it says it is: a
    cheat would claim the one whose limits are widest. So those must find cheats out anyway, and
    narrower ones for others would only refuse more honest work (figures: docs/design.md).
    """
    steps = [dict(one.off) for one in found]
    # A step that one of them does not hold against anything is held against nothing.
    shared = sorted(set.intersection(*map(set, steps)))
    widest = {
        field.name: (min if field.name in _LOW_IS_LOOSE else max)(
            getattr(one, field.name) for one in found
        )
        for field in fields(Limits)
        if field.name != "off"
    }
    off = tuple((step, max(one[step] for one in steps)) for step in shared)
    return Limits(**widest, off=off)


_LOW_IS_LOOSE: Final = frozenset({"end_probability"})


def sum_rates(rates: Sequence[Rate]) -> Rate:
    """Return the rate of all items together."""
    return Rate(sum(one.rejected for one in rates), sum(one.of for one in rates))


def rejected_groups(evidence: Sequence[Evidence], limits: Limits) -> Rate:
    """Return the rate of groups that are rejected by themselves."""
    verdicts = [judge(one, limits).verdict for one in evidence]
    return Rate(verdicts.count(Verdict.REJECTED), len(verdicts))


def rejected_pools(evidence: Sequence[Evidence], limits: Limits, size: int = POOL) -> Rate:
    """Return the rate of submissions of ``size`` groups that are rejected, for a group or as a
    whole.
    """
    starts = range(0, len(evidence) - size + 1, size)
    return _rejected([evidence[at : at + size] for at in starts], limits)


def resampled(
    evidence: Sequence[Evidence], limits: Limits, size: int, count: int = RESAMPLED
) -> Rate:
    """Return the rejected rate of ``count`` submissions of ``size`` different groups, drawn
    from these.
    """
    rng = Random(0)
    pools = [rng.sample(evidence, min(size, len(evidence))) for _ in range(count)]
    return _rejected(pools, limits)


def _rejected(pools: Sequence[Sequence[Evidence]], limits: Limits) -> Rate:
    alone = {
        id(one): judge(one, limits).verdict is Verdict.REJECTED
        for pool in pools
        for one in pool
    }
    rejected = [
        any(alone[id(one)] for one in pool)
        or judge_pool(pool, limits).verdict is Verdict.REJECTED
        for pool in pools
    ]
    return Rate(sum(rejected), len(pools))


def binomial_bound(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """Return the share at which ``count`` or fewer of ``of`` would be as rare as 1 -
    ``confidence``.

    This is Clopper and Pearson's bound: 3 / ``of`` if none was seen, and 1 if ``of`` is 0.
    """
    if count >= of:
        return 1.0

    def at_most(share: float) -> float:
        sure, not_sure = math.log(share), math.log1p(-share)
        logs = (
            math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
            + k * sure + (of - k) * not_sure
            for k in range(count + 1)
        )  # fmt: skip
        return math.fsum(map(math.exp, logs))

    return _root(at_most, 1 - confidence, 0.0, 1.0)


def poisson_bound(count: int, confidence: float = SHARE_CONFIDENCE) -> float:
    """Return the mean at which ``count`` or fewer would be as rare as 1 - ``confidence``.

    It is 3.9 if none was seen.
    """

    def at_most(mean: float) -> float:
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
        return math.fsum(map(math.exp, logs))

    return _root(at_most, 1 - confidence, 1e-9, 2.0 * count + 50.0)


def _root(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return the place at which the function ``falling`` comes down to ``level``."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return high


def to_toml(limits: Limits) -> str:
    """Return a ``[limits]`` table for a draft."""
    lines = ["[limits]"]
    for field in fields(limits):
        value = getattr(limits, field.name)
        if field.name == "off":
            pairs = ", ".join(f"[{step!r}, {_rounded(share)}]" for step, share in value)
            lines.append(f"off = [{pairs}]")
        else:
            text = value if isinstance(value, int) else _rounded(value)
            lines.append(f"{field.name} = {text}")
    return "\n".join(lines) + "\n"


def record_to_toml(record: Calibration) -> str:
    """Return a ``[calibration]`` table for a draft."""
    lines = ["[calibration]"]
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Mapping):
            pairs = ", ".join(f"{json.dumps(key)} = {one!r}" for key, one in value.items())
            lines.append(f"{field.name} = {{ {pairs} }}")
            continue
        if isinstance(value, bytes):
            value = value.hex()
        if isinstance(value, Enum):
            value = value.value
        lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    """Return the number rounded up to three digits, as limits are written."""
    if value == 0:
        return "0.0"
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return repr(float(f"{math.ceil(value * scale - 1e-9) / scale:.6g}"))
