"""A submission as it arrives: first its head, by which much is known, then its content."""

from __future__ import annotations

from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.wire import KI, Holds
from roles.protocol.core.messages import SubmissionHead, decode_head_untrusted
from roles.shared.seats import Seat
from roles.shared.sizes import MAX_HEAD

HEAD_SECONDS: Final = 10.0
"""For the head to arrive: it fits into one packet. Who needs longer holds a stream and a
kilobyte."""
CONTENT_SECONDS: Final = 5.0
"""For a content to arrive, however short it is, and on top of that:"""
CONTENT_RATE: Final = 128 * KI
"""Bytes per second that a content takes at most to be worth a seat: 1 Mbit/s, 64 s for the
largest."""
_READ: Final = 64 * KI
"""Bytes taken from a stream at once: one record."""


async def receive_head(stream: Stream) -> SubmissionHead | None:
    """The head of the submission on ``stream``, or None if the peer ends the stream, or takes
    too long.

    Raises `BadMessage` if it is none. Its signature is not looked at.
    """
    data = bytearray()
    with trio.move_on_after(HEAD_SECONDS):
        while (head := decode_head_untrusted(bytes(data))) is None:
            piece = await stream.receive_some(MAX_HEAD)
            if not piece:
                if data:
                    raise BadMessage("the stream ended within the head of a submission")
                return None
            data += piece
        return head
    return None


async def receive_content(stream: Stream, head: SubmissionHead, seat: Seat) -> bytes | None:
    """The whole content, or None if the seat is lost, or it takes too long. Raises
    `BadMessage`."""
    holder = stream if isinstance(stream, Holds) else None
    data = bytearray(head.begun)
    try:
        with trio.move_on_after(CONTENT_SECONDS + head.content_bytes / CONTENT_RATE):
            while len(data) < head.content_bytes and not seat.evicted:
                piece = await stream.receive_some(min(_READ, head.content_bytes - len(data)))
                if not piece:
                    raise BadMessage("the stream ended within a submission")
                data += piece
                seat.received += len(piece)
                del piece  # it is in the content: waiting for more is not to hold it twice
                if holder is not None:
                    holder.keep(len(data))
    finally:
        if holder is not None:
            holder.keep(0)
    return bytes(data) if len(data) == head.content_bytes else None
