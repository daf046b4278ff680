"""One connection between two simulated hosts, seen from each of its two sides."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio

from p2p.host import MAX_OUTBOX, Stream
from p2p.identity import PeerId, ProtocolId
from sim.fabric import Endpoint, Fabric, Lane, Wire, tampered
from sim.queue import SECOND
from sim.stream import OVERHEAD, SimStream

if TYPE_CHECKING:
    from sim.host import SimHost

LAG: Final = 1.0
"""Seconds by which a message's stream may lag behind the other streams of its connection."""
MAX_STREAMS: Final = 1024
"""Streams of one connection; a peer that opens more is refused."""
_OPEN_BYTES: Final = 64
"""A Yamux header and a multistream-select proposal."""


class SimHostStream(SimStream, Stream):
    """A stream to one authenticated peer, for one protocol."""

    def __init__(self, fabric: Fabric, lane: Lane, end: End, protocol: ProtocolId) -> None:
        super().__init__(fabric, lane)
        self.peer = end.peer
        self.protocol = protocol
        self._end = end

    def __repr__(self) -> str:
        return f"SimHostStream({self._end.host.name} to {self._end.other.host.name}, {self.protocol})"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.reset()
        await self.aclose()

    def _ended(self) -> None:
        super()._ended()
        self._end.streams.pop(self, None)


class Opening:
    """A stream whose protocol the other side has yet to accept."""

    __slots__ = ("accepted", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.accepted = False

    def finish(self, accepted: bool) -> None:
        """The answer is there, or the connection is lost."""
        self.accepted = accepted
        self.done.set()


class End:
    """One side of a connection."""

    __slots__ = (
        "_behind", "_fabric", "_lane", "_said", "dropped", "host", "open", "openings", "other", "peer",
        "queued", "side", "spoken", "streams", "wire",
    )  # fmt: skip

    def __init__(self, host: SimHost, peer: PeerId, wire: Wire, side: int) -> None:
        self.host = host
        self.peer = peer
        self.wire = wire
        self.side = side
        self.other: End
        self.open = True
        self.queued = 0
        """Bytes of messages sent and not yet handled."""
        self.dropped = 0
        self.spoken: dict[ProtocolId, None] = {}
        """Protocols the other side is known to serve: opening one costs no round trip."""
        self.streams: dict[SimHostStream, None] = {}
        self.openings: dict[Opening, None] = {}
        self._fabric = host.fabric
        self._lane = wire.lanes[side]
        self._said: dict[ProtocolId, bytes] = {}
        self._behind: dict[ProtocolId, int] = {}
        """Until when the streams lag that do."""

    def send(self, protocol: ProtocolId, message: bytes) -> bool:
        """Put a message on the wire; False if too much waits there already."""
        src = self._lane.src
        if src.lies or src.repeats:
            message = self._misspoken(src, protocol, message)
        size = len(message) + OVERHEAD
        if self.queued + size > MAX_OUTBOX:
            self.dropped += 1
            return False
        self.queued += size
        self._fabric.transmit(self._lane, size, "message", self.other.take_message, protocol, message)
        return True

    def _misspoken(self, src: Endpoint, protocol: ProtocolId, message: bytes) -> bytes:
        """What a liar or an equivocator says in place of ``message``."""
        if src.rng.random() < src.repeats and protocol in self._said:
            return self._said[protocol]
        self._said[protocol] = message
        return tampered(src, message)

    def take_message(self, protocol: ProtocolId, message: bytes, late: bool = False) -> None:
        """A message has come off the wire; ``late`` if it has fallen behind others since."""
        if (self._behind or self.other._lane.src.lags) and not late and self._falls_behind(protocol, message):
            return
        self.other.queued -= len(message) + OVERHEAD
        if self.open:
            self.host.take_message(self, protocol, message)

    def _falls_behind(self, protocol: ProtocolId, message: bytes) -> bool:
        """Whether messages of other protocols overtake this one; those of its own wait behind it.

        Each protocol has a stream of its own: what waits for a window, or for the task that reads it, does
        not hold up the others.
        """
        sender, queue = self.other._lane.src, self._fabric.simulation.queue
        due = self._behind.get(protocol, 0)
        if sender.rng.random() < sender.lags:
            due = max(due, queue.now + int(sender.rng.random() * LAG * SECOND))
        if due <= queue.now:
            self._behind.pop(protocol, None)
            return False
        self._behind[protocol] = due
        queue.schedule(due, self._lane.src.owner, "late", self.take_message, protocol, message, True)
        return True

    def open_stream(self, protocol: ProtocolId, opening: Opening | None) -> SimHostStream:
        """Begin a stream; with ``opening``, the other side says whether it serves ``protocol``."""
        near = SimHostStream(self._fabric, self._lane, self, protocol)
        far = SimHostStream(self._fabric, self.other._lane, self.other, protocol)
        near.join(far)
        self.streams[near] = None
        if opening is not None:
            self.openings[opening] = None
        self._fabric.transmit(self._lane, _OPEN_BYTES, "open", self.other.take_stream, far, opening)
        return near

    def take_stream(self, stream: SimHostStream, opening: Opening | None) -> None:
        """The other side has opened a stream."""
        handler = self.host.handlers.get(stream.protocol)
        accepted = handler is not None and len(self.streams) < MAX_STREAMS
        if opening is not None:
            self._fabric.transmit(
                self._lane, _OPEN_BYTES, "negotiate", self.other.take_answer, opening, accepted
            )
        if handler is None or not accepted:
            stream.reset()
            return
        self.streams[stream] = None
        self.host.serve(stream, handler)

    def take_answer(self, opening: Opening, accepted: bool) -> None:
        """The other side has said whether it serves the protocol."""
        self.openings.pop(opening, None)
        opening.finish(accepted)

    def lose(self) -> None:
        """The wire broke, or the other side closed it."""
        self.shut()
        self.host.forget(self)

    def close(self) -> None:
        """Let go of the wire; the other side will learn of it."""
        self.shut()
        self.wire.close(self.side)

    def shut(self) -> None:
        """Break everything that runs over this end."""
        self.open = False
        for stream in list(self.streams):
            stream.break_off()
        for opening in list(self.openings):
            opening.finish(False)
        self.openings.clear()
