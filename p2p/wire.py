"""Bytes on the wire: varints, length-prefixed frames, and msgpack read with distrust."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import (
    Any,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeGuard,
    TypeVar,
    cast,
    runtime_checkable,
)

import msgpack

from p2p.door import check, check_has, check_number
from p2p.errors import BadMessage

KI: Final = 1024
"""Number of bytes in a kibibyte, also used for counts of 1,024."""
MIB: Final = 1024 * 1024
"""Number of bytes in a mebibyte."""
_UNCOUNTED: Final = 4 * KI
"""Bytes of an unfinished frame that are not counted, since a stream itself costs as much."""
MAX_ITEMS: Final = 128
"""Most items in all lists and tables of a message, unless its caller names another limit. A
heartbeat has 20, the longest DHT answer 91. Bytes alone do not bound the work: an empty list is
one byte on the wire and 75 in memory."""
_Container = TypeVar("_Container", list[Any], dict[Any, Any])
_T = TypeVar("_T")


def encode_varint(number: int) -> bytes:
    """Encode a number as unsigned LEB128, like multiformats."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_varint_untrusted(
    data: bytes | bytearray | memoryview, offset: int = 0
) -> tuple[int, int] | None:
    """Return (number, offset behind it), or None while incomplete. Raise `BadMessage` if it is
    too long: multiformats' unsigned-varint has at most 63 bits, nine groups of seven.
    """
    number = shift = 0
    for index in range(offset, min(len(data), offset + 9)):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and shift:
                raise BadMessage("a varint is not minimally encoded")
            return number, index + 1
        shift += 7
    if len(data) - offset >= 9:
        raise BadMessage("a varint is longer than 9 bytes")
    return None


def frame(payload: bytes | bytearray | memoryview) -> bytes:
    """Return ``payload`` with its length in front."""
    check("payload", payload, bytes, bytearray, memoryview)
    return encode_varint(len(payload)) + bytes(payload)


class FrameParser:
    """Splits a byte stream into length-prefixed frames (a bytes machine).

    It holds what it was given and no frame has taken: at most one unfinished frame and what one
    call of `feed` brought. Frames are cut off one at a time, when they are asked for.
    """

    def __init__(self, max_bytes: int) -> None:
        check_number("max_bytes", max_bytes)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes that no frame has taken yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes, split in any way."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Return the next whole frame, or None. Raise `BadMessage` as soon as a length exceeds
        the limit."""
        if not self._buffer:
            return None
        head = decode_varint_untrusted(self._buffer)
        if head is None:
            return None
        length, start = head
        if length > self._max_bytes:
            raise BadMessage(
                f"a frame of {length} bytes is over the limit of {self._max_bytes}"
            )
        end = start + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            payload = bytes(view[start:end])
        del self._buffer[:end]  # moves the front, not what is behind it
        return payload

    def receive_data(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield every frame that ``data`` completes. Raise `BadMessage` on a frame beyond the
        limit.
        """
        self.feed(data)
        while (payload := self.next_frame()) is not None:
            yield payload


class _Receives(Protocol):
    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...


@runtime_checkable
class Holds(Protocol):
    """A stream that counts what its reader keeps as held for the peer."""

    def keep(self, count: int) -> None:
        """Record that the reader keeps ``count`` bytes that it has received and cannot use
        yet."""


_CONFORMS: Final[dict[tuple[type, type], bool]] = {}


def conforms(value: object, protocol: type[_T]) -> TypeGuard[_T]:
    """Return ``isinstance(value, protocol)`` for a runtime protocol, checked once a class: a
    check takes 9 µs, and the streams of all connections are of a few classes."""
    key = type(value), protocol
    if (known := _CONFORMS.get(key)) is None:
        known = _CONFORMS[key] = isinstance(value, protocol)
    return known


class FrameReader:
    """Reads frames from a stream, one at a time.

    `receive` returns at once, without a schedule point, while a whole frame is buffered: a
    reader that does work for each frame makes its own. A deadline on a frame belongs to the
    caller, which knows the time: `pending` says whether the peer owes us the rest of one.
    """

    def __init__(self, stream: _Receives, max_bytes: int) -> None:
        check_has("stream", stream, "stream", "receive_some")
        self._stream = stream
        self._parser = FrameParser(max_bytes)
        self._holder = stream if conforms(stream, Holds) else None
        self._told = 0

    @property
    def pending(self) -> int:
        """Number of received bytes that no frame has taken yet. While `receive` waits, they are
        those of an unfinished frame."""
        return self._parser.pending

    async def receive(self) -> bytes | None:
        """Return the next frame, or None when the stream has ended between frames. Raises
        `BadMessage` if a frame is too long or cut off."""
        while (payload := self._parser.next_frame()) is None:
            if self._parser.pending:
                return await self._receive_rest()
            self._tell()
            data = await self._stream.receive_some()
            if not data:
                return None
            self._parser.feed(data)
            del data  # the parser has it: waiting for more is not to hold it twice
        return payload

    async def _receive_rest(self) -> bytes:
        payload = None
        while payload is None:
            self._tell()
            data = await self._stream.receive_some()
            if not data:
                raise BadMessage("the stream ended within a frame")
            self._parser.feed(data)
            del data
            payload = self._parser.next_frame()
        self._tell()
        return payload

    def _tell(self) -> None:
        """Report the kept bytes to the budget, unless they were and are few."""
        pending = self._parser.pending
        if self._holder is not None and (pending > _UNCOUNTED or self._told):
            self._told = pending if pending > _UNCOUNTED else 0
            self._holder.keep(self._told)


def pack(value: object) -> bytes:
    """Encode as canonical msgpack: what is signed or hashed has one encoding. Dictionaries
    should not be used in it."""
    packed: bytes | None = msgpack.packb(value, use_bin_type=True)
    assert packed is not None
    return packed


def unpack_untrusted(
    data: bytes | memoryview,
    *,
    max_items: int = MAX_ITEMS,
    max_list: int = MAX_ITEMS,
    # Most levels of nesting in a message. Ours have 3, the run file 4; a deeper message is an
    # attack on the reader's stack.
    max_depth: int = 8,
) -> object:
    """Decode canonical msgpack. Raise `BadMessage`, and nothing else, whatever the bytes. Lists
    come as lists, text as str.

    At most ``max_items`` items in all lists and tables together, ``max_list`` in each, nested
    at most ``max_depth`` deep. What has more is refused while it is read: at most twice
    ``max_items`` ever exist. The size of ``data`` must have been limited by the caller: text
    and bytes are as long as it.
    """
    # An item takes at least a byte, so data no longer than the limit cannot exceed it: nothing
    # is counted.
    count = _counter(max_items) if len(data) > max_items else None
    try:
        value: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            list_hook=count,
            object_hook=count,
            max_array_len=max_list,
            max_map_len=max_list,
            max_ext_len=0,
        )
    except (
        ValueError,
        TypeError,
        RecursionError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        raise BadMessage(f"not msgpack: {error}") from None
    _check_depth(value, max_depth)
    return value


def _counter(max_items: int) -> Callable[[_Container], _Container]:
    """Return a hook that msgpack calls with each list or table; it raises `ValueError` at one
    too many."""
    left = max_items + 1

    def count(container: _Container) -> _Container:
        nonlocal left
        left -= len(container) + 1
        if left < 0:
            raise ValueError(f"a message has more than {max_items} items")
        return container

    return count


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, (list, dict)):  # a union would be made anew for each message
        if not left:
            raise BadMessage("a message is nested too deep")
        for item in value.values() if isinstance(value, dict) else value:
            if (kind := type(item)) is list or kind is dict:
                _check_depth(item, left - 1)


def fields_untrusted(value: object, *kinds: type | tuple[type, ...], what: str) -> list[Any]:
    """Return ``value`` as a list with exactly these types, in order. Raise a `BadMessage` that
    names ``what`` if it is none.

    A bool is no int here, whatever Python says.
    """
    if not isinstance(value, list) or len(value) != len(kinds):
        raise BadMessage(f"a {what} has {len(kinds)} fields")
    if tuple(map(type, value)) == kinds:  # nearly always
        return value
    for index, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        is_bool = isinstance(item, bool) and kind is not bool and kind is not object
        if not isinstance(item, kind) or is_bool:
            raise BadMessage(
                f"field {index} of a {what} has the wrong type ({type(item).__name__})"
            )
    return value


class Codec(NamedTuple):
    """Encoding of a message's field."""

    kind: type
    """Type of the field on the wire."""
    encode: Callable[[Any], object] = lambda value: value
    decode: Callable[[Any], Any] = lambda value: value
    """Converts the wire's value to the field's; may raise `BadMessage`."""


class MessageTable(Generic[_T]):
    """The dataclasses that are the messages of one protocol, each with the number (SHARDCAST:
    the word) of its kind and the codecs of its fields. A message is a list that begins with its
    kind."""

    def __init__(
        self, what: str, *rows: tuple[int | str, type[_T], *tuple[Codec, ...]]
    ) -> None:
        self._what = what
        self._codecs: dict[type[_T], tuple[int | str, list[tuple[str, Codec]]]] = {}
        self._rows: dict[int | str, tuple[type[_T], list[Codec], tuple[type, ...]]] = {}
        for number, message, *codecs in rows:
            names = [field.name for field in fields(cast("Any", message))]
            self._codecs[message] = number, list(zip(names, codecs, strict=True))
            self._rows[number] = message, codecs, tuple(codec.kind for codec in codecs)

    def encode(self, message: _T) -> list[object]:
        """Return the number of a message's kind, and its fields in wire form."""
        number, codecs = self._codecs[type(message)]
        return [number, *[codec.encode(getattr(message, name)) for name, codec in codecs]]

    def decode_untrusted(self, kind: object, values: list[Any]) -> _T:
        """Return the message. Raises `BadMessage` and nothing else."""
        row = self._rows.get(kind) if type(kind) is int or type(kind) is str else None
        if row is None:
            raise BadMessage(f"a {self._what} has no kind {kind!r:.20}")
        message, codecs, kinds = row
        fields_untrusted(values, *kinds, what=self._what)
        return message(*[codec.decode(one) for codec, one in zip(codecs, values, strict=True)])
