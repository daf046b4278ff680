"""A connection between two simulated hosts, seen from each side."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol

import trio

from p2p.host import MAX_OUTBOX, Stream, StreamHandler
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from sim.kernel.queue import SECOND
from sim.net.fabric import Direction, Endpoint, Fabric, Wire, tampered
from sim.net.stream import OVERHEAD, SimStream

LAG: Final = 1.0
"""Seconds by which a message's stream may lag behind the other streams of its connection:
several round trips of any two regions (`sim.net.latency` has 0.22 s one way at most), so that
answers, too, may come before what was sent first."""
MAX_STREAMS: Final = 1024
"""Streams of one connection; a peer that opens more is refused."""
_OPEN_BYTES: Final = 64
"""Bytes that open a stream: a Yamux header and a multistream-select proposal."""


class SimHostStream(SimStream, Stream):
    """A stream to one authenticated peer, for one protocol."""

    def __init__(
        self, fabric: Fabric, direction: Direction, end: End, protocol: ProtocolId
    ) -> None:
        super().__init__(fabric, direction)
        self.peer = end.peer
        self.protocol = protocol
        self._end = end

    def __repr__(self) -> str:
        return (
            f"SimHostStream({self._end.host.name} to {self._end.other.host.name},"
            f" {self.protocol})"
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.reset()
        await self.aclose()

    def _ended(self) -> None:
        super()._ended()
        self._end.extras.streams.pop(self, None)


class Opening:
    """A stream whose protocol the other side has yet to accept."""

    __slots__ = ("accepted", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.accepted = False

    def finish(self, accepted: bool) -> None:
        """Report that the answer came, or that the connection is lost."""
        self.accepted = accepted
        self.done.set()


class Extras:
    """State that few of a large swarm's connections need: streams, and messages that go
    astray."""

    __slots__ = ("behind", "openings", "said", "streams")

    def __init__(self) -> None:
        self.streams: dict[SimHostStream, None] = {}
        self.openings: dict[Opening, None] = {}
        self.said: dict[ProtocolId, bytes] = {}
        """Earlier messages that an equivocator may repeat."""
        self.behind: dict[ProtocolId, int] = {}
        """Time until which delayed streams lag."""


class EndOwner(Protocol):
    """The part of a host that one end of a connection needs (`sim.node.host.SimHost`)."""

    name: str
    fabric: Fabric
    handlers: dict[ProtocolId, StreamHandler]

    @property
    def addrs(self) -> tuple[Multiaddr, ...]:
        """Addresses at which the host listens."""

    def take_message(self, end: End, protocol: ProtocolId, message: bytes) -> None:
        """Take a message that has arrived at ``end``."""

    def serve(self, stream: SimHostStream, handler: StreamHandler) -> None:
        """Run ``handler`` on a stream that the other side has opened."""

    def forget(self, end: End) -> None:
        """Forget a connection that is gone."""


class End:
    """One side of a connection."""

    __slots__ = (
        "_extras", "_fabric", "direction", "dropped", "host", "open", "other", "peer",
        "queued", "side", "spoken", "wire",
    )  # fmt: skip

    def __init__(self, host: EndOwner, peer: PeerId, wire: Wire, side: int) -> None:
        self.host = host
        self.peer = peer
        self.wire = wire
        self.side = side
        self.other: End
        self.open = True
        self.queued = 0
        """Bytes of messages sent and not yet handled."""
        self.dropped = 0
        self.spoken: tuple[ProtocolId, ...] = ()
        """Protocols the other side is known to serve: opening one costs no round trip."""
        self._fabric = host.fabric
        self.direction = wire.directions[side]
        """Wire direction for what this side sends."""
        self._extras: Extras | None = None

    @property
    def extras(self) -> Extras:
        """Made when first asked for."""
        if self._extras is None:
            self._extras = Extras()
        return self._extras

    def send(self, protocol: ProtocolId, message: bytes) -> bool:
        """Put a message on the wire; False if too much waits there already."""
        src = self.direction.src
        if src.lies or src.repeats:
            message = self._misspoken(src, protocol, message)
        size = len(message) + OVERHEAD
        if self.queued + size > MAX_OUTBOX:
            self.dropped += 1
            return False
        self.queued += size
        self._fabric.transmit(
            self.direction, size, "message", self.other.take_message, protocol, message
        )
        return True

    def _misspoken(self, src: Endpoint, protocol: ProtocolId, message: bytes) -> bytes:
        """Return the message that a liar or an equivocator sends instead of ``message``."""
        said = self.extras.said
        if src.rng.random() < src.repeats and protocol in said:
            return said[protocol]
        said[protocol] = message
        return tampered(src, message)

    def take_message(self, protocol: ProtocolId, message: bytes, late: bool = False) -> None:
        """Take a message off the wire. ``late`` is True if it was overtaken."""
        lags = self.other.direction.src.lags or (
            self._extras is not None and self._extras.behind
        )
        if lags and not late and self._falls_behind(protocol, message):
            return
        self.other.queued -= len(message) + OVERHEAD
        if self.open:
            self.host.take_message(self, protocol, message)

    def _falls_behind(self, protocol: ProtocolId, message: bytes) -> bool:
        """Return True if messages of other protocols overtake this one; those of its own wait
        behind it.

        Each protocol has a stream of its own: what waits for a window, or for the task that
        reads it, does not hold up the others.
        """
        sender, queue = self.other.direction.src, self._fabric.simulation.queue
        behind = self.extras.behind
        due = behind.get(protocol, 0)
        if sender.rng.random() < sender.lags:
            due = max(due, queue.now + int(sender.rng.random() * LAG * SECOND))
        if due <= queue.now:
            behind.pop(protocol, None)
            return False
        behind[protocol] = due
        queue.schedule(
            due, self.direction.src.owner, "late", self.take_message, protocol, message, True
        )
        return True

    def open_stream(self, protocol: ProtocolId, opening: Opening | None) -> SimHostStream:
        """Begin a stream; with ``opening``, the other side says whether it serves
        ``protocol``."""
        near = SimHostStream(self._fabric, self.direction, self, protocol)
        far = SimHostStream(self._fabric, self.other.direction, self.other, protocol)
        near.join(far)
        self.extras.streams[near] = None
        if opening is not None:
            self.extras.openings[opening] = None
        self._fabric.transmit(
            self.direction, _OPEN_BYTES, "open", self.other.take_stream, far, opening
        )
        return near

    def take_stream(self, stream: SimHostStream, opening: Opening | None) -> None:
        """Take a stream that the other side has opened."""
        handler = self.host.handlers.get(stream.protocol)
        accepted = handler is not None and len(self.extras.streams) < MAX_STREAMS
        if opening is not None:
            self._fabric.transmit(
                self.direction,
                _OPEN_BYTES,
                "negotiate",
                self.other.take_answer,
                opening,
                accepted,
            )
        if handler is None or not accepted:
            stream.reset()
            return
        self.extras.streams[stream] = None
        self.host.serve(stream, handler)

    def take_answer(self, opening: Opening, accepted: bool) -> None:
        """Take the other side's answer whether it serves the protocol."""
        self.extras.openings.pop(opening, None)
        opening.finish(accepted)

    def lose(self) -> None:
        """End the connection: the wire broke, or the other side closed it."""
        self.shut()
        self.host.forget(self)

    def close(self) -> None:
        """Close this side; the other side learns of it later."""
        self.shut()
        self.wire.close(self.side)

    def shut(self) -> None:
        """Break everything that runs over this end."""
        self.open = False
        if self._extras is not None:
            for stream in list(self._extras.streams):
                stream.break_off()
            for opening in list(self._extras.openings):
                opening.finish(False)
            self._extras.openings.clear()
