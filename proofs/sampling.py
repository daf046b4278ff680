"""Seeded draws: the seed decides which token comes next, and a validator draws it again.

Theory of operation
-------------------
The seed of a completion is a digest of (run, policy, node, step, slot), all of which are fixed
before the worker sees a token. It gives one uniform u_t per token position. The token is the
first one, in vocabulary order, whose cumulative probability exceeds u_t: an inverse CDF in
float64. A verifier with the same weights replays every draw from one prefill. Where its
probabilities are a little different from the worker's, u_t lies a little outside the interval
of the claimed token; how far is the `Replay.distance`, which honest numerics keep below 1e-4 in
float32 and 0.02 in bfloat16, and which resampling, greedy decoding or another model's tokens do
not.

Temperature is the only knob. Cut-offs such as top-p put a cliff into the distribution on which
honest numerics disagree. Greedy decoding (temperature 0) uses no uniforms.

docs/protocols/sampling.md has the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from math import inf, sqrt
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.floating]
"""One row of scores per token position: (rows, vocabulary)."""

SEED_BYTES: Final = 32
"""SHA-256."""

DRAW_DOMAIN: Final = b"/shoal/draw/1.0.0"
TASK_DOMAIN: Final = b"/shoal/task/1.0.0"
UNIFORM_DOMAIN: Final = b"/shoal/uniform/1.0.0"

UNIFORMS_PER_DIGEST: Final = 4
"""64 bits each; of these the upper 53 become the uniform, the most that a float64 below 1
holds.
"""

SURPRISE_FLOOR: Final = 4.0
"""Added to the variance of the summed surprise, in nats squared. A policy that is sure of
nearly every token has next to no variance, and one unlikely token would condemn an honest
worker. With the floor a standard deviation is 2 nats at least, so a z of 20, the limit
(`proofs.checks.Limits.surprise`), needs a token of probability e^-40."""


class DrawRule(Enum):
    """How a seed decides which token comes next; a run names one."""

    CDF = "cdf"
    """The inverse CDF of the distribution, at one uniform."""
    GUMBEL = "gumbel"
    """The largest of all scores, each with noise of its own."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a verifier sees when it draws again; one element per claimed token."""

    distance: NDArray[np.float64]
    """From the uniform to the CDF interval of the claimed token, in [0, 1]; 0 for an honest
    draw from equal logits. Greedy: how much less probable the token is than the most probable
    one. Infinite for a token outside the vocabulary and for logits that are not numbers."""
    mismatch: NDArray[np.bool_]
    """The draw gives another token."""
    logprob: NDArray[np.float64]
    """Of the claimed token, at the temperature (greedy: at 1)."""


def draw_seed(run: bytes, policy: bytes, node: bytes, step: int, slot: int) -> bytes:
    """The seed of one completion: the run's and the policy's digest, the peer, numbers without
    gaps.
    """
    return _seed(DRAW_DOMAIN, run, policy, node, step, slot)


def task_seed(run: bytes, policy: bytes, node: bytes, step: int, group: int) -> bytes:
    """The seed from which the environment derives the task of one group."""
    return _seed(TASK_DOMAIN, run, policy, node, step, group)


def _seed(
    domain: bytes, run: bytes, policy: bytes, node: bytes, step: int, number: int
) -> bytes:
    if not (0 <= step < 1 << 64 and 0 <= number < 1 << 64):
        raise ValueError(f"step {step} and number {number} must fit 64 bits")
    fields = (domain, run, policy, node, step.to_bytes(8, "big"), number.to_bytes(8, "big"))
    return sha256(b"".join(len(field).to_bytes(4, "big") + field for field in fields)).digest()


def uniforms(seeds: Sequence[bytes], start: int, count: int) -> NDArray[np.float64]:
    """u_t for t in [start, start + count), each in [0, 1): (seeds, count).

    A function of seed and t alone: asking for all positions up front (0.08 us each) and asking
    for one per step (0.5 us each) give the same numbers. Raises `ValueError` for a seed of
    another size.
    """
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed is {SEED_BYTES} bytes")
    if start < 0 or count < 0:
        raise ValueError("positions are not negative")
    first = start // UNIFORMS_PER_DIGEST
    last = -(-(start + count) // UNIFORMS_PER_DIGEST)
    counters = [number.to_bytes(8, "big") for number in range(first, last)]
    prefixes = [UNIFORM_DOMAIN + seed for seed in seeds]
    digests = b"".join(
        [sha256(prefix + counter).digest() for prefix in prefixes for counter in counters]
    )
    words = np.frombuffer(digests, dtype=">u8").reshape(
        len(seeds), UNIFORMS_PER_DIGEST * len(counters)
    )
    skip = start - UNIFORMS_PER_DIGEST * first
    return np.ldexp((words[:, skip : skip + count] >> 11).astype(np.float64), -53)


def choose(logits: Logits, u: NDArray[np.float64], temperature: float) -> NDArray[np.intp]:
    """The token of each row: (rows, vocabulary) and (rows,) to (rows,).

    Temperature 0 is the most probable token, the first of equals. A logit of minus infinity is
    a token that cannot be drawn. Raises `ValueError` when a row has no distribution (NaN, plus
    infinity).
    """
    weights = _weights(logits, temperature)
    if not np.isfinite(weights).all():
        raise ValueError("the logits hold NaN or plus infinity")
    return _draw(weights, u, temperature)[0]


def logprobs(
    logits: Logits, tokens: NDArray[np.integer], temperature: float
) -> NDArray[np.float64]:
    """Log-probabilities of the tokens (rows,) at the temperature; at 1 if that is 0. Never
    above 0.

    A sampler reports these with its tokens. Tokens must be in the vocabulary.
    """
    scaled = _scaled(logits, temperature)
    normaliser: NDArray[np.float64] = np.log(np.exp(scaled).sum(axis=1))
    return _take(scaled, tokens) - normaliser


def replay(
    logits: Logits, tokens: Sequence[int], u: NDArray[np.float64], temperature: float
) -> Replay:
    """Draw again and compare with the claimed tokens, of which nothing is assumed. Never raises
    for them.
    """
    count, vocabulary = logits.shape
    known = np.array([0 <= token < vocabulary for token in tokens], dtype=np.bool_)
    # Numbers of any size are foreign here: what is no index must not reach an array of
    # integers.
    claimed = np.array(
        [t if ok else 0 for t, ok in zip(tokens, known, strict=True)], dtype=np.intp
    )
    if len(claimed) != count or u.shape != (count,):
        raise ValueError(f"{count} rows of logits, {len(claimed)} tokens, uniforms {u.shape}")
    weights = _weights(logits, temperature)
    drawn, cumulative = _draw(weights, u, temperature)
    total = cumulative[:, -1]
    weight = _take(weights, claimed)
    if temperature == 0:
        distance = (weights.max(axis=1) - weight) / total
    else:
        upper = _take(cumulative, claimed)
        lower = np.where(claimed == 0, 0.0, _take(cumulative, np.maximum(claimed - 1, 0)))
        target = u * total
        distance = np.maximum(np.maximum(lower - target, target - upper), 0.0) / total
    sound = known & np.isfinite(total)
    return Replay(
        distance=np.where(sound, distance, inf),
        mismatch=~sound | (drawn != claimed),
        logprob=np.where(sound, logprobs(logits, claimed, temperature), -inf),
    )


def surprise(logits: Logits, tokens: NDArray[np.integer], temperature: float) -> float:
    """z-statistic of the summed surprise of the tokens: their -log p against the entropy of
    each row.

    Near 0 for honest draws, large for tokens that another model wrote, negative for tokens
    picked for being likely. Greedy decoding has no surprise: 0. The variance carries
    `SURPRISE_FLOOR`. Tokens must be in the vocabulary.
    """
    if temperature == 0:
        return 0.0
    scaled = _scaled(logits, temperature)
    weights = np.exp(scaled)
    total = weights.sum(axis=1, keepdims=True)
    probabilities = weights / total
    surprisals = np.where(weights > 0, np.log(total) - scaled, 0.0)
    entropy = (probabilities * surprisals).sum(axis=1)
    variance = (probabilities * surprisals**2).sum(axis=1) - entropy**2
    claimed = (np.log(total) - scaled)[np.arange(len(tokens)), tokens]
    return float((claimed - entropy).sum() / sqrt(variance.sum() + SURPRISE_FLOOR))


def _scaled(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """Logits over temperature in float64, the largest of each row at 0."""
    if not 0 <= temperature < inf:
        raise ValueError(f"a temperature is finite and not negative, not {temperature}")
    wide = logits.astype(np.float64)
    if temperature not in (0, 1):
        wide /= temperature
    # infinity minus infinity is the NaN that callers look for
    with np.errstate(invalid="ignore"):
        wide -= wide.max(axis=1, keepdims=True)
    return wide


def _weights(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """Probabilities but for a factor: exp of the scaled logits."""
    scaled = _scaled(logits, temperature)
    return np.exp(scaled, out=scaled)


def _draw(
    weights: NDArray[np.float64], u: NDArray[np.float64], temperature: float
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The drawn tokens and the cumulative weights. u below 1 keeps u * total below total."""
    cumulative = np.cumsum(weights, axis=1)
    if temperature == 0:
        return weights.argmax(axis=1), cumulative
    target = u * cumulative[:, -1]
    return (cumulative > target[:, None]).argmax(axis=1), cumulative


def _take(rows: NDArray[np.float64], columns: NDArray[np.integer]) -> NDArray[np.float64]:
    """One element of each row."""
    values: NDArray[np.float64] = rows[np.arange(len(rows)), columns]
    return values
