"""Yamux's numbers: the frame header, the limits, and what a `Mux` reports."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from p2p.identity import ProtocolId
from p2p.wire import KI, MIB

PROTOCOL_ID: Final = ProtocolId("/yamux/1.0.0")

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER: Final = struct.Struct(">BBHII")
"""Version, type, flags, stream id, length."""

INITIAL_WINDOW: Final = 256 * KI
"""Bytes, by the specification."""
FULL_WINDOW: Final = 4 * MIB
"""Bytes. 80 MB/s at 50 ms; 16 MiB measured 5 % faster on loopback and costs four times the
memory.
"""
QUICK: Final = 0.25
"""A window grows when half of it is read within so many seconds: from 0.5 MB/s on, up to a
round trip of half a second. A stream of small messages stays narrow and leaves the stock to
bulk."""
MAX_STREAMS: Final = 256
"""Streams of one connection that the peer, and likewise we, may have open. go-yamux's accept
backlog.
"""
MAX_QUEUED: Final = 256 * KI
"""Bytes one stream may have queued to send: four full records, one batch of the writer."""
MAX_CONNECTION_QUEUE: Final = 8 * MIB
"""Bytes all streams of a connection may have queued: 32 busy streams at full depth."""
MAX_CONTROL: Final = 32 * KI
"""Bytes of control frames that may wait: 24 MiB over 768 connections. With more we stop
reading, which is back-pressure and no blame: most are answers that the peer asked for."""
MAX_SKIPPED: Final = 32
"""Stream ids below the highest that may still come. Ids only grow, but tasks of a go-yamux peer
that open streams at once take their ids in one order and send in another."""
MAX_ID: Final = 2**32 - 1
"""The last stream id: a connection that has used them up opens no more streams."""
MAX_LATE: Final = 4 * KI
"""Bytes silently dropped on a stream that we no longer read: an answer to a negotiation has
70."""
SMALL: Final = 4 * KI
"""Bytes. A stream with no more than this queued goes ahead of bulk, and shares a record with
others.
"""
MAX_SEND_WINDOW: Final = 2**32 - 1
"""Bytes that a peer may allow us at most: updates are 32 bits, and a sum of them must not grow
without end."""

NORMAL, PROTOCOL_FAILURE, INTERNAL_FAILURE = range(3)
"""Reasons for going away."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer opened a stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Bytes of a stream. Call `Mux.consumed` once they are read."""

    stream_id: int
    data: bytearray


@dataclass(frozen=True, slots=True)
class EndReceived:
    """The peer will send nothing more on this stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The peer abandoned a stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class PongReceived:
    """The answer to a ping."""

    value: int


@dataclass(frozen=True, slots=True)
class WentAway:
    """The peer accepts no more streams."""

    code: int


@dataclass(frozen=True, slots=True)
class ProtocolViolated:
    """The peer broke the protocol: close the connection. Always the last event of a machine."""

    reason: str


Event = (
    StreamOpened
    | DataReceived
    | EndReceived
    | StreamReset
    | PongReceived
    | WentAway
    | ProtocolViolated
)


class MuxStream:
    """What the machine knows of one stream: plain fields, changed by `Mux` and `MuxQueue`
    only.
    """

    __slots__ = (
        "abandoned",
        "acked",
        "blocked",
        "consumed",
        "deaf",
        "finished",
        "late",
        "queued",
        "receive_window",
        "refilled",
        "remote_finished",
        "scheduled",
        "segments",
        "send_window",
        "sent_end",
        "stream_id",
        "swept",
        "window",
    )

    def __init__(self, stream_id: int, now: float) -> None:
        self.stream_id = stream_id
        self.refilled = now  # when the application had last read half a window
        self.send_window = INITIAL_WINDOW
        self.window = INITIAL_WINDOW  # what the peer may have in flight
        self.receive_window = INITIAL_WINDOW  # what is left of it
        self.consumed = 0  # read, but not yet given back
        # up to five frames, the first 12 bytes of each still blank
        self.segments: list[bytearray] = []
        self.queued = 0  # their payload
        self.scheduled = False
        self.blocked = False  # a `send` was refused: its task waits
        self.finished = False  # we said, or will say, FIN
        self.sent_end = False
        self.remote_finished = False
        self.deaf = False  # the application reads no more
        self.abandoned = False  # to be reset once its end is sent
        self.late = 0  # bytes that came while deaf
        self.acked = False
        self.swept = False  # over for us, and was so at the last sweep
