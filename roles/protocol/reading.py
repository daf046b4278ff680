"""Reading of requests: first a short frame, which tells much about them, then their content."""

from __future__ import annotations

from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.wire import KI, Holds, decode_varint_untrusted
from roles.protocol.seats import Seat

HEAD_SECONDS: Final = 10.0
"""Seconds within which the first frame must arrive; it fits into a few packets. A slower peer
would hold a stream and some kilobytes."""
FIRST_BYTE_SECONDS: Final = 1.0
"""Seconds within which a stranger's first byte must arrive, since others wait for its seat."""
CONTENT_SECONDS: Final = 5.0
"""Seconds that any content may take, in addition to its bytes at `CONTENT_RATE`."""
CONTENT_RATE: Final = 128 * KI
"""Least bytes per second at which content may arrive: 1 Mbit/s, 64 s for the largest."""
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
        stream: Stream of a peer.
        most: Bytes of the longest frame.
        begun: Bytes that were read before.
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
        stream: Stream of a peer.
        begun: Bytes that were read with the request.
        length: Bytes that the peer has announced.
        seat: Seat of the stream, which counts the bytes and may be taken away.

    Returns:
        None if the seat is lost, or the content takes too long.

    Raises:
        BadMessage: The content has another length, or is cut off.
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
