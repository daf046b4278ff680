"""The safetensors container (huggingface.co/docs/safetensors), without torch or numpy.

Eight bytes of little-endian header length, a JSON header that names each tensor's dtype, shape
and span, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from p2p.errors import BadMessage

DTYPE_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1}
"""The dtypes we read and write, each with the bytes of a number."""

MAX_HEADER: Final = 16 * 1024 * 1024
"""Most bytes of a header. A tensor takes about 120 bytes: room for 140,000. The format's own
limit is 100 MB.
"""

PREFIX_BYTES: Final = 8
"""Bytes of the header's length, little-endian, by the format."""
_MAX_DIMENSIONS: Final = 8
"""Dimensions of a tensor: weights have one to four, and a shape of a thousand would be a header
of its own."""
_MAX_SIZE: Final = 1 << 48
"""Largest dimension: keeps the product of hostile shapes small."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(
                f"a {self.dtype} tensor of shape {self.shape} is {expected} bytes, not"
                f" {len(self.data)}"
            )


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The place of a tensor in its file: from byte ``begin`` to ``end``, exclusive."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode(tensors: Mapping[str, RawTensor]) -> bytes:
    """Return a safetensors file: tensors in the order of the mapping, data aligned to 8
    bytes.
    """
    shapes = {name: (one.dtype, one.shape) for name, one in tensors.items()}
    head = encode_head(shapes)
    return b"".join((head, *(one.data for one in tensors.values())))


def encode_head(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file whose tensors have these dtypes and shapes, in
    this order. It is for files that are written tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def decode_untrusted(data: bytes | bytearray | memoryview) -> dict[str, RawTensor]:
    """Return the tensors of a file in the order of their data, without copying it.

    Raises:
        BadMessage: The bytes are no safetensors file.
    """
    view = memoryview(data)
    start = head_size_untrusted(bytes(view[:PREFIX_BYTES]), len(view))
    return {
        name: RawTensor(span.dtype, span.shape, view[span.begin : span.end])
        for name, span in spans_untrusted(bytes(view[:start]), len(view)).items()
    }


def head_size_untrusted(prefix: bytes, size: int) -> int:
    """Return the offset of the first tensor, given a file's first `PREFIX_BYTES` and its size.

    Raises:
        BadMessage: The length of the header is impossible.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_BYTES or length > MAX_HEADER or PREFIX_BYTES + length > size:
        raise BadMessage(
            f"a safetensors header of {length} bytes does not fit a file of {size}"
        )
    return PREFIX_BYTES + length


def spans_untrusted(head: bytes, size: int) -> dict[str, TensorSpan]:
    """Return the place of each tensor in a file of ``size`` bytes that begins with ``head``.

    The order is that of their data; the tensors themselves are not needed.

    Raises:
        BadMessage: The header is wrong.
    """
    start = len(head)
    entries = [
        (*_entry_untrusted(name, value), name)
        for name, value in _header_untrusted(head[PREFIX_BYTES:]).items()
        if name != "__metadata__"
    ]
    spans: dict[str, TensorSpan] = {}
    offset = 0
    for begin, end, dtype, shape, name in sorted(entries):
        if begin != offset or start + end > size:
            raise BadMessage(f"the tensor {name!r:.80} overlaps, leaves a hole, or is cut off")
        spans[name] = TensorSpan(dtype, shape, start + begin, start + end)
        offset = end
    if start + offset != size:
        raise BadMessage(f"{size - start - offset} bytes follow the last tensor")
    return spans


def _header_untrusted(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadMessage("a safetensors header is not a JSON object")
    return header


def _entry_untrusted(name: str, value: object) -> tuple[int, int, str, tuple[int, ...]]:
    """Return (begin, end, dtype, shape) of one tensor. The tuples sort by place, empty tensors
    first."""
    if not isinstance(value, dict):
        raise BadMessage(f"the tensor {name!r:.80} has no description")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    span: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadMessage(f"the tensor {name!r:.80} has an unknown dtype")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise BadMessage(f"the tensor {name!r:.80} has no valid shape")
    if not _are_sizes(span) or len(span) != 2:
        raise BadMessage(f"the tensor {name!r:.80} has no valid offsets")
    if span[1] - span[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise BadMessage(f"the offsets of the tensor {name!r:.80} do not match its shape")
    return span[0], span[1], dtype, tuple(shape)


def _are_sizes(value: Any) -> bool:
    """Return True if ``value`` is a list of plain non-negative integers of sane size."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_SIZE for item in value
    )
