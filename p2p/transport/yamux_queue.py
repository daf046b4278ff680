"""What waits to go to the peer on one yamux connection, and in which order it goes. No I/O.

Control frames go first, then small frames of any stream together in one record, then one large frame of
the next stream in turn. A heartbeat never waits behind more than one record of bulk, and a flood of
heartbeats cannot stop the bulk. Streams queue whole frames with room for their header, so payload is copied
once, and small writes grow into large frames while they wait.
"""

from __future__ import annotations

from collections import deque

from p2p.transport.budget import MAX_OUTGOING, HostBudget
from p2p.transport.yamux_frames import DATA, FIN, HEADER, MAX_CONNECTION_QUEUE, MAX_QUEUED, SMALL, MuxStream


class SendQueue:
    """The outgoing half of a `p2p.transport.yamux.Mux`."""

    def __init__(self, record: int, budget: HostBudget) -> None:
        """``record`` is the largest piece that `take` may return."""
        self._record = record
        self._budget = budget
        self._queued = 0
        self._control = bytearray()
        self._small: deque[MuxStream] = deque()
        self._bulk: deque[MuxStream] = deque()
        self._bulk_turn = False
        self._blocked: dict[int, MuxStream] = {}
        self._writable: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._control or self._small or self._bulk)

    @property
    def control_bytes(self) -> int:
        """Bytes of control frames that wait."""
        return len(self._control)

    def say(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a frame without payload."""
        self._control += HEADER.pack(0, kind, flags, stream_id, length)

    def room(self, stream: MuxStream) -> int:
        """Bytes of payload the stream may queue now."""
        room = min(stream.send_window, MAX_QUEUED - stream.queued, MAX_CONNECTION_QUEUE - self._queued)
        if self._budget.outgoing + room > MAX_OUTGOING:
            room = min(room, self._budget.outgoing_room(self._queued))
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
        while start < size:
            if not segments or len(segments[-1]) >= self._record:
                segments.append(bytearray(HEADER.size))
            step = min(self._record - len(segments[-1]), size - start)
            segments[-1] += data[start : start + step]
            start += step
        self._schedule(stream)

    def block(self, stream: MuxStream) -> None:
        """Remember to say when there is room for the stream again."""
        stream.blocked = True
        self._blocked[stream.stream_id] = stream

    def unblock_if_room(self, stream: MuxStream) -> None:
        """The peer's window has grown."""
        if stream.blocked and self.room(stream):
            self.unblock(stream)

    def unblock(self, stream: MuxStream) -> None:
        """Have `take_writable` name the stream, if it waits."""
        if stream.blocked:
            stream.blocked = False
            del self._blocked[stream.stream_id]
            self._writable.append(stream.stream_id)

    def take_writable(self) -> list[int]:
        """Streams that have been waiting for room and need not any more."""
        if not self._writable:
            return []
        ids, self._writable = self._writable, []
        return ids

    def forget(self, stream: MuxStream) -> None:
        """Throw away what the stream has queued."""
        self.unblock(stream)
        self._queued -= stream.queued
        self._budget.outgoing -= stream.queued
        stream.queued = 0
        stream.segments.clear()
        if stream.scheduled:
            stream.scheduled = False
            (self._small if stream in self._small else self._bulk).remove(stream)

    def take(self) -> tuple[bytearray | None, list[MuxStream]]:
        """The next piece for the peer, or None; and the streams whose FIN is in it."""
        ended: list[MuxStream] = []
        if self._control or (self._small and not (self._bulk and self._bulk_turn)):
            piece = self._gather(ended)
            if piece:
                return piece, ended
        if not self._bulk:
            return None, ended
        self._bulk_turn = False
        return self._take_segment(self._bulk.popleft(), ended), ended

    def _gather(self, ended: list[MuxStream]) -> bytearray:
        out = self._control
        if len(out) > self._record:
            whole = self._record - self._record % HEADER.size
            self._control = out[whole:]
            return out[:whole]
        self._control = bytearray()
        self._bulk_turn = bool(self._small and self._bulk)
        for _ in range(len(self._small)):
            stream = self._small.popleft()
            if stream.queued > SMALL:  # it has grown while it waited
                self._bulk.append(stream)
            elif len(out) + stream.queued + HEADER.size > self._record:
                self._small.appendleft(stream)
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
            self.say(DATA, FIN, stream.stream_id, 0)
            stream.sent_end = True
            ended.append(stream)
        elif stream.segments:
            self._schedule(stream)
        for waiting in list(self._blocked.values()):
            self.unblock_if_room(waiting)
        return segment

    def _schedule(self, stream: MuxStream) -> None:
        if not stream.scheduled:
            stream.scheduled = True
            (self._small if stream.queued <= SMALL else self._bulk).append(stream)
