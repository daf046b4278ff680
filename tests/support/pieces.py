"""Pieces in memory, and an exchange without a line, for tests of DiLoCo's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from roles.diloco.core.outer import Arithmetic, Rows
from roles.diloco.core.pieces import PieceGrid, digest_of
from roles.diloco.core.quant import Values, encode
from roles.diloco.exchange import Blob, PieceFile


@dataclass(frozen=True)
class InMemory(Blob):
    pieces: Sequence[bytes]

    async def read(self, index: int) -> bytes:
        return self.pieces[index]


def in_memory(pieces: Sequence[bytes], digests: tuple[bytes, ...] = ()) -> Blob:
    """As honest as its digests, which are those of the pieces if none are given."""
    nowhere = cast(PieceFile, None)
    return InMemory(digests or tuple(map(digest_of, pieces)), nowhere, pieces)


def encode_all(grid: PieceGrid, vector: Values) -> list[bytes]:
    return [encode(grid.codec, vector[grid.span(one)]) for one in range(grid.pieces)]


def exchange(arithmetic: Arithmetic, state: Rows, updates: Sequence[Values], step: int) -> None:
    """Take an outer step in place, with updates that count the same."""
    found = [arithmetic.encoded(update, step) for update in updates]
    parts, norms = zip(*found, strict=True)
    mean = arithmetic.summed(0, parts, norms, [1 / len(updates)] * len(updates))
    arithmetic.advance(state, b"".join(mean), step)
