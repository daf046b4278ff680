"""Low-rank sums that turn the weights a run began with into a version: an adapter.

Of each target W = W0 + scale * B A: products are added up in the order of the rank, each
operation in float32 and rounded by itself, then W is rounded once to what W0 is stored in. So
every machine gets the bits that were published. The file is a safetensors file with
``NAME.lora_A`` (rank, inputs) and ``NAME.lora_B`` (outputs, rank), in float32 or bfloat16, of
each target ``NAME.weight``, and ``lora``, the rank and the scale in float32; behind it stands a
patch's table, whose first row has all of the wire. What comes out is compared with the
version's digests, span by span. Everything here is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage
from p2p.shardcast.index import Span, right_mask
from p2p.shardcast.layout import Tensor
from p2p.shardcast.patch import SpanRun

LORA: Final = "lora"
"""Name of the tensor that holds rank and scale."""
DOWN: Final = ".lora_A"
UP: Final = ".lora_B"
"""Suffix of the names of B (outputs, rank); the one above ends the names of A (rank, inputs).
PEFT uses the same."""

_F32 = NDArray[np.float32]
Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a matrix in the policy, and of its factors A and B in the adapter's file."""

    file: int
    place: Tensor
    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The scale, rank and targets of an adapter, as read from its file."""

    path: str
    scale: float
    rank: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a target that lies in a run, with everything needed to merge it."""

    start: int
    """First byte in the run, and one beyond the last."""
    end: int
    skip: int
    """Number of values of the first row of ``up`` that lie before the run."""
    down: bytes
    up: bytes
    target: Target
    adapter: AdapterFile


def read_adapter_untrusted(
    path: str, found: Sequence[Tensor], terms: Bytes, policy: Sequence[Sequence[Tensor]]
) -> AdapterFile:
    """Judge the tensors of an adapter by those of the files that it adds to. Raise
    `BadMessage`, and nothing else.

    Args:
        path: Where the adapter lies.
        found: Its tensors.
        terms: The bytes of its tensor `LORA`.
        policy: The tensors of each file of the base.
    """
    by_name = {one.name: one for one in found}
    lora = by_name.pop(LORA, None)
    if lora is None or (lora.dtype, lora.shape, len(terms)) != ("F32", (2,), 8):
        raise BadMessage(f"an adapter without {LORA!r}, its rank and scale")
    rank, scale = np.frombuffer(terms, "<f4").tolist()
    if not (np.isfinite(scale) and rank == rank // 1 and 1 <= rank <= 4096):
        raise BadMessage(f"an adapter of rank {rank} and scale {scale}")
    targets = []
    for number, tensors in enumerate(policy):
        for place in tensors:
            name = place.name.removesuffix(".weight")
            down, up = (by_name.pop(name + end, None) for end in (DOWN, UP))
            if down is None and up is None:
                continue
            if down is None or up is None or len(place.shape) != 2 or 0 in place.shape:
                raise BadMessage(f"an adapter has half of {name!r:.80}, or it is no matrix")
            outputs, inputs = place.shape
            if (down.shape, up.shape) != ((rank, inputs), (outputs, rank)):
                raise BadMessage(f"the adapter of {name!r:.80} has another rank or shape")
            dtypes = {down.dtype, up.dtype, place.dtype}
            if not dtypes <= {"F32", "BF16"} or down.dtype != up.dtype:
                raise BadMessage(f"{name!r:.80} is in {' and '.join(sorted(dtypes))}")
            targets.append(Target(number, place, down, up))
    if by_name:
        raise BadMessage(f"an adapter of {min(by_name)!r:.80}, which the model has not")
    return AdapterFile(path, scale, int(rank), tuple(targets))


def rows_of(target: Target, first: int, end: int, rank: int) -> tuple[int, int, int, int, int]:
    """Return which bytes of a target lie in [first, end) of its file, the values of its first
    row before them, and which bytes of B's rows they need."""
    place = target.place
    start, stop = max(first, place.start), min(end, place.end)
    inputs = place.shape[1]
    low, high = ((at - place.start) // place.kind for at in (start, stop))
    row = rank * target.up.kind
    begin = target.up.start + low // inputs * row
    return start, stop, low % inputs, begin, target.up.start + -(-high // inputs) * row


def merge_run_untrusted(
    run: SpanRun, spans: Sequence[Span], old: Bytes, pieces: Sequence[Piece]
) -> tuple[bytes, int]:
    """Merge an adapter into the bytes of a run of its base.

    Return the new bytes, and the mask of ``spans`` that came out right. All spans are wrong if
    any number is not finite.
    """
    made = bytearray(old)
    for piece in pieces:
        dtype = piece.target.down.dtype
        down, up = (_numbers(one, dtype) for one in (piece.down, piece.up))
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            return b"", 0
        base = memoryview(old)[piece.start : piece.end]
        made[piece.start : piece.end] = _merged(base, piece, down, up)
    raw = bytes(made)
    return raw, right_mask(spans, raw)


def _numbers(raw: Bytes, dtype: str) -> _F32:
    if dtype == "F32":
        return np.frombuffer(raw, "<f4")
    return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")


def _merged(base: Bytes, piece: Piece, down: _F32, up: _F32) -> bytes:
    rank, dtype = piece.adapter.rank, piece.target.place.dtype
    down, up = down.reshape(rank, -1), up.reshape(-1, rank)
    before, made, skip = _numbers(base, dtype), [], piece.skip
    width, at = down.shape[1], 0
    rows = max(1, (1 << 16) // width)  # few enough numbers to stay in a core's cache
    with np.errstate(over="ignore", invalid="ignore"):  # the digests judge what comes out
        for first in range(0, len(up), rows):
            part = up[first : first + rows]
            total = part[:, :1] * down[:1]
            product = np.empty_like(total)
            for one in range(1, rank):
                np.multiply(part[:, one : one + 1], down[one], out=product)
                total += product
            total *= np.float32(piece.adapter.scale)
            values = total.reshape(-1)[skip:]
            values = values[: len(before) - at] + before[at : at + len(values)]
            at, skip = at + len(values), 0
            made.append(_stored(values, dtype))
    return b"".join(made)


def _stored(values: _F32, dtype: str) -> bytes:
    if dtype == "F32":
        return values.tobytes()
    bits: NDArray[Any] = values.view("<u4")
    rounded: NDArray[Any] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return bytes(rounded.astype("<u2").data)
