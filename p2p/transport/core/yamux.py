"""Yamux without I/O: many ordered streams over one.

Theory of operation
-------------------
The wire is hashicorp's yamux as libp2p uses it: 12-byte headers, four frame types, a window of
256 KiB per stream and direction that WINDOW_UPDATE frames refill. SYN, ACK, FIN and RST may
ride on DATA or on WINDOW_UPDATE. `Mux` is a bytes machine: `receive_data` returns what
happened, `data_to_send` what the peer must get, in pieces that fill one Noise record each
(`MuxQueue` says in which order).

*Sending.* Bytes are charged against the peer's window when they are queued, so whatever is
queued may be sent. `send` takes what there is room for and says how much that was.

*Receiving.* The window refills as the application reads, half a window at a time, and grows, up
to 4 MiB, when that half was read within a quarter of a second: 256 KiB in flight is 5 MB/s at
50 ms. What windows grow by comes from one stock for all connections of the host
(`p2p.transport.core.budget`). A peer that overruns a window breaks the protocol. Frames of
unknown streams are read over: they crossed a reset.

*Breaking the protocol.* What came before the frame that broke it has happened and is reported;
the last event is `ProtocolViolated`, and whatever comes later is not looked at.

*Ending.* A stream lives until both directions ended, or either side reset it. When the
application no longer reads, a little late data is dropped in silence (the answer to a lazy
negotiation, say), more is answered with a reset, so that the peer learns that it is not read.
A stream that is over for us and that the peer never ends is reset after a while (`sweep`), or
at once when a new stream needs its place.

*Names.* A stream id is used once. Answers that cross a reset are told from a new stream by that
alone.

What waits to go to the peer on one yamux connection, and in which order, without I/O.

Control frames go first, then small frames of any stream together in one record, then one large
frame of the next stream in turn. A heartbeat never waits behind more than one record of bulk,
and a flood of heartbeats cannot stop the bulk. Streams queue whole frames with room for their
header, so payload is copied once, and small writes grow into large frames while they wait.

Yamux's numbers: the frame header, the limits, and what a `Mux` reports.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import LimitExceeded, LocalProtocolError, RemoteProtocolError
from p2p.identity import ProtocolId
from p2p.transport.core.budget import MAX_OUTGOING, HostBudget
from p2p.transport.core.noise import MAX_PLAINTEXT
from p2p.wire import KI, MIB

PROTOCOL_ID: Final = ProtocolId("/yamux/1.0.0")

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER: Final = struct.Struct(">BBHII")
"""Layout of a frame header: version, type, flags, stream id, length."""

INITIAL_WINDOW: Final = 256 * KI
"""Bytes of a new stream's window, by the specification."""
MAX_STREAMS: Final = 256
"""Most streams of one connection that each side may have opened. It is go-yamux's accept
backlog."""
MAX_QUEUED: Final = 256 * KI
"""Most bytes that one stream may have queued to send: four full records, one batch of the
writer."""
MAX_CONTROL: Final = 32 * KI
"""Bytes of waiting control frames above which this side stops reading: 24 MiB over 768
connections. That is back-pressure and no blame, since most are answers that the peer asked
for."""
MAX_SKIPPED: Final = 32
"""Number of stream ids below the highest that may still come. Ids only grow, but tasks of a
go-yamux peer that open streams at once take their ids in one order and send in another."""
SMALL: Final = 4 * KI
"""Bytes up to which a stream's queue counts as small, so that it goes ahead of bulk and shares
a record with others."""

NORMAL, PROTOCOL_FAILURE, INTERNAL_FAILURE = range(3)
"""Codes of the reasons for going away."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Event: the peer opened a stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Event: bytes of a stream came. `Mux.consumed` must be called once they are read."""

    stream_id: int
    data: bytearray


@dataclass(frozen=True, slots=True)
class EndReceived:
    """Event: the peer will send nothing more on this stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamReset:
    """Event: the peer abandoned a stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class ProtocolViolated:
    """Event: the peer broke the protocol, so the connection must be closed. It is always the
    last event of a machine."""

    reason: str


Event = StreamOpened | DataReceived | EndReceived | StreamReset | ProtocolViolated


@dataclass(slots=True, eq=False)
class MuxStream:
    """State of a stream, changed by `Mux` and `MuxQueue` only."""

    stream_id: int
    refilled: float  # when the application had last read half a window
    send_window: int = INITIAL_WINDOW
    window: int = INITIAL_WINDOW  # what the peer may have in flight
    receive_window: int = INITIAL_WINDOW  # what is left of it
    consumed: int = 0  # read, but not yet given back
    # up to five frames, the first 12 bytes of each still blank
    segments: list[bytearray] = field(default_factory=list)
    queued: int = 0  # their payload
    scheduled: bool = False
    blocked: bool = False  # a `send` was refused: its task waits
    finished: bool = False  # we said, or will say, FIN
    sent_end: bool = False
    remote_finished: bool = False
    deaf: bool = False  # the application reads no more
    abandoned: bool = False  # to be reset once its end is sent
    late: int = 0  # bytes that came while deaf
    acked: bool = False
    swept: bool = False  # over for us, and was so at the last sweep


class MuxQueue:
    """The outgoing half of a `p2p.transport.core.yamux.Mux`."""

    def __init__(self, record: int, budget: HostBudget) -> None:
        """Start with nothing queued. ``record`` is the largest piece in bytes that `take` may
        return."""
        self._record = record
        self._budget = budget
        self._queued = 0
        # bytes that were taken from here, and that the network does not take yet
        self._sealed = 0
        self.control = bytearray()
        """Waiting control frames."""
        self.small: list[MuxStream] = []
        self.bulk: list[MuxStream] = []
        """Streams with much to send; `small` has those with little. They are 512 at most, and
        mostly none: an empty deque takes 0.7 KiB."""
        self._bulk_turn = False
        self._blocked: dict[int, MuxStream] = {}
        self.writable: list[int] = []
        """Ids of the streams that `take_writable` will return."""

    def shorten(self, record: int) -> None:
        """Limit new pieces to ``record`` bytes. Pieces that wait already stay whole."""
        self._record = record

    def say(self, kind: int, flags: int, stream_id: int, length: int = 0) -> None:
        """Queue a frame without payload."""
        self.control += HEADER.pack(0, kind, flags, stream_id, length)

    def has_room(self, stream: MuxStream, size: int) -> bool:
        """Return True if `room` is at least ``size``. This takes a third of the time of
        `room`."""
        return (
            size <= stream.send_window
            and stream.queued + size <= MAX_QUEUED
            and self._budget.outgoing + size <= MAX_OUTGOING
        )

    def room(self, stream: MuxStream) -> int:
        """Return the bytes of payload that the stream may queue now."""
        room = min(stream.send_window, MAX_QUEUED - stream.queued)
        if self._budget.outgoing + room > MAX_OUTGOING:
            # A connection may queue a quarter of a record even if others have used up the rest,
            # 16 MiB for 1,024 of them. That costs a third of the bulk speed and keeps messages
            # going.
            spare = 16 * KI - self._queued - self._sealed
            room = min(room, max(MAX_OUTGOING - self._budget.outgoing, spare))
        return room if room > 0 else 0

    def put(self, stream: MuxStream, data: memoryview) -> None:
        """Queue payload against the peer's window, which must have room."""
        size = len(data)
        if not size:
            return  # a frame without payload would say nothing
        stream.send_window -= size
        stream.queued += size
        self._queued += size
        self._budget.outgoing += size
        segments, start = stream.segments, 0
        if segments and len(segments[-1]) + size <= self._record:
            segments[-1] += data
            start = size
        while start < size:
            if not segments or len(segments[-1]) >= self._record:
                segments.append(bytearray(HEADER.size))
            step = min(self._record - len(segments[-1]), size - start)
            segments[-1] += data[start : start + step]
            start += step
        self._schedule(stream)

    def block(self, stream: MuxStream) -> None:
        """Have `take_writable` return the stream once it has room again."""
        stream.blocked = True
        self._blocked[stream.stream_id] = stream

    def unblock(self, stream: MuxStream, *, is_over: bool = False) -> None:
        """Have `take_writable` return the stream, if it is blocked, and has room or
        ``is_over``."""
        if stream.blocked and (is_over or self.room(stream)):
            stream.blocked = False
            del self._blocked[stream.stream_id]
            self.writable.append(stream.stream_id)

    def forget(self, stream: MuxStream) -> None:
        """Discard the bytes that the stream has queued."""
        self.unblock(stream, is_over=True)
        self._queued -= stream.queued
        self._budget.outgoing -= stream.queued
        stream.queued = 0
        stream.segments.clear()
        if stream.scheduled:
            stream.scheduled = False
            (self.small if stream in self.small else self.bulk).remove(stream)

    def seal(self, count: int) -> None:
        """Count ``count`` more sealed bytes that wait for the network; fewer if negative."""
        self._sealed += count
        self._budget.outgoing += count
        if count < 0:
            self._unblock_all()

    def _unblock_all(self) -> None:
        for waiting in list(self._blocked.values()):
            self.unblock(waiting)

    def take(self) -> tuple[bytearray | None, Sequence[MuxStream]]:
        """Return the next piece for the peer, or None, and the streams whose last queued byte
        is in it."""
        if not (self.bulk or self.control or self.small):
            return None, ()
        ended: list[MuxStream] = []
        if self.control or (self.small and not (self.bulk and self._bulk_turn)):
            piece = self._gather(ended)
            if piece:
                return piece, ended
        if not self.bulk:
            return None, ended
        self._bulk_turn = False
        return self._take_segment(self.bulk.pop(0), ended), ended

    def _gather(self, ended: list[MuxStream]) -> bytearray:
        out = self.control
        if len(out) > self._record:
            whole = self._record - self._record % HEADER.size
            self.control = out[whole:]
            return out[:whole]
        self.control = bytearray()
        self._bulk_turn = bool(self.small and self.bulk)
        for _ in range(len(self.small)):
            stream = self.small.pop(0)
            if stream.queued > SMALL:  # it has grown while it waited
                self.bulk.append(stream)
            elif len(out) + stream.queued + HEADER.size > self._record:
                self.small.insert(0, stream)
                break
            else:
                out += self._take_segment(stream, ended)
        return out

    def _take_segment(self, stream: MuxStream, ended: list[MuxStream]) -> bytearray:
        segment = stream.segments.pop(0)
        payload = len(segment) - HEADER.size
        stream.queued -= payload
        self._queued -= payload
        self._budget.outgoing -= payload
        stream.scheduled = False
        HEADER.pack_into(segment, 0, 0, DATA, 0, stream.stream_id, payload)
        if stream.finished and not stream.segments:
            # A frame of its own: js-libp2p drops the payload of a DATA frame that carries FIN.
            self.say(DATA, FIN, stream.stream_id)
            stream.sent_end = True
            ended.append(stream)
        elif stream.segments:
            self._schedule(stream)
        if self._blocked:
            self._unblock_all()
        return segment

    def _schedule(self, stream: MuxStream) -> None:
        if not stream.scheduled:
            stream.scheduled = True
            (self.small if stream.queued <= SMALL else self.bulk).append(stream)


class Mux:
    """One side of a Yamux connection."""

    def __init__(
        self, *, dialer: bool, record: int = MAX_PLAINTEXT, budget: HostBudget | None = None
    ) -> None:
        """Start a connection. ``record`` is the largest piece in bytes that `data_to_send` may
        return; ``budget`` is the host's."""
        self.frames = 0
        """Number of frames and pieces of data that came so far, plus the proposals that the
        streams add. It measures the work that the peer caused."""
        self.allowance = math.inf
        """Work that `receive_data` may still do. A frame or a piece costs one, a new stream
        32."""
        self.rest = bytearray()
        """Bytes that the last `receive_data` left over because its allowance was used up."""
        self._dialer = dialer
        self._next_id = 1 if dialer else 2
        self._highest = 0 if dialer else -1  # of the peer's ids
        # its ids below that have not come yet
        self._skipped: BoundedDict[int, None] = BoundedDict(MAX_SKIPPED)
        self._broken = False
        # Over for us, but not for the peer, oldest first: the peer's streams, and ours.
        self._lingering: tuple[dict[int, MuxStream], dict[int, MuxStream]] = ({}, {})
        self._streams: dict[int, MuxStream] = {}
        self._incoming = 0
        self._unacked = 0
        self._budget = budget or HostBudget(lambda: 0.0)
        self.queue = MuxQueue(record, self._budget)
        self._closed: list[int] = []
        self._header = bytearray()
        self._left = 0  # payload bytes of the current frame still to come
        self._current: MuxStream | None = None  # whose they are; None: of no stream
        self._ends = False  # the current frame carries FIN
        self.gone = False
        """True if either side went away, so that there are no new streams."""

    # What the application does.

    @property
    def stream_ids(self) -> tuple[int, ...]:
        """Ids of the streams that are not yet ended on both sides."""
        return tuple(self._streams)

    @property
    def may_open(self) -> bool:
        """True if `open_stream` can succeed: no side went away, and there are ids left."""
        return not self.gone and self._next_id < 2**32

    def open_stream(self) -> int:
        """Open a stream and return its id.

        Raises `LimitExceeded` if too many are open or await the peer's consent, or if the peer
        takes nothing that we send.
        """
        if not self.may_open:
            raise LimitExceeded("the connection takes no more streams")
        full = (
            self._unacked >= MAX_STREAMS or len(self._streams) - self._incoming >= MAX_STREAMS
        )
        if full and not self._make_room(ours=True):
            raise LimitExceeded(f"{MAX_STREAMS} streams are open on this connection")
        if self.is_choked:
            raise LimitExceeded(
                f"the peer has yet to take {MAX_CONTROL} bytes of control frames"
            )
        stream = MuxStream(self._next_id, self._budget.now())
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self._unacked += 1
        self.queue.say(WINDOW_UPDATE, SYN, stream.stream_id, 0)
        return stream.stream_id

    def send(self, stream_id: int, data: memoryview) -> int:
        """Queue as much as there is room for, and return how many bytes that is.

        If that is not all, `take_writable` returns the stream once there is room. Raises
        `LocalProtocolError` if the stream is not open for sending.
        """
        stream = self._sending(stream_id)
        size = len(data)
        if self.queue.has_room(stream, size):
            self.queue.put(stream, data)
            return size
        room = self.queue.room(stream)
        self.queue.block(stream)
        if room:
            self.queue.put(stream, data[:room])
        return room

    def answer(self, stream_id: int, data: bytes) -> None:
        """Queue our part of a negotiation, whatever else is queued: it is short, and useless if
        cut.

        Nothing happens if the stream is over, as it may be before its owner was told. A peer
        whose window has no room for the answer does not get it.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.finished and len(data) <= stream.send_window:
            self.queue.put(stream, memoryview(data))

    def queued(self, stream_id: int) -> int:
        """Return the bytes of a stream that `data_to_send` has not returned yet."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.queued

    def room(self, stream_id: int) -> int:
        """Return the bytes that `send` would take now. If none, `take_writable` will return the
        stream."""
        stream = self._sending(stream_id)
        room = self.queue.room(stream)
        if not room:
            self.queue.block(stream)
        return room

    def _sending(self, stream_id: int) -> MuxStream:
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            raise LocalProtocolError(f"stream {stream_id} is not open for sending")
        return stream

    def send_end(self, stream_id: int) -> None:
        """Send the end of the stream behind the queued bytes. A repeated call, or one for a
        stream that is gone, does nothing."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            return
        stream.finished = True
        self.queue.unblock(stream, is_over=True)
        if not stream.queued:
            self.queue.say(DATA, FIN, stream_id)
            stream.sent_end = True
            self._drop_if_over(stream)

    def stop_receiving(self, stream_id: int, *, unread: bool) -> None:
        """Record that the application no longer reads this stream. ``unread`` is True if this
        loses bytes."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.deaf = True
            if stream.finished:
                self._linger(stream)
            if unread and not stream.remote_finished:
                self._refuse_more(stream)

    def _linger(self, stream: MuxStream) -> None:
        """Record a stream that this side has ended and the peer has not."""
        ours = self._is_ours(stream.stream_id)
        own = self._lingering[ours]
        if stream.stream_id not in own:
            own[stream.stream_id] = stream
            self._budget.lingering += 1
            # Each takes 0.45 KiB until its peer ends it or, after a minute, a sweep does: 256
            # on each of 768 connections were 86 MiB. A connection keeps a few of each side.
            if self._budget.lingering > 16_384 and len(own) > 32:
                self._make_room(ours=ours)

    def sweep(self) -> None:
        """Reset the streams that the peer had still not ended at the last sweep and has not
        ended since."""
        for lingering in self._lingering:
            for stream in list(lingering.values()):
                if stream.swept:
                    self.reset(stream.stream_id)
                stream.swept = stream.sent_end

    def _make_room(self, *, ours: bool) -> bool:
        """Reset the stream that has waited longest for the peer to end it, among ours or the
        peer's."""
        for stream in self._lingering[ours].values():
            if stream.sent_end:
                self.reset(stream.stream_id)
                return True
        return False

    def abandon(self) -> None:
        """Give back to the host's budget what all streams hold, because the connection is
        over."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _refuse_more(self, stream: MuxStream) -> None:
        """Reset the stream, once the peer has what we have queued, to tell the peer that it is
        not read."""
        if stream.queued:
            stream.abandoned = True
        else:
            self.reset(stream.stream_id)

    def reset(self, stream_id: int) -> None:
        """Abandon both directions. A stream that is gone is left alone."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            self.queue.say(WINDOW_UPDATE, RST, stream_id, 0)

    def consumed(self, stream_id: int, count: int) -> bool:
        """Record that the application has read ``count`` bytes. Return True if the window is
        refilled, of which the peer must hear."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.remote_finished:
            return False
        stream.consumed += count
        if stream.consumed * 2 < stream.window:
            return False
        grant = stream.consumed + self._widen(stream)
        self.queue.say(WINDOW_UPDATE, 0, stream_id, grant)
        stream.receive_window += grant
        stream.consumed = 0
        return True

    def ping(self, value: int) -> None:
        """Ping the peer, which echoes ``value``."""
        self.queue.say(PING, SYN, 0, value)

    def go_away(self, code: int = NORMAL) -> None:
        """Tell the peer that this side accepts no new streams."""
        self.gone = True
        self.queue.say(GO_AWAY, 0, 0, code)

    # What goes to the peer.

    @property
    def has_data(self) -> bool:
        """True if `data_to_send` would return something."""
        queue = self.queue
        return bool(queue.small or queue.bulk or queue.control)

    @property
    def is_choked(self) -> bool:
        """True if so many control frames wait that nothing more should be read, since each
        frame may need an answer."""
        return len(self.queue.control) > MAX_CONTROL

    def data_to_send(self) -> bytearray | None:
        """Return the next piece for the peer, at most one record long, or None."""
        piece, ended = self.queue.take()
        for stream in ended:
            if stream.abandoned:
                self.reset(stream.stream_id)
            else:
                self._drop_if_over(stream)
        return piece

    @property
    def has_news(self) -> bool:
        """True if `take_writable` or `take_closed` would return something."""
        return bool(self._closed or self.queue.writable)

    def take_writable(self) -> list[int]:
        """Return, and forget, the streams that were refused bytes and may send again, or are
        over."""
        ids, self.queue.writable = self.queue.writable, []
        return ids

    def take_closed(self) -> list[int]:
        """Return the streams that ended since the last call."""
        ids, self._closed = self._closed, []
        return ids

    # What comes from the peer.

    def receive_data(self, data: bytearray) -> list[Event]:
        """Take bytes, split in any way, and return the events in them. The machine owns
        ``data`` from now on.

        It stops when its `allowance` is used up; the caller must come back with the `rest`. If
        the peer breaks the protocol, `ProtocolViolated` follows the events before that.
        """
        events: list[Event] = []
        start, size = 0, 0 if self._broken else len(data)
        try:
            while start < size and self.allowance > 0:
                if self._left:
                    end = min(size, start + self._left)
                    self._left -= end - start
                    if self._current is not None:
                        self._receive_payload(self._current, _cut(data, start, end), events)
                    start = end
                elif not self._header and size - start >= HEADER.size:
                    self._receive_header(HEADER.unpack_from(data, start), events)
                    start += HEADER.size
                else:
                    missing = HEADER.size - len(self._header)
                    self._header += data[start : start + missing]
                    start += missing
                    if len(self._header) == HEADER.size:
                        fields = HEADER.unpack(self._header)
                        self._header.clear()
                        self._receive_header(fields, events)
        except RemoteProtocolError as error:
            self._broken = True
            start = size
            events.append(ProtocolViolated(str(error)))
        self.frames += 1
        self.allowance -= 1  # for a piece without a header in it
        self.rest = data[start:] if start < size else bytearray()
        return events

    def _receive_payload(
        self, stream: MuxStream, piece: bytearray, events: list[Event]
    ) -> None:
        if not stream.deaf:
            events.append(DataReceived(stream.stream_id, piece))
        else:
            stream.late += len(piece)
            if stream.late > 4 * KI:  # an answer to a negotiation has 70 bytes
                self._refuse_more(stream)
        if not self._left and self._ends:
            self._receive_end(stream, events)

    def _receive_header(
        self, fields: tuple[int, int, int, int, int], events: list[Event]
    ) -> None:
        version, kind, flags, stream_id, length = fields
        self.frames += 1
        self.allowance -= 1
        if version != 0:
            raise RemoteProtocolError(f"yamux version {version} is unknown")
        if kind in (DATA, WINDOW_UPDATE):
            stream = self._find(stream_id, flags, events)
            if kind == DATA:
                self._left = length
                self._current = stream
            if stream is not None:
                self._receive_stream_frame(stream, kind, flags, length, events)
        elif kind == PING:
            if flags & SYN:
                self.queue.say(PING, ACK, 0, length)
        elif kind == GO_AWAY:
            self.gone = True
        else:
            raise RemoteProtocolError(f"yamux frame type {kind} is unknown")

    def _receive_stream_frame(
        self, stream: MuxStream, kind: int, flags: int, length: int, events: list[Event]
    ) -> None:
        if flags & ACK and not stream.acked:
            stream.acked = True
            self._unacked -= 1
        if flags & RST:
            events.append(StreamReset(stream.stream_id))
            self._drop(stream)
            return
        if kind == WINDOW_UPDATE:
            stream.send_window += length
            self.queue.unblock(stream)
        else:
            if length > stream.receive_window:
                raise RemoteProtocolError(f"stream {stream.stream_id} overran its window")
            if length and stream.remote_finished:
                raise RemoteProtocolError(f"data on stream {stream.stream_id} after its end")
            stream.receive_window -= length
            self._ends = bool(flags & FIN)
        if flags & FIN and not self._left:
            self._receive_end(stream, events)

    def _receive_end(self, stream: MuxStream, events: list[Event]) -> None:
        if not stream.remote_finished:
            stream.remote_finished = True
            events.append(EndReceived(stream.stream_id))
            self._drop_if_over(stream)

    def _find(self, stream_id: int, flags: int, events: list[Event]) -> MuxStream | None:
        stream = self._streams.get(stream_id)
        if not flags & SYN:
            return stream
        if stream is not None:
            raise RemoteProtocolError(f"stream {stream_id} was opened twice")
        if stream_id == 0 or self._is_ours(stream_id):
            raise RemoteProtocolError(f"the peer may not open stream {stream_id}")
        welcome = self._is_first_use(stream_id) and not self.gone
        if not welcome or (self._incoming >= MAX_STREAMS and not self._make_room(ours=False)):
            self.queue.say(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        stream = self._streams[stream_id] = MuxStream(stream_id, self._budget.now())
        stream.acked = True
        # Its negotiation, its task and its end cost 80 to 400 µs, against 2 to 4 for a frame.
        self.allowance -= 32
        self._incoming += 1
        self.queue.say(WINDOW_UPDATE, ACK, stream_id, 0)
        events.append(StreamOpened(stream_id))
        return stream

    def _is_ours(self, stream_id: int) -> bool:
        return bool(stream_id % 2) == self._dialer

    def _is_first_use(self, stream_id: int) -> bool:
        """Return True if this stream id is new, as far as we remember, and mark it as used."""
        if stream_id <= self._highest:
            return stream_id in self._skipped and self._skipped.pop(stream_id) is None
        for skipped in range(max(self._highest + 2, stream_id - 2 * MAX_SKIPPED), stream_id, 2):
            self._skipped[skipped] = None
        self._highest = stream_id
        return True

    def _widen(self, stream: MuxStream) -> int:
        """Return the bytes by which the window grows after half of it was read. It is 0 unless
        that was quick and the host's stock allows it."""
        now = self._budget.now()
        # From 0.5 MB/s on, up to a round trip of half a second. Streams of small messages stay
        # narrow. The largest window carries 80 MB/s at 50 ms; 16 MiB measured 5 % faster on
        # loopback and cost four times the memory.
        quick = now - stream.refilled <= 0.25
        stream.refilled = now
        wanted = 4 * MIB - stream.window
        if not quick or not wanted:
            return 0
        extra = self._budget.widen(self, stream, wanted)
        stream.window += extra
        return extra

    def _drop_if_over(self, stream: MuxStream) -> None:
        if stream.sent_end and stream.remote_finished:
            self._drop(stream)

    def _drop(self, stream: MuxStream) -> None:
        if self._streams.pop(stream.stream_id, None) is None:
            return
        ours = self._is_ours(stream.stream_id)
        if ours:
            self._unacked -= not stream.acked
        else:
            self._incoming -= 1
        if self._lingering[ours].pop(stream.stream_id, None) is not None:
            self._budget.lingering -= 1
        self._budget.narrow(stream)
        self.queue.forget(stream)
        if self._current is stream:
            self._current = None
        self._closed.append(stream.stream_id)


def _cut(data: bytearray, start: int, end: int) -> bytearray:
    """Return ``data[start:end]``, without copying if that is its end: bytearrays shrink at the
    front for free."""
    if end < len(data):
        return data[start:end]
    del data[:start]
    return data
