"""Yamux without I/O: many ordered streams over one.

Theory of operation
-------------------
The wire is hashicorp's yamux as libp2p uses it: 12-byte headers, four frame types, a window of
256 KiB per stream and direction that WINDOW_UPDATE frames refill. SYN, ACK, FIN and RST may
ride on DATA or on WINDOW_UPDATE. `Mux` is a bytes machine: `receive_data` returns what
happened, `data_to_send` what the peer must get, in pieces that fill one Noise record each
(`p2p.transport.core.yamux_queue` says in which order).

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
"""

from __future__ import annotations

import math
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import LimitExceeded, LocalProtocolError, RemoteProtocolError
from p2p.transport.core.budget import LINGERING_SHARE, MAX_LINGERING, HostBudget
from p2p.transport.core.noise import MAX_PLAINTEXT
from p2p.transport.core.yamux_frames import (
    ACK,
    DATA,
    FIN,
    FULL_WINDOW,
    GO_AWAY,
    HEADER,
    MAX_CONTROL,
    MAX_ID,
    MAX_LATE,
    MAX_SEND_WINDOW,
    MAX_SKIPPED,
    MAX_STREAMS,
    NORMAL,
    PING,
    QUICK,
    RST,
    SYN,
    WINDOW_UPDATE,
    DataReceived,
    EndReceived,
    Event,
    MuxStream,
    PongReceived,
    ProtocolViolated,
    StreamOpened,
    StreamReset,
    WentAway,
)
from p2p.transport.core.yamux_queue import MuxQueue

STREAM_WORK: Final = 32
"""Frames that cost as much as a new stream with its negotiation, its task and its end: 80 to
400 µs against 2 to 4 µs for a frame."""

_NOTHING: Final = bytearray()


class Mux:
    """One side of a yamux connection."""

    def __init__(
        self, *, dialer: bool, record: int = MAX_PLAINTEXT, budget: HostBudget | None = None
    ) -> None:
        """``record`` is the largest piece that `data_to_send` may return; ``budget`` is the
        host's.
        """
        self.frames = 0
        """Frames and pieces of data that came so far, and, added by the streams, proposals:
        what the peer made us look at."""
        self.allowance = math.inf
        """How much more `receive_data` may do: a frame or a piece costs one, a new stream
        `STREAM_WORK`.
        """
        self.rest = bytearray()
        """What the last `receive_data` did not look at, because its allowance was used up."""
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
        self._queue = MuxQueue(record, self._budget)
        self._closed: list[int] = []
        self._header = bytearray()
        self._left = 0  # payload bytes of the current frame still to come
        self._current: MuxStream | None = None  # whose they are; None: of no stream
        self._ends = False  # the current frame carries FIN
        self.gone = False
        """Whether either side went away: no new streams."""

    # What the application does.

    @property
    def stream_ids(self) -> tuple[int, ...]:
        """Streams not yet ended on both sides."""
        return tuple(self._streams)

    @property
    def may_open(self) -> bool:
        """Whether `open_stream` has a chance: no side went away, and there are ids left."""
        return not self.gone and self._next_id <= MAX_ID

    def open_stream(self) -> int:
        """A new stream.

        Raises `LimitExceeded` when too many are open or await the peer's consent, and when the
        peer takes nothing that we say.
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
        self._queue.say(WINDOW_UPDATE, SYN, stream.stream_id, 0)
        return stream.stream_id

    def send(self, stream_id: int, data: memoryview) -> int:
        """Queue what there is room for; returns how many bytes.

        If that is not all, `take_writable` will name the stream once more is welcome. Raises
        `LocalProtocolError` when the stream is not open for sending.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            raise LocalProtocolError(f"stream {stream_id} is not open for sending")
        size = len(data)
        if self._queue.has_room(stream, size):
            self._queue.put(stream, data)
            return size
        room = self._queue.room(stream)
        self._queue.block(stream)
        if room:
            self._queue.put(stream, data[:room])
        return room

    def answer(self, stream_id: int, data: bytes) -> None:
        """Queue our part of a negotiation whatever else is queued: it is short, and cut off it
        is garbage.

        Harmless when the stream is over, as it may be before its owner was told; a peer whose
        window has no room for the answer does not get it.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.finished and len(data) <= stream.send_window:
            self._queue.put(stream, memoryview(data))

    def may_send(self, stream_id: int) -> bool:
        """Whether `send` would not raise: a stream may be over before its owner was told of
        it.
        """
        stream = self._streams.get(stream_id)
        return stream is not None and not stream.finished

    def queued(self, stream_id: int) -> int:
        """Bytes of a stream that `data_to_send` has not returned yet."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.queued

    def shorten(self, record: int) -> None:
        """From now on make pieces of at most ``record`` bytes."""
        self._queue.shorten(record)

    def room(self, stream_id: int) -> int:
        """How many bytes `send` would take now; if none, `take_writable` will name the
        stream.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.finished:
            raise LocalProtocolError(f"stream {stream_id} is not open for sending")
        room = self._queue.room(stream)
        if not room:
            self._queue.block(stream)
        return room

    def send_end(self, stream_id: int) -> None:
        """Say that nothing more follows what is queued. Harmless when said, or when the stream
        is gone.
        """
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
        """The application reads this stream no more; ``unread`` if that loses bytes."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.deaf = True
            if stream.finished:
                self._linger(stream)
            if unread and not stream.remote_finished:
                self._refuse_more(stream)

    def _linger(self, stream: MuxStream) -> None:
        """It is over for us; the peer has yet to end it."""
        ours = self._is_ours(stream.stream_id)
        own = self._lingering[ours]
        if stream.stream_id not in own:
            own[stream.stream_id] = stream
            self._budget.lingering += 1
            if self._budget.lingering > MAX_LINGERING and len(own) > LINGERING_SHARE:
                self._make_room(ours=ours)

    def sweep(self) -> None:
        """Reset what is over for us and was so at the last sweep; the peer has had time to end
        it.
        """
        for lingering in self._lingering:
            for stream in list(lingering.values()):
                if stream.swept:
                    self.reset(stream.stream_id)
                stream.swept = stream.sent_end

    def _make_room(self, *, ours: bool) -> bool:
        """Reset the stream that has been over for us for longest, among ours or the peer's."""
        for stream in self._lingering[ours].values():
            if stream.sent_end:
                self.reset(stream.stream_id)
                return True
        return False

    def abandon(self) -> None:
        """The connection is over: give back to the host's budget what all streams have."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _refuse_more(self, stream: MuxStream) -> None:
        """Let the peer know that it is not read any more, once it has what we have queued."""
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

    def consumed(self, stream_id: int, count: int) -> bool:
        """The application has read ``count`` bytes. Whether the window refills: the peer must
        hear it.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.remote_finished:
            return False
        stream.consumed += count
        if stream.consumed * 2 < stream.window:
            return False
        grant = stream.consumed + self._widen(stream)
        self._queue.say(WINDOW_UPDATE, 0, stream_id, grant)
        stream.receive_window += grant
        stream.consumed = 0
        return True

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
        queue = self._queue
        return bool(queue.small or queue.bulk or queue.control)

    @property
    def is_choked(self) -> bool:
        """Whether so many control frames wait that nothing more should be read: each may need
        an answer.
        """
        return self._queue.control_bytes > MAX_CONTROL

    def data_to_send(self) -> bytearray | None:
        """The next piece for the peer, at most one record long, or None."""
        piece, ended = self._queue.take()
        for stream in ended:
            if stream.abandoned:
                self.reset(stream.stream_id)
            else:
                self._drop_if_over(stream)
        return piece

    def seal(self, count: int) -> None:
        """``count`` bytes more (or fewer) were taken from here and wait for the network."""
        self._queue.seal(count)

    @property
    def has_news(self) -> bool:
        """Whether `take_writable` or `take_closed` would return something."""
        return bool(self._closed or self._queue.writable)

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
        """Take bytes, split anyhow; returns what happened. ``data`` is the machine's from now
        on.

        Stops when its `allowance` is used up: the caller is to come back with the `rest`. When
        the peer breaks the protocol, `ProtocolViolated` comes behind what happened before.
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
        self.rest = data[start:] if start < size else _NOTHING
        return events

    def _receive_payload(
        self, stream: MuxStream, piece: bytearray, events: list[Event]
    ) -> None:
        if not stream.deaf:
            events.append(DataReceived(stream.stream_id, piece))
        else:
            stream.late += len(piece)
            if stream.late > MAX_LATE:
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
        welcome = self._is_first_use(stream_id) and not self.gone
        if not welcome or (self._incoming >= MAX_STREAMS and not self._make_room(ours=False)):
            self._queue.say(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        stream = self._streams[stream_id] = MuxStream(stream_id, self._budget.now())
        stream.acked = True
        self.allowance -= STREAM_WORK
        self._incoming += 1
        self._queue.say(WINDOW_UPDATE, ACK, stream_id, 0)
        events.append(StreamOpened(stream_id))
        return stream

    def _is_ours(self, stream_id: int) -> bool:
        return bool(stream_id % 2) == self._dialer

    def _is_first_use(self, stream_id: int) -> bool:
        """Whether this stream id is new, as far as we remember; from now on it counts as
        used."""
        if stream_id <= self._highest:
            return stream_id in self._skipped and self._skipped.pop(stream_id) is None
        for skipped in range(max(self._highest + 2, stream_id - 2 * MAX_SKIPPED), stream_id, 2):
            self._skipped[skipped] = None
        self._highest = stream_id
        return True

    def _widen(self, stream: MuxStream) -> int:
        """Half a window was read: bytes by which it grows, if that was quick and the host's
        stock allows.
        """
        now = self._budget.now()
        quick = now - stream.refilled <= QUICK
        stream.refilled = now
        wanted = FULL_WINDOW - stream.window
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
        self._queue.forget(stream)
        if self._current is stream:
            self._current = None
        self._closed.append(stream.stream_id)


def _cut(data: bytearray, start: int, end: int) -> bytearray:
    """``data[start:end]``, without copying when that is its end: bytearrays shrink at the front
    for free.
    """
    if end < len(data):
        return data[start:end]
    del data[:start]
    return data
