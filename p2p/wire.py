"""Bytes on the wire: unsigned varints, length-prefixed frames, and msgpack read with distrust."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgpack

from p2p.errors import BadMessage

KI: Final = 1024
MIB: Final = 1024 * 1024
MAX_VARINT_BYTES: Final = 9
"""multiformats' unsigned-varint: at most 63 bits."""
_MAX_DEPTH: Final = 16
"""Nesting of a message. Ours have 4; what is deeper is an attack on the reader's stack."""


def encode_varint(number: int) -> bytes:
    """Unsigned LEB128, as multiformats has it."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_varint_untrusted(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int] | None:
    """Return (number, offset behind it), or None while incomplete. Raise `BadMessage` if it is too long."""
    number = shift = 0
    for index in range(offset, min(len(data), offset + MAX_VARINT_BYTES)):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and shift:
                raise BadMessage("a varint is not minimally encoded")
            return number, index + 1
        shift += 7
    if len(data) - offset >= MAX_VARINT_BYTES:
        raise BadMessage(f"a varint is longer than {MAX_VARINT_BYTES} bytes")
    return None


def frame(payload: bytes | bytearray | memoryview) -> bytes:
    """``payload`` behind its length."""
    return encode_varint(len(payload)) + bytes(payload)


class FrameParser:
    """Splits a byte stream into length-prefixed frames (a bytes machine)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def receive_data(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield every frame that ``data`` completes. Raise `BadMessage` on a frame beyond the limit."""
        self._buffer += data
        while True:
            head = decode_varint_untrusted(self._buffer)
            if head is None:
                return
            length, start = head
            if length > self._max_bytes:
                raise BadMessage(f"a frame of {length} bytes is over the limit of {self._max_bytes}")
            end = start + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[start:end])
            del self._buffer[:end]
            yield payload


class _Receives(Protocol):
    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...


class FrameReader:
    """Reads frames from a stream."""

    def __init__(self, stream: _Receives, max_bytes: int) -> None:
        self._stream = stream
        self._parser = FrameParser(max_bytes)
        self._ready: list[bytes] = []

    async def receive(self) -> bytes | None:
        """The next frame, or None when the peer has ended the stream between frames.

        Raises `BadMessage` on a frame that is too long or cut off.
        """
        while not self._ready:
            data = await self._stream.receive_some()
            if not data:
                if self._parser.pending:
                    raise BadMessage("the stream ended within a frame")
                return None
            self._ready.extend(self._parser.receive_data(data))
        return self._ready.pop(0)


def pack(value: object) -> bytes:
    """Canonical msgpack: what is signed or hashed has one encoding. Keep dictionaries out of it."""
    packed: bytes | None = msgpack.packb(value, use_bin_type=True)
    assert packed is not None
    return packed


def unpack_untrusted(data: bytes | memoryview) -> object:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Lists come as lists, text as str.

    The size of ``data`` must have been limited by the caller; nothing decoded is larger than it.
    """
    try:
        # unpackb itself bounds every length by that of ``data``.
        value: object = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise BadMessage(f"not msgpack: {error}") from None
    _check_depth(value, _MAX_DEPTH)
    return value


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, list | dict):
        if not left:
            raise BadMessage(f"a message is nested deeper than {_MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def fields_untrusted(value: object, *kinds: type | tuple[type, ...], what: str) -> list[Any]:
    """``value`` as a list with exactly these types, in order. Raise `BadMessage` naming ``what``.

    A bool is no int here, whatever Python says.
    """
    if not isinstance(value, list) or len(value) != len(kinds):
        raise BadMessage(f"a {what} has {len(kinds)} fields")
    for index, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        is_bool = isinstance(item, bool) and kind is not bool and kind is not object
        if not isinstance(item, kind) or is_bool:
            raise BadMessage(f"field {index} of a {what} has the wrong type ({type(item).__name__})")
    return value
