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
"""A tensor takes about 120 bytes of header: room for 140,000 of them. The format's own limit is
100 MB."""

_LENGTH_BYTES: Final = 8
"""Of the header's length, little-endian, by the format."""
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


def encode(tensors: Mapping[str, RawTensor]) -> bytes:
    """A safetensors file, tensors in the order of the mapping, data aligned to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join(
        (
            len(text).to_bytes(_LENGTH_BYTES, "little"),
            text,
            *(one.data for one in tensors.values()),
        )
    )


def decode_untrusted(data: bytes | bytearray | memoryview) -> dict[str, RawTensor]:
    """The tensors of a file, in the order of their data, without copying it. Raises
    `BadMessage`."""
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(view) < _LENGTH_BYTES or length > MAX_HEADER or start > len(view):
        raise BadMessage(
            f"a safetensors header of {length} bytes does not fit a file of {len(view)}"
        )
    entries = [
        (*_entry_untrusted(name, value), name)
        for name, value in _header_untrusted(bytes(view[_LENGTH_BYTES:start])).items()
        if name != "__metadata__"
    ]
    tensors: dict[str, RawTensor] = {}
    offset = 0
    for begin, end, dtype, shape, name in sorted(entries):
        if begin != offset or start + end > len(view):
            raise BadMessage(f"the tensor {name!r} overlaps, leaves a hole, or is cut off")
        tensors[name] = RawTensor(dtype, shape, view[start + begin : start + end])
        offset = end
    if start + offset != len(view):
        raise BadMessage(f"{len(view) - start - offset} bytes follow the last tensor")
    return tensors


def _header_untrusted(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadMessage("a safetensors header is not a JSON object")
    return header


def _entry_untrusted(name: str, value: object) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one tensor: of those that begin at one place the empty come
    first."""
    if not isinstance(value, dict):
        raise BadMessage(f"the tensor {name!r} has no description")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    span: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadMessage(f"the tensor {name!r} has an unknown dtype")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise BadMessage(f"the tensor {name!r} has no valid shape")
    if not _are_sizes(span) or len(span) != 2:
        raise BadMessage(f"the tensor {name!r} has no valid offsets")
    if span[1] - span[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise BadMessage(f"the offsets of the tensor {name!r} do not match its shape")
    return span[0], span[1], dtype, tuple(shape)


def _are_sizes(value: Any) -> bool:
    """Whether ``value`` is a list of plain non-negative integers of sane size."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_SIZE for item in value
    )
