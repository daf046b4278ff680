"""Activation proofs, byte for byte equal to those of the PyPI package toploc 0.1.6.

Theory of operation
-------------------
The last hidden states of a completion (the input of the output projection, one row per
generated token) are cut into chunks of 32 rows; the last chunk may be shorter. Of each chunk,
flattened, the k values of largest magnitude (the package: 128) are taken as bfloat16. The
proof is the one polynomial of degree below k over GF(65497) that has the bit pattern of a value
at the index of that value; indices are reduced modulo the largest m <= 65497 that keeps them
apart. A verifier who has the weights computes the same hidden states by one prefill, evaluates
the polynomial at the indices of *its own* largest values and compares exponents and mantissas:
the two need not agree to the bit, only nearly.

It proves that these weights were run over these tokens, and nothing about who drew the tokens:
`proofs.sampling` does that. docs/protocols/toploc.md has the bytes, the rules and their
reasons.

How it is fast: chunks of all sequences go through each step together. The largest values are
found without sorting and without rounding the whole chunk: the maxima of 2,048 interleaved
parts of it give a bound that at least k values reach, and only what reaches it (a few hundred
values) is rounded and ranked.

A completion may be fed block by block (`TopValues`), by a worker while it decodes and by a
verifier while it reads: of a chunk that is full only the largest values are kept, 6 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from proofs.field import PRIME, evaluate, interpolate

Rows: TypeAlias = NDArray[np.float32]
"""Hidden states of one sequence: (tokens, width)."""

ROWS_PER_CHUNK: Final = 32
"""Tokens per chunk; the package's ``decode_batching_size`` in every published run."""

TOP_K: Final = 128
"""The package's number of values per chunk, lower only where a whole chunk has fewer. A run
names its own number (`roles.contract.core.sampling.SamplingTerms.proof_values`)."""

MAX_TOP_K: Final = 1024
"""Most values per chunk that a run may name: 2 KiB a chunk, 64 bytes a token. Interpolation
takes their square."""

MAX_MODULUS: Final = PRIME

# The package's own search ends here (find_injective_modulus). Of random chunks of width 4096 8
# % need one step down, so an honest prover is never within thousands of steps of it; a chunk
# which needs less is refused by `commit` and its proof by `verify`.
MIN_MODULUS: Final = 1 << 15

# Where a chunk has hardly more values than the top k takes (a last chunk of one or two short
# rows), the top k holds values near zero, whose float32 noise is as large as they are: an
# honest submission of a demo run was refused for such a chunk. The comparison leaves out
# what is 16 times smaller than the largest, which no top k of a full chunk contains.
SIGNIFICANT_EXPONENTS: Final = 4

# The k-th largest value is a border that float32 noise moves. Values that tie with it after
# rounding to bfloat16 enter or leave the top k together: a value of 2.3203125, half-way between
# two bfloat16 numbers, differs by 2e-7 between decoding and prefill and is rounded the other
# way; where 16 completions share a prompt it stands in the chunk many times, up to 15 of them
# entered or left the top 128 at once, and each counted as a mismatch: honest work was rejected
# in about one demo of eight. So the comparison leaves out own values within this many
# bfloat16 steps of the k-th. That settles torch's choice among equal values as well. Tried: a
# higher limit of mismatches, which lets weights one step old through. Of 128 values a chunk of
# a trained model keeps about 120.
BORDER_STEPS: Final = 1

# The largest values of a short chunk are smaller than those of a whole one, and the noise of
# bfloat16 is a larger part of them. Measured on a model of 135 M (62 values a chunk): chunks of
# four to six rows have a mean error of 2.3 where vLLM wrote and 2.05 where torch did, chunks of
# 32 rows 1.33; times the fourth root of rows / 32 these are 1.45, 1.25 and 1.33. Without it no
# one limit fits both. Tried: errors in absolute terms (0.09 and 0.12), a square root, which
# makes of the short ones 0.9.
SHORT_CHUNK_POWER: Final = 0.25
"""Errors of a short chunk are multiplied by the fraction of its rows that exist, to this
power."""

# Bits of a bfloat16, then of a float32, and the one pattern that every NaN is written as.
_SIGN_AND_EXPONENT: Final = 0xFF80
_EXPONENT: Final = 0x7F80
_MANTISSA: Final = 0x007F
_MAGNITUDE: Final = 0x7FFF_FFFF
_INFINITY: Final = 0x7F80_0000
_NAN: Final = 0x7FC0

# One unit in the last place of a bfloat16, on the scale of float32 bit patterns.
_BFLOAT_STEP: Final = 1 << 16

# Interleaved parts of a chunk whose maxima are taken: value i is in part i modulo this. 16
# times TOP_K keeps the bound so tight that about 1.2 k values reach it.
_COLUMNS: Final = 2048

# Values ranked at a time: 1 MiB of float32 stays in the second-level cache between passes.
_BLOCK_VALUES: Final = 1 << 18

# Polynomials at a time: 256 * 128 elements of 4 bytes, five arrays: under 1 MiB as well.
_BATCH_CHUNKS: Final = 256


@dataclass(frozen=True, slots=True)
class Malformed:
    """A verdict on bytes that cannot be a proof of so many tokens, whatever the activations."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """The distance of one chunk's activations from the committed ones."""

    exponent_mismatches: int
    mantissa_mean: float
    """Mean distance of the 7-bit mantissas, over the values whose exponents agree."""
    mantissa_median: float
    """Upper median of the same distances."""


@dataclass(frozen=True, slots=True)
class ToplocStats:
    """The worst chunk of a sequence, statistic by statistic; zeros for a sequence without
    tokens.
    """

    chunks: int
    exponent_mismatches: int
    """Number of values whose sign or exponent differs, or of which the verifier's own is not
    finite."""
    mantissa_mean: float
    """Largest mean mantissa error of a chunk; infinite if no value of some chunk agrees. This
    and the median are scaled to whole chunks (`SHORT_CHUNK_POWER`)."""
    mantissa_median: float
    means: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """The mean mantissa error of every chunk."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The largest values of one chunk, largest first: their places and their bit patterns."""

    size: int
    """Number of values in the flattened chunk."""
    indices: NDArray[np.integer]
    """Places (k,) of the values in the flattened chunk."""
    patterns: NDArray[np.uint16]
    """Bit patterns (k,) of the values in bfloat16."""


class TopValues:
    """The largest values of one completion, collected block by block for a proof.

    At most 31 rows wait for their chunk to be full.
    """

    def __init__(self, values: int = TOP_K) -> None:
        self.values = values
        """Number of values kept per chunk."""
        self._chunks: list[_Chunk] = []
        self._rows: list[Rows] = []
        self._waiting = 0
        self.tokens = 0
        """Number of rows added so far."""

    def add(self, rows: Rows) -> None:
        """Add the next rows, (tokens, width) in float32, any number of them. Raises
        `ValueError` for another shape or width."""
        rows = _checked(rows)
        if self._rows and rows.shape[1] != self._rows[0].shape[1]:
            raise ValueError(f"rows of {rows.shape[1]} after rows of {self._rows[0].shape[1]}")
        self.tokens += len(rows)
        start = min(ROWS_PER_CHUNK - self._waiting, len(rows)) if self._waiting else 0
        self._wait(rows[:start])
        if self._waiting == ROWS_PER_CHUNK:
            self._chunks += _largest([self._flat()], self.values)
            self._rows, self._waiting = [], 0
        whole = start + (len(rows) - start) // ROWS_PER_CHUNK * ROWS_PER_CHUNK
        self._chunks += _largest(_cut(rows[start:whole]), self.values)
        self._wait(rows[whole:])

    def take(
        self,
        rows: int,
        size: int,
        indices: NDArray[np.integer],
        patterns: NDArray[np.uint16],
    ) -> None:
        """Add the next chunk, of ``rows`` rows and ``size`` values. Its `largest` values were
        found by an engine whose states are on another device. Raises `ValueError` while earlier
        rows wait for their chunk to be full."""
        if self._waiting:
            raise ValueError(f"{self._waiting} rows wait for the chunk before this one")
        self.tokens += rows
        self._chunks.append(_Chunk(size, indices, patterns))

    def extend(self, other: TopValues) -> None:
        """Add the chunks of ``other``, whose rows follow. Raises `ValueError` while earlier
        rows wait for their chunk to be full."""
        if self._waiting:
            raise ValueError(f"{self._waiting} rows wait for the chunk before this one")
        self.tokens += other.tokens
        self._chunks += other.chunks

    def close_all(self, others: Sequence[TopValues]) -> None:
        """Close all of ``others``, which are of this class. A subclass may rank their last
        chunks together if that is cheaper."""

    def _wait(self, rows: Rows) -> None:
        if len(rows):
            # a copy: the caller's array may be a window of something large, or used again
            self._rows.append(rows.copy())
            self._waiting += len(rows)

    def _flat(self) -> NDArray[np.float32]:
        return np.concatenate(self._rows).reshape(-1)

    @property
    def chunks(self) -> list[_Chunk]:
        """The full chunks."""
        return list(self._chunks)

    @property
    def waiting(self) -> list[NDArray[np.float32]]:
        """The unfinished last chunk, flattened."""
        return [self._flat()] if self._waiting else []


Source: TypeAlias = Rows | TopValues
"""Hidden states of one completion: all of them, or what was kept of them."""


def bfloat16_patterns(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bit patterns of float32 values rounded to bfloat16: ties to even, every NaN to
    0x7FC0."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(bits & _MAGNITUDE > _INFINITY, _NAN, rounded).astype(np.uint16)


def largest(block: NDArray[np.float32], k: int) -> tuple[NDArray[np.intp], NDArray[np.uint16]]:
    """Return indices and bfloat16 patterns, each (rows, k), of the k values of largest
    magnitude in each row.

    Magnitudes are compared after rounding; of equal ones the lower index wins. Largest first.
    """
    bits = block.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    count, width = block.shape
    columns = min(width, _COLUMNS)
    maxima = magnitude[:, : width - width % columns].reshape(count, -1, columns).max(axis=1)
    # k columns reach this bound, so k values do. Rounding moves a value by less than one step,
    # so whatever ties with the bound after rounding is at most one step below it.
    bound = np.partition(maxima, columns - k, axis=1)[:, columns - k]
    floor = np.maximum(bound, _BFLOAT_STEP) - np.uint32(_BFLOAT_STEP)
    row, index = np.nonzero(magnitude >= floor[:, None])
    patterns = bfloat16_patterns(block[row, index])
    order = np.argsort(row << 16 | 0x7FFF - (patterns & 0x7FFF).astype(np.intp), kind="stable")
    starts = np.searchsorted(row, np.arange(count))
    chosen = order[starts[:, None] + np.arange(k)]
    return index[chosen], patterns[chosen]


def injective_moduli(indices: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return for each row the largest modulus up to `MAX_MODULUS` that keeps the row's indices
    distinct.

    Raises `ValueError` when a row has none from `MIN_MODULUS` up.
    """
    moduli = np.full(len(indices), MAX_MODULUS, dtype=np.intp)
    pending = np.flatnonzero(indices.max(axis=1) >= MAX_MODULUS)
    while pending.size:
        residues = np.sort(indices[pending] % moduli[pending, None], axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        moduli[pending] -= 1
        if (moduli[pending] < MIN_MODULUS).any():
            raise ValueError(
                f"no modulus from {MIN_MODULUS} up keeps the indices of a chunk apart"
            )
    return moduli


def encode(indices: NDArray[np.integer], patterns: NDArray[np.integer]) -> list[bytes]:
    """Return a proof for each row of points. Both arrays are (chunks, k), with distinct indices
    in a row."""
    moduli = injective_moduli(indices)
    words = np.empty((len(indices), 1 + indices.shape[1]), dtype=">u2")
    words[:, 0] = moduli
    words[:, 1:] = interpolate(indices % moduli[:, None], patterns)
    return [row.tobytes() for row in words]


def proof_size(tokens: int, width: int, values: int = TOP_K) -> int:
    """Return the bytes of the proof for ``rows`` rows of hidden states: 2 + 2 ``values`` per
    started chunk, fewer if it is tiny."""
    whole, rest = divmod(tokens, ROWS_PER_CHUNK)
    sizes = [ROWS_PER_CHUNK * width] * whole + [rest * width] * (rest > 0)
    return sum(2 + 2 * min(values, size) for size in sizes)


def commit(activations: Sequence[Source], values: int = TOP_K) -> list[bytes]:
    """Return the proof of each sequence: its chunks' proofs, one after the other; empty without
    tokens.

    Every array is (tokens, width), float32. Raises `ValueError` for other shapes.
    """
    sequences = _sequences(activations, values)
    flat = list(chain.from_iterable(sequences))
    encoded = [b""] * len(flat)
    for batch in _batches(flat):
        indices = np.stack([flat[position].indices for position in batch])
        patterns = np.stack([flat[position].patterns for position in batch])
        for position, proof in zip(batch, encode(indices, patterns), strict=True):
            encoded[position] = proof
    proofs = iter(encoded)
    return [b"".join(islice(proofs, len(chunks))) for chunks in sequences]


def verify(
    proofs: Sequence[bytes], activations: Sequence[Source], values: int = TOP_K
) -> list[ToplocStats | Malformed]:
    """Compare foreign proofs with our own activations, sequence by sequence.

    Whatever the bytes are, the answer is a value: `Malformed` unless they are exactly the
    proofs of that many rows. Signs count as exponents here (the package ignores them, and
    accepts negated activations), and a value of ours that is not finite agrees with nothing.
    Raises `ValueError` only for our own mistakes: unequal numbers of proofs and sequences,
    arrays that are not (tokens, width).
    """
    sequences = _sequences(activations, values)
    claims = [
        _parse_untrusted(proof, chunks) for proof, chunks in zip(proofs, sequences, strict=True)
    ]
    sound = [i for i, claim in enumerate(claims) if not isinstance(claim, Malformed)]
    words = [chunk for claim in claims if not isinstance(claim, Malformed) for chunk in claim]
    stats = iter(_measure([chunk for i in sound for chunk in sequences[i]], words))
    return [
        claim
        if isinstance(claim, Malformed)
        else _worst(list(islice(stats, len(claim))), _tokens(activation))
        for claim, activation in zip(claims, activations, strict=True)
    ]


def worst(stats: Sequence[ToplocStats | Malformed]) -> ToplocStats | Malformed:
    """Return the worst of several sequences, such as the completions of a group, statistic by
    statistic; `Malformed` if any is malformed."""
    measured = list[ToplocStats]()
    for number, one in enumerate(stats):
        if isinstance(one, Malformed):
            return Malformed(f"sequence {number}: {one.reason}")
        measured.append(one)
    return ToplocStats(
        sum(one.chunks for one in measured),
        max((one.exponent_mismatches for one in measured), default=0),
        max((one.mantissa_mean for one in measured), default=0.0),
        max((one.mantissa_median for one in measured), default=0.0),
        tuple(chain.from_iterable(one.means for one in measured)),
    )


def independence(completions: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return for each chunk of each completion of a group the share that is independent
    evidence, from 0 to 1.

    A hidden state follows from the tokens before it. Where k completions have had the same
    tokens so far, the state at that place is seen k times and known once: it counts 1 / k in
    each, and a chunk counts what its rows do in the mean. 16 equal answers of one chunk are one
    chunk, 16 that differ from the first token on nearly 16.
    """
    rows = [np.ones(len(tokens)) for tokens in completions]
    alike = [list(range(len(completions)))]
    place = 0
    while alike:
        apart = list[list[int]]()
        for numbers in alike:
            there = [number for number in numbers if len(completions[number]) > place]
            following: dict[int, list[int]] = {}
            for number in there:
                rows[number][place] = 1.0 / len(there)
                following.setdefault(completions[number][place], []).append(number)
            apart += [some for some in following.values() if len(some) > 1]
        alike = apart
        place += 1
    return [
        [
            float(counts[start : start + ROWS_PER_CHUNK].mean())
            for start in range(0, len(counts), ROWS_PER_CHUNK)
        ]
        for counts in rows
    ]


def _checked(rows: Rows) -> Rows:
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"activations are (tokens, width), not {rows.shape}")
    return np.ascontiguousarray(rows, dtype=np.float32)


def _cut(rows: Rows) -> list[NDArray[np.float32]]:
    """Return the chunks of a sequence, flattened."""
    return [
        rows[i : i + ROWS_PER_CHUNK].reshape(-1) for i in range(0, len(rows), ROWS_PER_CHUNK)
    ]


def _sequences(activations: Sequence[Source], values: int) -> list[list[_Chunk]]:
    """Return the chunks of each sequence. Chunks that are given as rows are ranked together."""
    kept = [one.chunks if isinstance(one, TopValues) else [] for one in activations]
    cut = [
        one.waiting if isinstance(one, TopValues) else _cut(_checked(one))
        for one in activations
    ]
    found = iter(_largest(list(chain.from_iterable(cut)), values))
    return [
        chunks + list(islice(found, len(rows))) for chunks, rows in zip(kept, cut, strict=True)
    ]


def _largest(chunks: Sequence[NDArray[np.float32]], values: int) -> list[_Chunk]:
    """Return the largest values of each chunk. Chunks of equal size are ranked together."""
    by_size: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        by_size.setdefault(chunk.size, []).append(position)
    found: list[_Chunk | None] = [None] * len(chunks)
    for size, positions in by_size.items():
        k, block = min(values, size), max(1, _BLOCK_VALUES // size)
        for first in range(0, len(positions), block):
            batch = positions[first : first + block]
            indices, patterns = largest(np.stack([chunks[position] for position in batch]), k)
            for position, where, what in zip(
                batch, indices.astype(np.uint32), patterns, strict=True
            ):
                found[position] = _Chunk(size, where, what)
    return [chunk for chunk in found if chunk is not None]


def _batches(chunks: Sequence[_Chunk]) -> Iterator[list[int]]:
    """Yield the positions of chunks that can be computed together: they have equally many
    values, and either all or none keep all values of the chunk."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for position, chunk in enumerate(chunks):
        k = len(chunk.indices)
        alike.setdefault((k, chunk.size > k), []).append(position)
    for positions in alike.values():
        for first in range(0, len(positions), _BATCH_CHUNKS):
            yield positions[first : first + _BATCH_CHUNKS]


def _parse_untrusted(
    proof: bytes, ours: Sequence[_Chunk]
) -> list[NDArray[np.intp]] | Malformed:
    """Return the modulus and coefficients of each chunk, or why the bytes are no proof. Never
    raises."""
    expected = sum(2 + 2 * len(chunk.indices) for chunk in ours)
    if len(proof) != expected:
        return Malformed(f"{len(proof)} bytes for {len(ours)} chunks, not {expected}")
    words = np.frombuffer(proof, dtype=">u2").astype(np.intp)
    chunks, start = [], 0
    for number, own in enumerate(ours):
        chunk = words[start : start + 1 + len(own.indices)]
        start += len(chunk)
        # Indices below the prime are apart as they are: a smaller modulus is not the largest.
        lowest = MAX_MODULUS if own.size <= MAX_MODULUS else MIN_MODULUS
        if not lowest <= chunk[0] <= MAX_MODULUS:
            return Malformed(f"the modulus of chunk {number} is {chunk[0]}")
        if chunk[1:].max() >= PRIME:
            return Malformed(f"a coefficient of chunk {number} is not below {PRIME}")
        chunks.append(chunk)
    return chunks


def _measure(chunks: Sequence[_Chunk], claims: Sequence[NDArray[np.intp]]) -> list[ChunkStats]:
    """Return the statistics of each chunk.

    Signs count, values that are not finite never agree, and values whose rank among the largest
    is noise are left out (`SIGNIFICANT_EXPONENTS`, `BORDER_STEPS`).
    """
    results: list[ChunkStats | None] = [None] * len(chunks)
    for batch in _batches(chunks):
        words = np.stack([claims[position] for position in batch])
        indices = np.stack([chunks[position].indices for position in batch])
        patterns = np.stack([chunks[position].patterns for position in batch])
        claimed = evaluate(words[:, 1:], indices % words[:, :1]).astype(np.uint16)
        is_cut = chunks[batch[0]].size > indices.shape[1]
        compared = _compare(claimed, patterns, is_cut=is_cut)
        for position, stats in zip(batch, compared, strict=True):
            results[position] = stats
    return [stats for stats in results if stats is not None]


def _compare(
    claimed: NDArray[np.uint16], own: NDArray[np.uint16], *, is_cut: bool
) -> Iterator[ChunkStats]:
    """Compare claimed with own values of several chunks.

    ``own`` is ordered, largest first; ``is_cut`` means that the chunks have more values than
    these.
    """
    errors = np.abs((claimed & _MANTISSA).astype(np.int16) - (own & _MANTISSA).astype(np.int16))
    differs = (claimed ^ own) & _SIGN_AND_EXPONENT != 0
    # One step apart across a power of two (1.992 and 2.0) is rounding, as one step within it
    # is: counted as a mismatch it was all that 4 of 200,000 honest groups had.
    steps = np.abs(claimed.astype(np.int32) - own.astype(np.int32))
    errors = np.where(differs & (steps == 1), 1, errors).astype(np.int16)
    differs &= steps != 1
    infinite = own & _EXPONENT == _EXPONENT
    differs |= infinite
    exponents = (own & _EXPONENT).astype(np.int32) >> 7
    counted = exponents >= exponents.max(axis=1, keepdims=True) - SIGNIFICANT_EXPONENTS
    if is_cut:
        magnitudes = (own & 0x7FFF).astype(np.int32)
        inside = magnitudes > magnitudes[:, -1:] + BORDER_STEPS
        # Where all values are (nearly) equal, zeros for example, none is inside: then all are
        # compared.
        counted &= inside | ~inside.any(axis=1, keepdims=True)
    counted |= infinite.any(axis=1, keepdims=True)
    agrees = counted & ~differs
    mismatches = np.count_nonzero(differs & counted, axis=1)
    matches = np.count_nonzero(agrees, axis=1)
    totals = np.where(agrees, errors, 0).sum(axis=1)
    ranked = np.sort(np.where(agrees, errors, np.int16(_MANTISSA + 1)), axis=1)
    for mismatch, match, total, ranks in zip(mismatches, matches, totals, ranked, strict=True):
        if match:
            yield ChunkStats(int(mismatch), int(total) / int(match), float(ranks[match // 2]))
        else:
            yield ChunkStats(int(mismatch), np.inf, np.inf)


def _tokens(activation: Source) -> int:
    return activation.tokens if isinstance(activation, TopValues) else len(activation)


def _worst(chunks: Sequence[ChunkStats], tokens: int) -> ToplocStats:
    rows = [min(ROWS_PER_CHUNK, tokens - start) for start in range(0, tokens, ROWS_PER_CHUNK)]
    scales = [(count / ROWS_PER_CHUNK) ** SHORT_CHUNK_POWER for count in rows]
    pairs = list(zip(chunks, scales, strict=True))
    means = tuple(chunk.mantissa_mean * scale for chunk, scale in pairs)
    return ToplocStats(
        len(chunks),
        max((chunk.exponent_mismatches for chunk in chunks), default=0),
        max(means, default=0.0),
        max((chunk.mantissa_median * scale for chunk, scale in pairs), default=0.0),
        means,
    )
