"""Seeds, and the random numbers that follow from them. A worker cannot choose any of them.

Theory of operation
-------------------
The seed of a completion is a digest of (run, policy, node, step, slot), all of which are fixed
before the worker sees a token. It gives one word of 64 bits per token position. A run names the
rule by which a word and a row of logits make a token (`DrawRule`):

- CDF: the word is one uniform, and the token the first one, in vocabulary order, whose
  cumulative probability exceeds it. In float32 honest draws agree but for a few in the tail,
  where the uniform is within 1.3e-6 of a border. In bfloat16, at a vocabulary of 49,152, 20 %
  of honest tokens differ: a cumulative probability adds up the errors of all tokens before.
- Gumbel: every token has noise of its own, a hash of word and token id, and the token with the
  largest logit / temperature + noise is drawn. The decision compares two tokens, so that only
  1.4 % of honest tokens differ in bfloat16, and those by little: the *gap* between the scores.

`proofs.draws` draws, and draws again. docs/protocols/sampling.md has the bytes, and vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import sha256
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
"""Draw words: 64 random bits per token position."""

SEED_BYTES: Final = 32
"""Bytes of a seed, which is a SHA-256 digest."""

DRAW_DOMAIN: Final = b"/shoal/draw/1.0.0"
TASK_DOMAIN: Final = b"/shoal/task/1.0.0"
UNIFORM_DOMAIN: Final = b"/shoal/uniform/1.0.0"

WORDS_PER_DIGEST: Final = 4
"""Number of words, of 64 bits each, in one digest."""

# The two multipliers of lowbias32 (Chris Wellons, public domain), found by search: of all
# two-round hashes of 32 bits of this form it is the one whose output bits depend most evenly on
# its input bits (bias 0.17). One round more (triple32) is 1.5 times as slow and changes nothing
# that a chi-squared test of a million draws sees.
FIRST_FACTOR: Final = np.uint32(0x21F0AAAD)
SECOND_FACTOR: Final = np.uint32(0x735A2D97)


class DrawRule(Enum):
    """The rule by which a seed decides the next token; a run names one."""

    CDF = "cdf"
    """The inverse CDF of the distribution, at one uniform."""
    GUMBEL = "gumbel"
    """The token with the largest score plus noise of its own."""


def draw_seed(run: bytes, policy: bytes, node: bytes, step: int, slot: int) -> bytes:
    """Return the seed of one completion, from the digests of the run and the policy, the peer,
    and consecutive numbers."""
    return _seed(DRAW_DOMAIN, run, policy, node, step, slot)


def task_seed(run: bytes, policy: bytes, node: bytes, step: int, group: int) -> bytes:
    """Return the seed from which the environment derives the task of one group."""
    return _seed(TASK_DOMAIN, run, policy, node, step, group)


def _seed(
    domain: bytes, run: bytes, policy: bytes, node: bytes, step: int, number: int
) -> bytes:
    if not (0 <= step < 1 << 64 and 0 <= number < 1 << 64):
        raise ValueError(f"step {step} and number {number} must fit 64 bits")
    fields = (domain, run, policy, node, step.to_bytes(8, "big"), number.to_bytes(8, "big"))
    return sha256(b"".join(len(field).to_bytes(4, "big") + field for field in fields)).digest()


def draw_words(seeds: Sequence[bytes], start: int, count: int) -> Words:
    """Return the words of positions [start, start + count): (seeds, count).

    A function of seed and position alone: asking for all positions up front (0.08 us each) and
    asking for one per step (0.5 us each) give the same numbers. Raises `ValueError` for a seed
    of another size.
    """
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed is {SEED_BYTES} bytes")
    if start < 0 or count < 0:
        raise ValueError("positions are not negative")
    first = start // WORDS_PER_DIGEST
    last = -(-(start + count) // WORDS_PER_DIGEST)
    counters = [number.to_bytes(8, "big") for number in range(first, last)]
    prefixes = [UNIFORM_DOMAIN + seed for seed in seeds]
    digests = b"".join(
        [sha256(prefix + counter).digest() for prefix in prefixes for counter in counters]
    )
    words = np.frombuffer(digests, dtype=">u8").reshape(
        len(seeds), WORDS_PER_DIGEST * len(counters)
    )
    skip = start - WORDS_PER_DIGEST * first
    return words[:, skip : skip + count].astype(np.uint64)


def uniforms(words: Words) -> NDArray[np.float64]:
    """Return the upper 53 bits of each word as a float64 in [0, 1): the most that it can hold
    there."""
    return np.ldexp((words >> np.uint64(11)).astype(np.float64), -53)


def noise_bits(
    words: Words, tokens: NDArray[np.integer], out: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """Return 32 bits of noise for each token under each word.

    The shapes are (rows,) for words, and (tokens,) or (rows, tokens) for tokens; the result is
    (rows, tokens). Only xor, shifts and products modulo 2^32 are used, so that any library
    computes the same on any device: torch in int32, where products wrap as well and a shift to
    the right needs a mask.
    """
    low = words.astype(np.uint32)[:, None]
    high = (words >> np.uint64(32)).astype(np.uint32)[:, None]
    bits = np.bitwise_xor(tokens.astype(np.uint32, copy=False), low, out=out)
    scratch = bits >> np.uint32(16)
    np.bitwise_xor(bits, scratch, out=bits)
    np.multiply(bits, FIRST_FACTOR, out=bits)
    np.right_shift(bits, np.uint32(15), out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    np.bitwise_xor(bits, high, out=bits)
    np.multiply(bits, SECOND_FACTOR, out=bits)
    np.right_shift(bits, np.uint32(15), out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    return bits


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return Gumbel noise -ln(-ln(u)) of u = 1 - (bits + 1/2) / 2^32, from -3.1 to 22.9.

    u is counted from 1 downwards, as large noise, which decides, comes of a u near 1, and 1 - u
    is exact there.
    """
    noise: NDArray[np.float64] = -np.log(-np.log1p(-np.ldexp(bits + 0.5, -32)))
    return noise
