"""What waits to go to the peer on one yamux connection, and in which order, without I/O.

Control frames go first, then small frames of any stream together in one record, then one large
frame of the next stream in turn. A heartbeat never waits behind more than one record of bulk,
and a flood of heartbeats cannot stop the bulk. Streams queue whole frames with room for their
header, so payload is copied once, and small writes grow into large frames while they wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p.transport.core.budget import MAX_OUTGOING, HostBudget
from p2p.transport.core.yamux_frames import (
    DATA,
    FIN,
    HEADER,
    MAX_CONNECTION_QUEUE,
    MAX_QUEUED,
    SMALL,
    MuxStream,
)


class MuxQueue:
    """The outgoing half of a `p2p.transport.core.yamux.Mux`."""

    def __init__(self, record: int, budget: HostBudget) -> None:
        """``record`` is the largest piece that `take` may return."""
        self._record = record
        self._budget = budget
        self._queued = 0
        # bytes that were taken from here, and that the network does not take yet
        self._sealed = 0
        self.control = bytearray()
        """Control frames that wait."""
        self.small: list[MuxStream] = []
        self.bulk: list[MuxStream] = []
        """Streams with something to send: little, and much. 512 at most, and mostly none: an
        empty deque takes 0.7 KiB."""
        self._bulk_turn = False
        self._blocked: dict[int, MuxStream] = {}
        self.writable: list[int] = []
        """Streams that `take_writable` will name."""

    def shorten(self, record: int) -> None:
        """Fill pieces of at most ``record`` bytes from now on; those that wait stay whole."""
        self._record = record

    @property
    def control_bytes(self) -> int:
        """Bytes of control frames that wait."""
        return len(self.control)

    def say(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a frame without payload."""
        self.control += HEADER.pack(0, kind, flags, stream_id, length)

    def has_room(self, stream: MuxStream, size: int) -> bool:
        """Whether `room` is at least ``size``, which takes a third of the time to say."""
        return (
            size <= stream.send_window
            and stream.queued + size <= MAX_QUEUED
            and self._queued + size <= MAX_CONNECTION_QUEUE
            and self._budget.outgoing + size <= MAX_OUTGOING
        )

    def room(self, stream: MuxStream) -> int:
        """Bytes of payload the stream may queue now."""
        room = min(
            stream.send_window, MAX_QUEUED - stream.queued, MAX_CONNECTION_QUEUE - self._queued
        )
        if self._budget.outgoing + room > MAX_OUTGOING:
            room = min(room, self._budget.outgoing_room(self._queued + self._sealed))
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
            self.writable.append(stream.stream_id)

    def take_writable(self) -> list[int]:
        """Streams that have been waiting for room and need not any more."""
        if not self.writable:
            return []
        ids, self.writable = self.writable, []
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
            (self.small if stream in self.small else self.bulk).remove(stream)

    def seal(self, count: int) -> None:
        """``count`` bytes more (or fewer) wait for the network."""
        self._sealed += count
        self._budget.outgoing += count
        if count < 0:
            self._unblock_all()

    def _unblock_all(self) -> None:
        for waiting in list(self._blocked.values()):
            self.unblock_if_room(waiting)

    def take(self) -> tuple[bytearray | None, Sequence[MuxStream]]:
        """The next piece for the peer, or None; and the streams whose FIN is in it."""
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
            self.say(DATA, FIN, stream.stream_id, 0)
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
