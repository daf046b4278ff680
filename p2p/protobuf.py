"""The part of protobuf that libp2p's messages need, by hand: varint, length-delimited fields.

A message is a sequence of (field number, value): an int for a varint or fixed64 field, bytes
for a length-delimited one. Other fixed-width fields are read over, as protobuf asks of readers
that do not know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from p2p.errors import BadMessage
from p2p.wire import decode_varint_untrusted, encode_varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf. Fields of the last type are skipped."""
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
"""Bytes to skip, by wire type."""


def field(number: int, value: int | bytes | str | bool) -> bytes:
    """Encode a field: bytes and text length-delimited, an int (not negative) or bool as a
    varint."""
    if isinstance(value, int):
        return encode_varint(number << 3 | _VARINT) + encode_varint(int(value))
    data = value.encode() if isinstance(value, str) else value
    return encode_varint(number << 3 | _BYTES) + encode_varint(len(data)) + data


def fixed64(number: int, value: int) -> bytes:
    """Encode a field of eight bytes."""
    return encode_varint(number << 3 | _FIXED64) + value.to_bytes(8, "little")


class FieldBudget:
    """Number of fields that may still be read, for a message and all that is nested in it.

    Bytes alone bound nothing: a MiB has room for half a million fields, and reading them takes
    half a second.
    """

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most


def fields_untrusted(
    data: bytes | memoryview, budget: FieldBudget | None = None
) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) as sent. Raise `BadMessage`, and nothing else, whatever the
    bytes.

    An int is a varint or fixed64 field, bytes a length-delimited one. Fields of 32 bits are
    checked for their length and left out. The size of ``data`` must have been limited by the
    caller. Each field, known or not, is taken from ``budget``.
    """
    offset = 0
    while offset < len(data):
        if budget is not None:
            budget.left -= 1
            if budget.left < 0:
                raise BadMessage("a protobuf has too many fields")
        tag = data[offset]
        if tag < 0x80:  # as nearly all tags are: no call for them
            offset += 1
        else:
            tag, offset = _varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise BadMessage("a protobuf field has number 0")
        if kind == _VARINT:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        if kind == _BYTES:
            length, offset = _varint(data, offset)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise BadMessage(f"protobuf wire type {kind} is unknown")
        end = offset + length
        if end > len(data):
            raise BadMessage("a protobuf field is cut off")
        if kind == _BYTES:
            yield number, bytes(data[offset:end])
        elif kind == _FIXED64:
            yield number, int.from_bytes(data[offset:end], "little")
        offset = end


def as_bytes_untrusted(value: int | bytes, what: str) -> bytes:
    """Return the value of a bytes field. Raise a `BadMessage` that names ``what`` if it is a
    varint."""
    if isinstance(value, int):
        raise BadMessage(f"{what} must be a bytes field")
    return value


def as_int_untrusted(value: int | bytes, what: str) -> int:
    """Return the value of a varint field. Raise a `BadMessage` that names ``what`` if it is
    bytes."""
    if isinstance(value, bytes):
        raise BadMessage(f"{what} must be a varint field")
    return value


def as_text_untrusted(value: int | bytes, what: str) -> str:
    """Return the value of a text field. Raise a `BadMessage` that names ``what`` unless it is
    UTF-8."""
    try:
        return as_bytes_untrusted(value, what).decode()
    except UnicodeDecodeError:
        raise BadMessage(f"{what} is not UTF-8") from None


def _varint(data: bytes | memoryview, offset: int) -> tuple[int, int]:
    taken = decode_varint_untrusted(data, offset)
    if taken is None:
        raise BadMessage("a protobuf varint is cut off")
    return taken
