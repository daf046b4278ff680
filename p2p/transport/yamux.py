"""Yamux: many ordered streams over one. No I/O.

Theory of operation
-------------------
The wire is hashicorp's yamux as libp2p uses it: 12-byte headers, four frame types, a window of 256 KiB
per stream and direction that WINDOW_UPDATE frames refill. SYN, ACK, FIN and RST may ride on DATA or on
WINDOW_UPDATE. `Mux` is a bytes machine: `receive_data` returns what happened, `data_to_send` what the
peer must get, in pieces that fill one Noise record each (`p2p.transport.yamux_queue` says in which order).

*Sending.* Bytes are charged against the peer's window when they are queued, so whatever is queued may be
sent. `send` takes what there is room for and says how much that was.

*Receiving.* Opening or accepting a stream widens its window to 4 MiB at once, as long as the connection's
budget allows, since 256 KiB in flight is 5 MB/s at 50 ms. The window refills as the application reads, half
a window at a time. A peer that overruns a window breaks the protocol. Frames of unknown streams are read
over: they crossed a reset.

*Ending.* A stream lives until both directions ended, or either side reset it. When the application no
longer reads, a little late data is dropped in silence (the answer to a lazy negotiation, say), more
is answered with a reset, so that the peer learns that nobody listens.
"""

from __future__ import annotations

from p2p.errors import LimitExceeded, LocalProtocolError, RemoteProtocolError
from p2p.transport.noise import MAX_PLAINTEXT
from p2p.transport.yamux_frames import (
    ACK,
    DATA,
    FIN,
    FULL_WINDOW,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    MAX_CONTROL,
    MAX_LATE,
    MAX_SEND_WINDOW,
    MAX_STREAMS,
    NORMAL,
    PING,
    RST,
    SYN,
    WINDOW_BUDGET,
    WINDOW_UPDATE,
    DataReceived,
    EndReceived,
    Event,
    MuxStream,
    PongReceived,
    StreamOpened,
    StreamReset,
    WentAway,
)
from p2p.transport.yamux_queue import SendQueue


class Mux:
    """One side of a yamux connection."""

    def __init__(self, *, dialer: bool, record: int = MAX_PLAINTEXT) -> None:
        """``record`` is the largest piece that `data_to_send` may return."""
        self._dialer = dialer
        self._next_id = 1 if dialer else 2
        self._streams: dict[int, MuxStream] = {}
        self._incoming = 0
        self._unacked = 0
        self._budget = WINDOW_BUDGET
        self._queue = SendQueue(record)
        self._closed: list[int] = []
        self._header = bytearray()
        self._left = 0  # payload bytes of the current frame still to come
        self._current: MuxStream | None = None  # whose they are; None: nobody's
        self._ends = False  # the current frame carries FIN
        self.gone = False
        """Whether either side went away: no new streams."""

    # What the application does.

    @property
    def stream_ids(self) -> tuple[int, ...]:
        """Streams not yet ended on both sides."""
        return tuple(self._streams)

    def open_stream(self) -> int:
        """A new stream. Raises `LimitExceeded` when too many are open or await the peer's consent."""
        if self.gone:
            raise LimitExceeded("the connection is going away")
        if self._unacked >= MAX_STREAMS or len(self._streams) - self._incoming >= MAX_STREAMS:
            raise LimitExceeded(f"{MAX_STREAMS} streams are open on this connection")
        stream = MuxStream(self._next_id)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self._unacked += 1
        self._queue.say(WINDOW_UPDATE, SYN, stream.stream_id, self._widen(stream))
        return stream.stream_id

    def send(self, stream_id: int, data: memoryview) -> int:
        """Queue what there is room for; returns how many bytes.

        If that is not all, `take_writable` will name the stream once more is welcome. Raises
        `LocalProtocolError` when the stream is not open for sending.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            raise LocalProtocolError(f"stream {stream_id} is not open for sending")
        room = self._queue.room(stream)
        if room >= len(data):
            self._queue.put(stream, data)
            return len(data)
        self._queue.block(stream)
        if room:
            self._queue.put(stream, data[:room])
        return room

    def may_send(self, stream_id: int) -> bool:
        """Whether `send` would not raise: a stream may be over before anybody was told of it."""
        stream = self._streams.get(stream_id)
        return stream is not None and not stream.finished

    def room(self, stream_id: int) -> int:
        """How many bytes `send` would take now; if none, `take_writable` will name the stream."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            raise LocalProtocolError(f"stream {stream_id} is not open for sending")
        room = self._queue.room(stream)
        if not room:
            self._queue.block(stream)
        return room

    def send_end(self, stream_id: int) -> None:
        """Say that nothing more follows what is queued. Harmless when said, or when the stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            return
        stream.finished = True
        self._queue.unblock(stream)
        if not stream.queued:
            self._queue.say(DATA, FIN, stream_id, 0)
            stream.sent_end = True
            self._drop_if_over(stream)

    def stop_receiving(self, stream_id: int, *, unread: bool) -> None:
        """Nobody will read this stream any more; ``unread`` if something was lost by that."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.deaf = True
            if unread and not stream.remote_finished:
                self._refuse_more(stream)

    def _refuse_more(self, stream: MuxStream) -> None:
        """Let the peer know that nobody listens, once it has what we have queued."""
        if stream.queued:
            stream.abandoned = True
        else:
            self.reset(stream.stream_id)

    def reset(self, stream_id: int) -> None:
        """Abandon both directions. Harmless when the stream is gone."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            self._queue.say(WINDOW_UPDATE, RST, stream_id, 0)

    def consumed(self, stream_id: int, count: int) -> None:
        """The application has read ``count`` bytes: the window may refill."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.remote_finished:
            return
        stream.consumed += count
        if stream.consumed * 2 >= stream.window:
            self._queue.say(WINDOW_UPDATE, 0, stream_id, stream.consumed)
            stream.receive_window += stream.consumed
            stream.consumed = 0

    def ping(self, value: int) -> None:
        """Ask whether the peer is there; a `PongReceived` with ``value`` follows."""
        self._queue.say(PING, SYN, 0, value)

    def go_away(self, code: int = NORMAL) -> None:
        """Tell the peer that no new streams are welcome."""
        self.gone = True
        self._queue.say(GO_AWAY, 0, 0, code)

    # What goes to the peer.

    @property
    def has_data(self) -> bool:
        """Whether `data_to_send` would return something."""
        return bool(self._queue)

    def data_to_send(self) -> bytearray | None:
        """The next piece for the peer, at most one record long, or None."""
        piece, ended = self._queue.take()
        for stream in ended:
            if stream.abandoned:
                self.reset(stream.stream_id)
            else:
                self._drop_if_over(stream)
        return piece

    def take_writable(self) -> list[int]:
        """Streams that were refused bytes and may send again, or are over."""
        return self._queue.take_writable()

    def take_closed(self) -> list[int]:
        """Streams that are over since the last call."""
        if not self._closed:
            return []
        ids, self._closed = self._closed, []
        return ids

    # What comes from the peer.

    def receive_data(self, data: bytearray) -> list[Event]:
        """Take bytes, split anyhow; returns what happened. ``data`` is the machine's from now on.

        Raises `RemoteProtocolError` when the peer breaks the protocol: close the connection.
        """
        events: list[Event] = []
        start, size = 0, len(data)
        while start < size:
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
        if self._queue.control_bytes > MAX_CONTROL:
            raise RemoteProtocolError(f"the peer left {MAX_CONTROL} bytes of control frames unread")
        return events

    def _receive_payload(self, stream: MuxStream, piece: bytearray, events: list[Event]) -> None:
        if not stream.deaf:
            events.append(DataReceived(stream.stream_id, piece))
        else:
            stream.late += len(piece)
            if stream.late > MAX_LATE:
                self._refuse_more(stream)
        if not self._left and self._ends:
            self._receive_end(stream, events)

    def _receive_header(self, fields: tuple[int, int, int, int, int], events: list[Event]) -> None:
        version, kind, flags, stream_id, length = fields
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
                self._queue.say(PING, ACK, 0, length)
            elif flags & ACK:
                events.append(PongReceived(length))
        elif kind == GO_AWAY:
            self.gone = True
            events.append(WentAway(length))
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
            stream.send_window = min(MAX_SEND_WINDOW, stream.send_window + length)
            self._queue.unblock_if_room(stream)
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
        if self.gone or self._incoming >= MAX_STREAMS:
            self._queue.say(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        stream = self._streams[stream_id] = MuxStream(stream_id)
        stream.acked = True
        self._incoming += 1
        self._queue.say(WINDOW_UPDATE, ACK, stream_id, self._widen(stream))
        events.append(StreamOpened(stream_id))
        return stream

    def _is_ours(self, stream_id: int) -> bool:
        return bool(stream_id % 2) == self._dialer

    def _widen(self, stream: MuxStream) -> int:
        extra = FULL_WINDOW - INITIAL_WINDOW
        if self._budget < extra:
            return 0
        self._budget -= extra
        stream.window += extra
        stream.receive_window += extra
        return extra

    def _drop_if_over(self, stream: MuxStream) -> None:
        if stream.sent_end and stream.remote_finished:
            self._drop(stream)

    def _drop(self, stream: MuxStream) -> None:
        if self._streams.pop(stream.stream_id, None) is None:
            return
        if self._is_ours(stream.stream_id):
            self._unacked -= not stream.acked
        else:
            self._incoming -= 1
        self._budget += stream.window - INITIAL_WINDOW
        self._queue.forget(stream)
        if self._current is stream:
            self._current = None
        self._closed.append(stream.stream_id)


def _cut(data: bytearray, start: int, end: int) -> bytearray:
    """``data[start:end]``, without copying when that is its end: bytearrays shrink at the front for free."""
    if end < len(data):
        return data[start:end]
    del data[:start]
    return data
