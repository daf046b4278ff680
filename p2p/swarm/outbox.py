"""Messages on their way to peers: one lane, a long-lived stream, per peer and protocol.

A lane exists while its stream does. Its fast path queues a message on the stream within `put`;
only when the peer, or the network, cannot keep up do messages wait here for the lane's task,
and only while some wait is there a task: 1,024 idle peers with two lanes each would hold 8 MiB
of sleeping ones. What waits for one peer is bounded over all of its lanes.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from p2p.host import MAX_OUTBOX
from p2p.identity import PeerId, ProtocolId
from p2p.swarm.core.limits import ServedStream
from p2p.transport.connection import Connection, MuxedStream, Wakeup
from p2p.wire import KI, MIB

Serve = Callable[[MuxedStream, ServedStream], Awaitable[object]]
"""Serves one stream. Neither a peer nor a bug that a peer can trigger makes it raise."""


class Server:
    """A task that serves streams, one after the other. Its owner starts `run` after the first
    `begin`."""

    __slots__ = ("_scope", "_task", "_wakeup", "_work")

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None
        self._wakeup = Wakeup()
        self._work: tuple[MuxedStream, ServedStream] | None = None

    def begin(self, stream: MuxedStream, served: ServedStream) -> bool:
        """Serve ``stream``. Return False if there is no task yet, so that `run` must be
        started."""
        self._work = (stream, served)
        if self._task is None:
            return False
        self._task.context = contextvars.copy_context()
        self._wakeup.set()
        return True

    def abort(self, stream: MuxedStream) -> None:
        """End the service of ``stream``. Nothing happens if it is over."""
        if self._work is not None and self._work[0] is stream:
            self._scope.cancel()

    async def run(self, serve: Serve, idle: list[Server]) -> None:
        """Serve each stream given to `begin`, and wait among the ``idle`` servers in
        between."""
        self._task = trio.lowlevel.current_task()
        with self._scope:
            while self._work is not None:
                await serve(*self._work)
                self._work = None
                # Most tasks of one host that wait for a stream. Requests that follow each other
                # need one. Two records of eight streams each, which is what one pass of the
                # scheduler may bring, need 16.
                if self._scope.cancel_called or len(idle) >= 16:
                    return
                idle.append(self)
                await self._wakeup.wait()


MAX_WAITING: Final = 24 * MIB
"""Most bytes of messages that may wait over all peers. Beyond it, a peer has `MIN_OUTBOX` only:
peers that never read cost each other messages, not those that do. A node has 60 MiB, and stays
under 150 with 16 more queued on streams and 32 unread."""
MIN_OUTBOX: Final = 16 * KI
"""Bytes of messages that may always wait for one peer. With 1,024 connections they are two
thirds of `MAX_WAITING`."""


OpenLane = Callable[[PeerId, ProtocolId], Awaitable[tuple[Connection, MuxedStream]]]


class Lane:
    """The messages of one protocol to one peer."""

    __slots__ = (
        "_stream",
        "connection",
        "is_running",
        "peer",
        "protocol",
        "scope",
        "sweeps",
        "waiting",
    )

    def __init__(self, peer: PeerId, protocol: ProtocolId) -> None:
        self.peer = peer
        self.protocol = protocol
        self.connection: Connection | None = None
        self.is_running = False
        """True if a task is sending the waiting messages."""
        self.scope = trio.CancelScope()
        """Cancel scope of that task, while there is one."""
        self.waiting: list[bytes] = []
        self.sweeps = 0
        """Number of `Outbox.sweep` calls since a message has left."""
        self._stream: MuxedStream | None = None

    @property
    def is_broken(self) -> bool:
        """True if the peer has ended the stream, so that the next message needs a new one."""
        return self._stream is not None and not self._stream.is_open

    def try_send(self, framed: bytes) -> bool:
        """Queue a message on the stream at once, if the stream exists and nothing waits. Return
        True if it was queued."""
        if self._stream is None or self.is_running or self._is_replaced:
            return False
        if not self._stream.try_send(framed):
            return False
        self.sweeps = 0
        return True

    async def run(self, open_lane: OpenLane, sent: Callable[[int], None]) -> None:
        """Send the waiting messages, then return. Raise what opening the stream or sending
        raises."""
        with self.scope:
            while True:
                if self._stream is not None and self._is_replaced:
                    await self._leave(self._stream)
                if self._stream is None:
                    self.connection, self._stream = await open_lane(self.peer, self.protocol)
                if not self.waiting:
                    return
                batch = self._next_batch()
                await self._stream.send_all(b"".join(batch))
                if self.waiting:  # else the lane was closed meanwhile
                    del self.waiting[: len(batch)]
                    sent(sum(map(len, batch)))
                self.sweeps = 0

    @property
    def _is_replaced(self) -> bool:
        return self.connection is not None and self.connection.is_replaced

    async def _leave(self, stream: MuxedStream) -> None:
        """End the stream when the peer has read all of it, so that nothing on the next stream
        overtakes what is still in the relay."""
        self.connection = self._stream = None
        try:
            # Seconds for a peer to read what is on its way over a connection that is being
            # replaced.
            with trio.move_on_after(5.0), suppress(trio.BrokenResourceError):
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        finally:
            stream.reset()

    def end(self) -> None:
        """Release the stream. If a task uses it, the task ends first, and `Outbox.stopped`
        calls this again."""
        if self.is_running:
            self.scope.cancel()
        elif self._stream is not None:
            self._stream.reset()

    def _next_batch(self) -> list[bytes]:
        """Return the messages to be sent together. They stay queued until the stream has taken
        them: of the last message, up to a megabyte stays queued for a peer that reads nothing.
        """
        count = size = 0
        # Bytes of waiting messages joined for one send: a full record, beyond which joining
        # saves no seal.
        while count < len(self.waiting) and size < (64 * KI):
            size += len(self.waiting[count])
            count += 1
        return self.waiting[:count]


class Outbox:
    """All lanes of a host."""

    def __init__(self, start: Callable[[Lane], None]) -> None:
        """Start without lanes. ``start`` runs a lane in the background and calls `stopped` when
        its task ends."""
        self._start = start
        self._lanes: dict[tuple[PeerId, ProtocolId], Lane] = {}
        self._bytes: dict[PeerId, int] = {}
        self._total = 0
        self.dropped = 0
        """Number of messages that were lost here because the peer was gone or too slow."""

    def put(self, peer: PeerId, protocol: ProtocolId, framed: bytes) -> bool:
        """Take a message. Return False, and drop it, if too much waits for the peer."""
        lane = self._lanes.get((peer, protocol))
        if lane is not None and lane.is_broken:
            self.close(lane)
            lane = None
        if lane is not None and lane.try_send(framed):
            return True
        waiting = self._bytes.get(peer, 0)
        after = waiting + len(framed)
        if after > MAX_OUTBOX or (
            self._total + len(framed) > MAX_WAITING and after > MIN_OUTBOX
        ):
            self.dropped += 1
            return False
        if lane is None:
            lane = self._lanes[(peer, protocol)] = Lane(peer, protocol)
        self._bytes[peer] = after
        self._total += len(framed)
        lane.waiting.append(framed)
        if not lane.is_running:
            lane.is_running, lane.scope = True, trio.CancelScope()
            self._start(lane)
        return True

    def has_lane(self, peer: PeerId, protocol: ProtocolId) -> bool:
        """Return True if a stream to the peer is open, or being opened."""
        return (peer, protocol) in self._lanes

    def sent(self, peer: PeerId, count: int) -> None:
        """Record that ``count`` bytes have left the queue."""
        self._total -= count
        left = self._bytes.pop(peer, 0) - count
        if left > 0:
            self._bytes[peer] = left

    def stopped(self, lane: Lane) -> None:
        """Handle the end of a lane's task. If all was sent, the lane waits for more
        messages."""
        lane.is_running = False
        if (
            lane.scope.cancel_called
            or lane.waiting
            or lane.is_broken
            or lane.connection is None
        ):
            self.close(lane)

    def close(self, lane: Lane) -> None:
        """Close a lane. Its waiting messages are lost."""
        lane.end()
        self.dropped += len(lane.waiting)
        self.sent(lane.peer, sum(map(len, lane.waiting)))
        lane.waiting.clear()
        if self._lanes.get((lane.peer, lane.protocol)) is lane:
            del self._lanes[(lane.peer, lane.protocol)]

    def sweep(self) -> list[PeerId]:
        """End the lanes that have been stuck for long. Return the peers that took a message
        since the last sweep."""
        taken: dict[PeerId, None] = {}
        for lane in list(self._lanes.values()):
            if not lane.sweeps:
                taken[lane.peer] = None
            # Sweeps (one each 15 s) without a message leaving, while some wait, after which a
            # lane is given up: a peer that reads nothing for a minute holds up to 4 MiB of
            # ours, and will not miss what it did not read.
            elif lane.waiting and lane.sweeps >= 4:
                self.close(lane)
            lane.sweeps += 1
        return list(taken)

    def count(self, peer: PeerId) -> int:
        """Return the number of lanes to ``peer``."""
        return sum(lane.peer == peer for lane in self._lanes.values())

    def lost(self, connection: Connection) -> None:
        """End the lanes that ran over ``connection``."""
        for lane in list(self._lanes.values()):
            if lane.connection is connection:
                self.close(lane)
