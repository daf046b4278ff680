"""A request as it arrives: first a short frame, by which much is known, then its content."""

from __future__ import annotations

from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.wire import KI, Holds, decode_varint_untrusted
from roles.protocol.seats import Seat

HEAD_SECONDS: Final = 10.0
"""For the first frame to arrive: it fits into a few packets. Who needs longer holds a stream
and some kilobytes."""
FIRST_BYTE_SECONDS: Final = 1.0
"""For the first byte of a stranger: a seat that waits for nothing is another's."""
CONTENT_SECONDS: Final = 5.0
"""For a content to arrive, however short it is, and on top of that:"""
CONTENT_RATE: Final = 128 * KI
"""Bytes per second that a content takes at most to be worth a seat: 1 Mbit/s, 64 s for the
largest."""
_READ: Final = 64 * KI
"""Bytes taken from a stream at once: one record."""


async def receive_frame(
    stream: Stream,
    most: int,
    *,
    begun: bytes = b"",
    first_byte: float = HEAD_SECONDS,
    seconds: float = HEAD_SECONDS,
) -> tuple[bytes, bytes] | None:
    """Return the first frame on ``stream`` and what was read beyond it.

    Args:
        stream: A peer's.
        most: Bytes of the longest frame.
        begun: What was read of it before.
        first_byte: Seconds that the first byte may take.
        seconds: Seconds that all of it may take.

    Returns:
        None if the peer ends the stream, or takes too long.

    Raises:
        BadMessage: The frame is longer than ``most``, or cut off.
    """
    data = bytearray(begun)
    with trio.move_on_after(seconds):
        while True:
            head = decode_varint_untrusted(data)
            if head is not None:
                length, start = head
                if length > most:
                    raise BadMessage(f"a frame of {length} bytes, over the limit of {most}")
                if len(data) >= start + length:
                    return bytes(data[start : start + length]), bytes(data[start + length :])
            with trio.move_on_after(seconds if data else first_byte) as scope:
                piece = await stream.receive_some(8 * KI)
            if scope.cancelled_caught:
                return None
            if not piece:
                if data:
                    raise BadMessage("the stream ended within a frame")
                return None
            data += piece
    return None


async def receive_content(
    stream: Stream, begun: bytes, length: int, seat: Seat
) -> bytes | None:
    """Return the content that follows a request, as one frame of ``length`` bytes.

    Args:
        stream: A peer's.
        begun: What was read of it with the request.
        length: Bytes that the peer has announced.
        seat: Counts what has come; its owner may take it away.

    Returns:
        None if the seat is lost, or the content takes too long.

    Raises:
        BadMessage: It has another length, or is cut off.
    """
    holder = stream if isinstance(stream, Holds) else None
    data, whole = bytearray(begun), length
    try:
        with trio.move_on_after(CONTENT_SECONDS + length / CONTENT_RATE):
            while not seat.evicted:
                head = decode_varint_untrusted(data)
                if head is not None:
                    if head[0] != length:
                        raise BadMessage(f"content of {head[0]} bytes, {length} were announced")
                    whole = head[1] + length
                    if len(data) > whole:
                        raise BadMessage("something follows the content")
                    if len(data) == whole:
                        return bytes(data[head[1] :])
                piece = await stream.receive_some(min(_READ, max(1, whole - len(data))))
                if not piece:
                    raise BadMessage("the stream ended within a content")
                data += piece
                seat.received += len(piece)
                del piece  # it is in the content: waiting for more is not to hold it twice
                if holder is not None:
                    holder.keep(len(data))
    finally:
        if holder is not None:
            holder.keep(0)
    return None
