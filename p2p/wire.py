"""Bytes on the wire: unsigned varints, length-prefixed frames, and msgpack read with distrust."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, Protocol, cast, runtime_checkable

import msgpack

from p2p.errors import BadMessage

KI: Final = 1024
MIB: Final = 1024 * 1024
MAX_VARINT_BYTES: Final = 9
"""multiformats' unsigned-varint: at most 63 bits."""
_UNCOUNTED: Final = 4 * KI
"""Bytes of an unfinished frame that are not worth counting: a stream itself costs as much."""
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
    """Splits a byte stream into length-prefixed frames (a bytes machine).

    It holds what it was given and no frame has taken: at most one unfinished frame and what one call of
    `feed` brought. Frames are cut off one at a time, when they are asked for.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes that no frame has taken yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes, split anyhow."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """The next whole frame, or None. Raise `BadMessage` as soon as a length is beyond the limit."""
        head = decode_varint_untrusted(self._buffer)
        if head is None:
            return None
        length, start = head
        if length > self._max_bytes:
            raise BadMessage(f"a frame of {length} bytes is over the limit of {self._max_bytes}")
        end = start + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            payload = bytes(view[start:end])
        del self._buffer[:end]  # moves the front, not what is behind it
        return payload

    def receive_data(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield every frame that ``data`` completes. Raise `BadMessage` on a frame beyond the limit."""
        self.feed(data)
        while (payload := self.next_frame()) is not None:
            yield payload


class _Receives(Protocol):
    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...


@runtime_checkable
class Holds(Protocol):
    """A stream that wants to know what its reader keeps, so that it counts as the peer's."""

    def keep(self, count: int) -> None:
        """The reader keeps ``count`` bytes that it has received and cannot use yet."""
        ...


@functools.cache
def _holds(kind: type) -> bool:
    """Whether streams of a class are `Holds`; to ask each of them takes 9 µs, and there are three classes."""
    return issubclass(kind, Holds)


class FrameReader:
    """Reads frames from a stream, one at a time.

    `receive` returns at once, without a schedule point, while a whole frame is buffered: a reader that does
    work for each frame makes its own. A deadline on a frame belongs to whoever knows the time:
    `is_mid_frame` says whether the peer owes us the rest of one.
    """

    def __init__(self, stream: _Receives, max_bytes: int) -> None:
        self._stream = stream
        self._parser = FrameParser(max_bytes)
        self._holder = cast("Holds", stream) if _holds(type(stream)) else None
        self._told = 0

    @property
    def pending(self) -> int:
        """Bytes received that no frame has taken yet: those of an unfinished frame, if `receive` waits."""
        return self._parser.pending

    @property
    def is_mid_frame(self) -> bool:
        """Whether a part of a frame has come."""
        return self._parser.pending > 0

    async def receive(self) -> bytes | None:
        """The next frame, or None when the peer has ended the stream between frames.

        Raises `BadMessage` on a frame that is too long or cut off.
        """
        while (payload := self._parser.next_frame()) is None:
            data = await self._stream.receive_some()
            if not data:
                if self._parser.pending:
                    raise BadMessage("the stream ended within a frame")
                return None
            self._parser.feed(data)
            self._tell()
        self._tell()
        return payload

    def _tell(self) -> None:
        """Have what we keep counted, unless it was, and is, little."""
        pending = self._parser.pending
        if self._holder is not None and (pending > _UNCOUNTED or self._told):
            self._told = pending if pending > _UNCOUNTED else 0
            self._holder.keep(self._told)


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
