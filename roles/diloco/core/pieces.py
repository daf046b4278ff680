"""A vector in pieces: who sums which, how a piece is summed, and by which digests it is known.

Theory of operation
-------------------
All members hold vectors of one length, and cut them into the same pieces. A contributor encodes
its pieces once and signs their digests and norms; that list stands, whichever member sums the
pieces later. Each piece has one owner among the contributors of a round, by its share of the
measured bandwidth. The owner decodes what all contributors sent, adds it up in float32 in the
order of their ids, encodes the mean once and signs its digest. Its bytes are forwarded as they
are, so all replicas decode the same; and a sum is a pure function of the contributors' bytes,
so any member can repeat it.

A contribution counts by the tokens behind it. One whose norm is more than `CLIP` times the
median is scaled down to that: whatever a member sends, it moves the mean by no more than a few
honest members would.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.wire import KI
from roles.contract.core.diloco import Codec
from roles.diloco.core.quant import ALIGNMENT, Values, decode_untrusted, encode, encoded_bytes

CLIP: Final = 3.0
"""Times the median norm that a contribution may have. Honest norms differ by less than a half;
below 2, members with little data would be scaled down."""
PIECES: Final = 64
"""Pieces that a small vector is cut into: enough that shares by bandwidth come out within a few
per cent, and that no piece is shorter than a packet."""
MAX_PIECE_BYTES: Final = 512 * KI
"""As a piece travels. It fits into a message of a mebibyte, as evidence does."""
MAX_PIECES: Final = 16 * KI
"""Of one vector: with a digest and a norm of each, the head of a contribution fits into a
message. 17 billion values in four bits, two billion in float32."""
DIGEST_BYTES: Final = 32
"""SHA-256."""
SPREAD: Final = 8.0
"""Times the median that a measured bandwidth counts at most, and a fraction at least: one that
boasts would else own all pieces, and the round would wait for it."""
MAX_NORM: Final = 1e15
"""Of one piece of a contribution. No update of a model that learns is as long, and a million of
them, with momentum, stay below what the codecs refuse (`quant.MAX_SCALE`)."""
MAX_RATE: Final = 2.0**40
"""Bytes a second that a contributor may claim: a TiB, which no line carries."""
NORM_SLACK: Final = 1.001
"""A norm counts as told right within a thousandth: float32 has been added up in some order."""
SMALLEST_NORM: Final = 2.0**-126
"""Below it float32 has few digits, or none: an honest norm may be off by half."""


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """How vectors of one length are cut."""

    count: int
    """Values in the vector."""
    piece: int
    """Values in a piece; the last may be shorter."""
    codec: Codec

    @classmethod
    def of(cls, count: int, codec: Codec) -> PieceGrid:
        """The grid for ``count`` values. Raises `ValueError` if they are too many."""
        bits = 32 * encoded_bytes(codec, ALIGNMENT) // (4 * ALIGNMENT)
        most = MAX_PIECE_BYTES * 8 // (bits + 1) // ALIGNMENT * ALIGNMENT
        wanted = -(-count // PIECES)
        piece = min(most, max(ALIGNMENT, -(-wanted // ALIGNMENT) * ALIGNMENT))
        grid = cls(count, piece, codec)
        if not 0 < grid.pieces <= MAX_PIECES:
            raise ValueError(
                f"a vector of {count} values in {codec.value} has {grid.pieces} pieces; there"
                f" are 1 to {MAX_PIECES}"
            )
        return grid

    @property
    def pieces(self) -> int:
        """How many there are."""
        return -(-self.count // self.piece)

    def span(self, index: int) -> slice:
        """Where a piece is."""
        return slice(index * self.piece, min(self.count, (index + 1) * self.piece))

    def values(self, index: int) -> int:
        """How many values a piece has."""
        span = self.span(index)
        return int(span.stop - span.start)

    def length(self, index: int) -> int:
        """How long a piece is as it travels."""
        return encoded_bytes(self.codec, self.values(index))

    @property
    def total_bytes(self) -> int:
        """Of all pieces."""
        return (self.pieces - 1) * self.length(0) + self.length(self.pieces - 1)

    def cut(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Pieces that lie end to end, as they travel."""
        each = self.length(0)
        return [data[one * each : (one + 1) * each] for one in range(self.pieces)]

    def decode_untrusted(self, index: int, data: bytes | memoryview) -> Values:
        """One piece. Raises `BadMessage`."""
        return decode_untrusted(self.codec, data, self.values(index))


def digest_of(data: bytes | memoryview) -> bytes:
    """What a piece is known by."""
    return hashlib.sha256(data).digest()


def root_of(digests: Sequence[bytes]) -> bytes:
    """What a list of pieces is known by."""
    return hashlib.sha256(b"".join(digests)).digest()


def norm_of(values: Values) -> float:
    """The length of a piece, as its contributor and its owner compute it."""
    return float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))


def total_norm(norms: Sequence[float]) -> float:
    """The length of a vector of its pieces'."""
    return math.sqrt(math.fsum(one * one for one in norms))


def owners(pieces: int, rates: Mapping[PeerId, float]) -> list[PeerId]:
    """Who sums each piece, one behind the other in the order of ids; a rate of 0 is unknown and
    counts as the median."""
    known = sorted(rate for rate in rates.values() if rate > 0)
    middle = statistics.median(known) if known else 1.0
    peers = sorted(rates)
    weights = [
        min(max(rates[peer] or middle, middle / SPREAD), middle * SPREAD) for peer in peers
    ]
    total, cut, begun, found = math.fsum(weights), 0.0, 0, list[PeerId]()
    for peer, weight in zip(peers, weights, strict=True):
        cut += weight
        end = pieces if peer == peers[-1] else round(pieces * cut / total)
        found += [peer] * (end - begun)
        begun = end
    return found


def usual_norm(norms: Mapping[PeerId, float]) -> float:
    """The median; of an even number the lower, so that one of two cannot raise it."""
    return statistics.median_low(norms.values())


def shares(tokens: Mapping[PeerId, int], norms: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """What each contribution is multiplied by before it is added: its part of the tokens, less
    if its norm is too large."""
    total = sum(tokens.values())
    limit = CLIP * usual_norm(norms)
    return {
        peer: tokens[peer] / total * min(1.0, limit / norms[peer] if norms[peer] else 1.0)
        for peer in sorted(tokens)
    }


def sum_piece(
    grid: PieceGrid, index: int, parts: Iterable[Values], by: Iterable[float]
) -> bytes:
    """The mean of one piece, encoded: ``parts`` in the order of their members' ids, each times
    what it counts."""
    total = np.zeros(grid.values(index), np.float32)
    for part, share in zip(parts, by, strict=True):
        total += part * np.float32(share)
    return encode(grid.codec, total)


def check_part(grid: PieceGrid, index: int, data: bytes, norm: float) -> Values:
    """Return the values of a contributor's piece. Raise `BadMessage` if it is none, or has not
    the ``norm`` that its contributor signed."""
    values = grid.decode_untrusted(index, data)
    found = norm_of(values)
    if max(found, norm) < SMALLEST_NORM:
        return values
    if not found <= norm * NORM_SLACK or not norm <= found * NORM_SLACK:
        raise BadMessage(f"piece {index} has norm {found:g} where {norm:g} was signed")
    return values
