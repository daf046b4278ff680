"""A vector in pieces: their owners, their sums, and their digests.

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
"""Most bytes of an encoded piece: evidence with a piece fits into a message of a mebibyte."""
MAX_PIECES: Final = 16 * KI
"""Most pieces of one vector. With a digest and a norm for each, the head of a contribution fits
into a message. That is 17 billion values in four bits, or two billion in float32.
"""
DIGEST_BYTES: Final = 32
"""Bytes of a SHA-256 digest."""
SPREAD: Final = 8.0
"""Times the median that a measured bandwidth counts at most, and a fraction at least: one that
boasts would else own all pieces, and the round would wait for it."""
MAX_NORM: Final = 1e15
"""Largest norm of one piece of a contribution. No update of a model that learns is as long, and
a million of them, with momentum, stay below what the codecs refuse (`quant.MAX_SCALE`).
"""
MAX_RATE: Final = 2.0**40
"""Bytes a second that a contributor may claim: a TiB, which no line carries."""
NORM_SLACK: Final = 1.001
"""Tolerance of a claimed norm, as a factor: the sum in float32 depends on its order."""
SMALLEST_NORM: Final = 2.0**-126
"""Norms below this have few digits in float32, or none, so an honest one may be off by half."""


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """The division of vectors of one length into pieces."""

    count: int
    """Number of values in the vector."""
    piece: int
    """Values in a piece; the last may be shorter."""
    codec: Codec

    @classmethod
    def of(cls, count: int, codec: Codec) -> PieceGrid:
        """Return the grid for ``count`` values.

        Raises:
            ValueError: The vector has too many values.
        """
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
        """Number of pieces."""
        return -(-self.count // self.piece)

    def span(self, index: int) -> slice:
        """Return the slice of the vector that a piece covers."""
        return slice(index * self.piece, min(self.count, (index + 1) * self.piece))

    def values(self, index: int) -> int:
        """Return the number of values in a piece."""
        span = self.span(index)
        return int(span.stop - span.start)

    def length(self, index: int) -> int:
        """Return the bytes of a piece when encoded."""
        return encoded_bytes(self.codec, self.values(index))

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces together, encoded."""
        return (self.pieces - 1) * self.length(0) + self.length(self.pieces - 1)

    def cut(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Return the encoded pieces that lie end to end in ``data``."""
        each = self.length(0)
        return [data[one * each : (one + 1) * each] for one in range(self.pieces)]

    def decode_untrusted(self, index: int, data: bytes | memoryview) -> Values:
        """Decode one piece from a peer.

        Raises:
            BadMessage: The bytes are not that piece.
        """
        return decode_untrusted(self.codec, data, self.values(index))


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the SHA-256 digest of a piece."""
    return hashlib.sha256(data).digest()


def root_of(digests: Sequence[bytes]) -> bytes:
    """Return the digest that names a list of pieces."""
    return hashlib.sha256(b"".join(digests)).digest()


def norm_of(values: Values) -> float:
    """Return the Euclidean norm of a piece. Contributor and owner compute the same number."""
    return float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))


def total_norm(norms: Sequence[float]) -> float:
    """Return the norm of a vector, given the norms of its pieces."""
    return math.sqrt(math.fsum(one * one for one in norms))


def owners(pieces: int, rates: Mapping[PeerId, float]) -> list[PeerId]:
    """Return the owner that sums each piece.

    An owner's pieces lie together, in the order of ids. A rate of 0 is unknown and counts as
    the median.
    """
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
    """Return the median norm; the lower one of two middle norms, so that one of two members
    cannot raise it.
    """
    return statistics.median_low(norms.values())


def shares(tokens: Mapping[PeerId, int], norms: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Return each contribution's weight: its share of the tokens, less if its norm is too
    large.
    """
    total = sum(tokens.values())
    limit = CLIP * usual_norm(norms)
    return {
        peer: tokens[peer] / total * min(1.0, limit / norms[peer] if norms[peer] else 1.0)
        for peer in sorted(tokens)
    }


def sum_piece(
    grid: PieceGrid, index: int, parts: Iterable[Values], by: Iterable[float]
) -> bytes:
    """Return the encoded mean of one piece.

    ``parts`` are in the order of their members' ids; ``by`` has the weight of each.
    """
    total = np.zeros(grid.values(index), np.float32)
    for part, share in zip(parts, by, strict=True):
        total += part * np.float32(share)
    return encode(grid.codec, total)


def check_part(grid: PieceGrid, index: int, data: bytes, norm: float) -> Values:
    """Return the values of a contributor's piece. Raise `BadMessage` if it is invalid, or does
    not have the ``norm`` that its contributor signed."""
    values = grid.decode_untrusted(index, data)
    found = norm_of(values)
    if max(found, norm) < SMALLEST_NORM:
        return values
    if not found <= norm * NORM_SLACK or not norm <= found * NORM_SLACK:
        raise BadMessage(f"piece {index} has norm {found:g} where {norm:g} was signed")
    return values
