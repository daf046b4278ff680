"""Cuts files into spans, at the tensors of safetensors files.

A span never holds values of two types, so that its bytes can be split in planes (`codec`) and
compared value by value with those of an older version. Tensors that are small share a span with
their neighbours; one that is large is cut in equal parts, since full spans and a rest of a few
bytes would cost a chunk for the rest. Example: tensors of 1.5 spans each give parts of 0.75,
and a third more chunks than a blind cut; tensors of 100 spans give one more in a hundred.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2p.errors import BadMessage
from p2p.shardcast.index import MAX_CHUNKS, MAX_SPAN, Span
from p2p.wire import KI, MIB

LENGTH_BYTES: Final = 8
"""Number of bytes in front of a safetensors header that give its length."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The bytes of one tensor in its file, and the bytes of each of its values."""

    start: int
    end: int
    kind: int
    name: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    shape: tuple[int, ...] = field(default=(), compare=False)
    """Shape of the tensor; empty if it does not match the number of bytes."""


def span_for(size: int) -> int:
    """Return the raw bytes per span for a policy of ``size`` bytes: a power of two that gives
    about 512 chunks.

    A chunk is relayed when it is complete, so each hop delays by a chunk's time: fewer chunks
    are slower, and more cost a core more than the line.
    """
    # Smaller chunks cost more in frames, hashes and wake-ups than their earlier arrival is
    # worth.
    span = 32 * KI
    while span < MAX_SPAN and span * 512 < size:
        span *= 2
    return span


def header_bytes(front: bytes, size: int) -> int:
    """Return the bytes of a safetensors file's JSON header, given the file's first 9 bytes and
    its ``size``; 0 if it is no safetensors file. Raise `BadMessage` if the file ends within the
    header."""
    length = int.from_bytes(front[:LENGTH_BYTES], "little")
    # A header of 32 MiB has 250,000 tensors. A file with a longer one is cut blindly.
    if not front[LENGTH_BYTES:].startswith(b"{") or not 2 <= length <= 32 * MIB:
        return 0
    if LENGTH_BYTES + length > size:
        raise BadMessage(
            f"it is cut off: its safetensors header has {length} bytes, the file {size}"
        )
    return length


def tensors_untrusted(header: bytes, size: int) -> list[Tensor]:
    """Return the tensors of a safetensors file of ``size`` bytes with this JSON header, in
    order. Return none if the header is not valid, in which case the file is cut blindly.

    Raises:
        BadMessage: The file ends before its last tensor. Nothing else is raised.
    """
    try:
        described = json.loads(header)
    except (ValueError, RecursionError):
        return []
    if not isinstance(described, dict):
        return []
    start = LENGTH_BYTES + len(header)
    tensors = [
        _tensor(name, value, start)
        for name, value in described.items()
        if name != "__metadata__"
    ]
    found = sorted((t for t in tensors if t is not None), key=lambda t: (t.start, t.end))
    if not found or len(found) < len(tensors):
        return []
    if found[-1].end > size:
        raise BadMessage(
            f"it is cut off: its tensors end at byte {found[-1].end}, the file at {size}"
        )
    at = start
    for tensor in found:
        if tensor.start != at:
            return []  # a hole, or two in one place
        at = tensor.end
    return found


def _tensor(name: str, value: Any, start: int) -> Tensor | None:
    if not isinstance(value, dict):
        return None
    span, dtype = value.get("data_offsets"), value.get("dtype")
    if not (isinstance(span, list) and len(span) == 2 and isinstance(dtype, str)):
        return None
    begin, end = span
    if not (type(begin) is int and type(end) is int and 0 <= begin <= end < 1 << 63):
        return None
    kind, size = {"BF16": 2, "F16": 2, "F32": 4}.get(dtype, 0), end - begin
    kind = kind if kind and not size % kind else 0
    shape = value.get("shape")
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
        shape = []
    if len(shape) > 8 or math.prod(shape) * kind != size:
        shape = []
    return Tensor(start + begin, start + end, kind, name, dtype, tuple(shape))


def cut_file(size: int, tensors: Sequence[Tensor], span: int) -> list[Span]:
    """Cut one file into spans."""
    if not tensors:
        return list(_blind(size, span))
    cuts = list(_blind(tensors[0].start, span))
    run = Span(b"", 0)
    for tensor in tensors:
        length = tensor.end - tensor.start
        if tensor.kind == run.kind and run.size + length <= span:
            run = Span(b"", run.size + length, run.kind)
            continue
        if run.size:
            cuts.append(run)
        run = Span(b"", length, tensor.kind)
        if length > span:
            cuts += _equal(length, tensor.kind, span)
            run = Span(b"", 0, tensor.kind)
    if run.size:
        cuts.append(run)
    cuts += _blind(size - tensors[-1].end, span)
    return cuts


def _blind(size: int, span: int) -> Iterable[Span]:
    for offset in range(0, size, span):
        yield Span(b"", min(span, size - offset))


def _equal(size: int, kind: int, span: int) -> Iterable[Span]:
    part = -(-size // -(-size // span))
    # Bytes at whose multiples a large tensor is cut: no value of any type is torn.
    part = min(span, part + -part % 64)
    for offset in range(0, size, part):
        yield Span(b"", min(part, size - offset), kind)


def cut_files(
    files: Sequence[tuple[int, Sequence[Tensor]]], span: int
) -> list[list[Span]] | None:
    """Cut files into spans, given their sizes and tensors.

    Spans have ``span`` bytes, or more if there would be too many. Return None if no size of
    span is large enough.
    """
    while True:
        cuts = [cut_file(size, tensors, span) for size, tensors in files]
        if sum(map(len, cuts)) <= MAX_CHUNKS:
            return cuts
        if span == MAX_SPAN:
            return None
        span = min(2 * span, MAX_SPAN)
