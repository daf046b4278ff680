"""Limits from what honest work was measured to be, and how often they are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, pstdev
from typing import Final

from proofs.checks import MEAN_POWER, Evidence, Limits, Verdict, judge, judge_pool
from proofs.sampling import DrawRule

MARGIN: Final = 1.5
"""By how much a limit exceeds the largest honest value: what was seen of some hundred groups is
not the largest there is. Between 1.5 and the next cheat there is a factor of 1,000 in float32;
in bfloat16 weights one step old begin at 1.2 to 1.5 times the honest maximum, and means over
many chunks tell those apart. Of a mean's largest deviation from the honest mean the same."""
POOL_MARGIN: Final = 6.0
"""Standard deviations of a mean gap over a pool that its limit is above the honest mean: one in
a thousand million, if it were normal."""
MEAN_MARGIN: Final = 1.2
"""By how much the mean mantissa error of very many chunks, and the mean gap of tokens, may
exceed those measured: other questions, and another engine, had 0.95 to 1.1 times the error
(`proofs.checks.Limits`)."""
POOL: Final = 16
"""Groups of the pools whose share of rejections is reported: a submission's, as it should be in
bfloat16."""
CONFIDENCE: Final = 0.95
"""Of all bounds that are reported."""
SHARE_CONFIDENCE: Final = 0.98
"""That the honest share of mismatches is below the limit's."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of some were rejected."""

    rejected: int
    of: int

    @property
    def share(self) -> float:
        """0 of none."""
        return self.rejected / self.of if self.of else 0.0

    @property
    def bound(self) -> float:
        """The highest true share that is still plausible, with `CONFIDENCE`."""
        return binomial_bound(self.rejected, self.of)

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} %" if self.of else "-"


def fit(honest: Sequence[Evidence], rule: DrawRule) -> Limits:
    """Limits that all of this honest evidence, and most that was not seen, is within.

    No limit is below that of the preset for float32, whose values are rounding errors.
    """
    floor = Limits.fp32()
    tokens = sum(one.tokens for one in honest)

    def above(value: Callable[[Evidence], float]) -> float:
        return MARGIN * max(map(value, honest))

    mean, deviation = _mantissas(honest)
    pooled_mean = max(floor.pooled_mantissa_mean, MEAN_MARGIN * mean)
    gap, gap_spread = _moments([one.gap_mean for one in honest])
    distance = above(lambda one: one.draw_distance)
    counted = sum(one.draw_mismatches for one in honest) if rule is DrawRule.GUMBEL else 0
    pooled_tokens = floor.pooled_tokens
    # of a pool of so many tokens, where a group has so many
    gap_error = gap_spread * math.sqrt(tokens / len(honest) / pooled_tokens)
    return Limits(
        exponent_mismatches=max(
            floor.exponent_mismatches, math.ceil(above(lambda one: one.exponent_mismatches))
        ),
        mantissa_mean=max(floor.mantissa_mean, pooled_mean + MARGIN * deviation),
        mantissa_median=float(math.ceil(above(lambda one: one.mantissa_median))),
        mismatch_distance=max(floor.mismatch_distance, distance),
        draw_distance=max(floor.draw_distance, distance),
        gap_max=max(floor.gap_max, above(lambda one: one.gap_max)),
        mismatch_share=max(floor.mismatch_share, poisson_bound(counted) / tokens),
        surprise=max(floor.surprise, above(lambda one: abs(one.surprise))),
        pooled_mantissa_mean=pooled_mean,
        # at `pooled_tokens` the limit is twice this
        pooled_gap_mean=max(
            floor.pooled_gap_mean, MEAN_MARGIN * gap, (gap + POOL_MARGIN * gap_error) / 2
        ),
        pooled_tokens=pooled_tokens,
    )


def loosest(found: Sequence[Limits]) -> Limits:
    """What is within any of these is within it: the limits of a run whose nodes compute with
    several engines.

    There are no limits by pair of engines, since a worker's engine is what it says it is: a
    cheat would claim the one whose limits are widest. So those must find cheats out anyway, and
    narrower ones for others would only refuse more honest work (figures: docs/design.md).
    """
    return Limits(
        **{
            field.name: (min if field.name in _LOW_IS_LOOSE else max)(
                getattr(one, field.name) for one in found
            )
            for field in fields(Limits)
        }
    )


_LOW_IS_LOOSE: Final = frozenset({"end_probability", "false_alarm"})


def _mantissas(honest: Sequence[Evidence]) -> tuple[float, float]:
    """Mean error of all chunks; the largest deviation from it, that of a group's mean as if it
    were of one chunk (`proofs.checks.Limits.mantissa_limit`)."""
    chunks = sum(one.chunks for one in honest)
    mean = sum(one.mantissa_mean * one.chunks for one in honest) / chunks
    return mean, max(
        max(one.mantissa_worst - mean, (one.mantissa_mean - mean) * one.chunks**MEAN_POWER)
        for one in honest
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), pstdev(values)


def rejected_groups(evidence: Sequence[Evidence], limits: Limits) -> Rate:
    """Groups that are rejected by themselves."""
    verdicts = [judge(one, limits).verdict for one in evidence]
    return Rate(verdicts.count(Verdict.REJECTED), len(verdicts))


def rejected_pools(evidence: Sequence[Evidence], limits: Limits) -> Rate:
    """Submissions of `POOL` groups that are rejected, for a group or as a whole."""
    pools = [evidence[at : at + POOL] for at in range(0, len(evidence) - POOL + 1, POOL)]
    rejected = [
        rejected_groups(pool, limits).rejected > 0
        or judge_pool(pool, limits).verdict is Verdict.REJECTED
        for pool in pools
    ]
    return Rate(sum(rejected), len(pools))


def binomial_bound(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """The share at which ``count`` or fewer of ``of`` would be as rare as 1 - ``confidence``
    (Clopper and Pearson): 3 / ``of`` where none was seen. 1 where nothing was looked at."""
    if count >= of:
        return 1.0

    def at_most(share: float) -> float:
        terms = (
            math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(count + 1)
        )
        return math.fsum(terms)

    return _root(at_most, 1 - confidence, 0.0, 1.0)


def poisson_bound(count: int, confidence: float = SHARE_CONFIDENCE) -> float:
    """The mean at which ``count`` or fewer would be as rare as 1 - ``confidence``: 3.9 where
    none was seen."""

    def at_most(mean: float) -> float:
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
        return math.fsum(map(math.exp, logs))

    return _root(at_most, 1 - confidence, 1e-9, 2.0 * count + 50.0)


def _root(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where ``falling`` comes down to ``level``."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return high


def to_toml(limits: Limits) -> str:
    """A ``[limits]`` table for a draft."""
    lines = ["[limits]"]
    for field in fields(limits):
        value = getattr(limits, field.name)
        lines.append(f"{field.name} = {value if isinstance(value, int) else _rounded(value)}")
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    """Three digits, upwards: a limit says no more."""
    if value == 0:
        return "0.0"
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return repr(float(f"{math.ceil(value * scale - 1e-9) / scale:.6g}"))
