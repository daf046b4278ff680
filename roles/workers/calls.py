"""Calls between a node and a worker process, as msgpack behind four bytes of length.

A request is the name of a method and its arguments; a reply is what the method returned, or a
`Failure`. Both ends are this project at one version on one machine. But in the process of an
environment a stranger's code runs too, and may write into the pipe: its replies are read by
`decode_reply_untrusted`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import IO, Any, Final

import msgpack

from p2p.errors import BadMessage, StorageError
from p2p.wire import MIB, fields_untrusted, unpack_untrusted

MAX_FRAME: Final = 64 * MIB
"""Bytes of a request or reply. The longest is a submission whose answers an environment
rewards: 8 MiB as it travels (`roles.contract.core.sizes`), up to 5 bytes a token instead of 2
here."""
LENGTH_BYTES: Final = 4
MAX_SAID: Final = 2000
"""Characters of an error that cross the pipe: it may quote what an owner or a trainer wrote
into a file, of any length, and characters that no encoding has."""
MAX_SAID_UNTRUSTED: Final = 600
"""Characters of a failure of a stranger's code that are repeated."""
MAX_ITEMS: Final = 16 * MIB
"""Numbers and texts of one reply: 8,192 tasks of an evaluation with prompts of 2,000 tokens. As
many take 0.6 GB for the moment in which they are read."""
DISK_REFUSES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""A disk that is full, over a quota, mounted read-only after an error, or failing: it may be
mended while the node waits."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that crosses the pipe: the name of its class and its message."""

    kind: str
    message: str


def failure_of(error: Exception) -> Failure:
    """Return ``error`` in the form that crosses the pipe.

    Of the operating system's errors, only those of a disk that takes no data become a
    `StorageError`, for which a node waits.
    """
    is_disk = isinstance(error, OSError) and error.errno in DISK_REFUSES
    said = str(error)[:MAX_SAID].encode(errors="backslashreplace").decode()
    return Failure(StorageError.__name__ if is_disk else type(error).__name__, said)


def encode_request(method: str, *arguments: object) -> bytes:
    """Encode a call."""
    return _pack([method, *arguments])


def decode_request(data: bytes) -> tuple[str, list[Any]]:
    """Return the name of the method and its arguments."""
    method, *arguments = msgpack.unpackb(data)
    return method, arguments


def encode_reply(value: object) -> bytes:
    """Encode the result of a method, or a `Failure`."""
    if isinstance(value, Failure):
        return _pack([False, [value.kind, value.message]])
    return _pack([True, value])


def decode_reply(data: bytes) -> Any:
    """Return the value or the `Failure` that one of our own processes sent.

    Raises:
        BadMessage: The bytes are no reply: a library has written into the pipe.
    """
    try:
        succeeded, value = msgpack.unpackb(data)
        return value if succeeded else Failure(*value)
    except (ValueError, TypeError) as error:
        raise BadMessage(f"a frame is no reply: {error}") from None


def decode_reply_untrusted(data: bytes, max_items: int = MAX_ITEMS) -> Any:
    """Return the value or the `Failure` that a process with a stranger's code sent.

    Args:
        data: The frame.
        max_items: Numbers and texts that the reply may have; more would keep the node from
            all else.

    Raises:
        BadMessage: The bytes are no reply.
    """
    reply = unpack_untrusted(data, max_items=max_items, max_list=max_items)
    succeeded, value = fields_untrusted(reply, bool, object, what="reply")
    if succeeded:
        return value
    kind, message = fields_untrusted(value, str, str, what="failure")
    return Failure(kind, message[:MAX_SAID_UNTRUSTED])


def write_frame(target: IO[bytes], payload: bytes) -> None:
    """Write a request or a reply behind its length."""
    target.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    target.flush()


def read_frame(source: IO[bytes]) -> bytes:
    """Read a request or a reply; empty when ``source`` has ended, or a frame is too long."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    payload = source.read(length) if length <= MAX_FRAME else b""
    return payload if len(payload) == length else b""


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
