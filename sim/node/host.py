"""The simulated `Host` (L1): authenticated peers without handshakes, over simulated wires.

Theory of operation
-------------------
One wire per pair of peers carries all their messages and streams, as one TCP connection does in
production. First contact costs four round trips (TCP, Noise, Yamux, identify), a stream one
more. A message is one heap event: it arrives as a plain call of its handler, in the name of the
receiving node, with no task switch. Streams are served by one task each.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import trio

from p2p.concurrency import leaves
from p2p.door import check, check_each, check_function, check_number
from p2p.errors import (
    BadMessage,
    ConfigError,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    ShoalError,
    WrongPeer,
)
from p2p.host import (
    MAX_MESSAGE,
    MAX_OUTBOX,
    AddrSource,
    MessageHandler,
    PeerEvent,
    PeerFinder,
    PeerFinders,
    PeerState,
    PeerWatchers,
    Stream,
    StreamHandler,
    check_handler,
    check_message,
    check_protocol,
)
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr, as_multiaddr
from p2p.offence import Offence
from p2p.swarm.core.gater import ConnectionGater
from sim.kernel.queue import SECOND
from sim.net.fabric import DIAL_TIMEOUT, Direction, Endpoint, Fabric, Wire, tampered
from sim.net.stream import OVERHEAD, SimStream
from sim.node.network import memory_number
from sim.node.world import SimWorld

logger = logging.getLogger(__name__)

DIAL_ROUND_TRIPS: Final = 4
"""TCP 1, Noise 1.5, Yamux and identify the rest, each behind a multistream-select."""


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


class End:
    """One side of a connection."""

    __slots__ = (
        "_extras", "_fabric", "direction", "dropped", "host", "open", "other", "peer",
        "queued", "side", "spoken", "wire",
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


@dataclass(slots=True, eq=False)
class _PendingDial:
    """A connection that is being made, and the tasks and messages that wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    error: ShoalError | None = None
    waiting: list[tuple[ProtocolId, bytes]] = field(default_factory=list)
    waiting_bytes: int = 0


class SimHost:
    """`Host` of a node on the simulated network. Open it with `open_sim_host`."""

    __slots__ = (
        "_addrs", "_closed", "_dials", "_endpoint", "_ends", "_finders", "_gater",
        "_message_handlers",
        "_nursery", "_peer_id", "_queue", "_served", "_traffic", "_watchers", "_world",
        "dropped", "fabric", "handlers", "is_over", "name",
    )  # fmt: skip

    def __init__(
        self, world: SimWorld, fabric: Fabric, endpoint: Endpoint, nursery: trio.Nursery
    ) -> None:
        self.fabric = fabric
        self.name = world.name
        self.handlers: dict[ProtocolId, StreamHandler] = {}
        self.dropped = 0
        """Messages dropped by full outboxes, or sent to no peer."""
        self._world = world
        self._queue = world.simulation.queue
        self._endpoint = endpoint
        self._nursery = nursery
        self._peer_id = world.signer.peer_id
        self._message_handlers: dict[ProtocolId, tuple[MessageHandler, int]] = {}
        self._watchers = PeerWatchers()
        self._finders = PeerFinders()
        self._served: dict[SimHostStream, trio.CancelScope] = {}
        self._ends: dict[PeerId, End] = {}
        self._dials: dict[PeerId, _PendingDial] = {}
        self._gater = ConnectionGater(self._peer_id, self._ends.__contains__)
        self._traffic: dict[PeerId, tuple[int, int]] = {}
        self._addrs = (Multiaddr((("memory", str(endpoint.index)),)).with_peer(self._peer_id),)
        self._closed = False
        self.is_over = False
        """True if the block that it was opened for has ended."""

    def __repr__(self) -> str:
        return f"SimHost({self.name}, {len(self._ends)} peers)"

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addrs(self) -> tuple[Multiaddr, ...]:
        """The host's one address, ``/memory/<n>/p2p/<id>``."""
        return self._addrs

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a live connection, oldest first."""
        return tuple(self._ends)

    def set_handler(
        self, protocol: str, handler: StreamHandler, *, replaces: bool = False
    ) -> None:
        """Serve incoming streams of ``protocol``; see `Host.set_handler`."""
        self._check_open()
        served = () if replaces else (*self.handlers, *self._message_handlers)
        self.handlers[check_handler(protocol, served, handler)] = handler

    @contextmanager
    def serving(self, protocol: str, handler: StreamHandler) -> Iterator[None]:
        """Serve incoming streams of ``protocol`` for the length of the block."""
        self.set_handler(protocol, handler)
        try:
            yield
        finally:
            del self.handlers[ProtocolId(protocol)]
            for stream, scope in list(self._served.items()):
                if stream.protocol == protocol:
                    scope.cancel()

    @contextmanager
    def receiving(
        self, protocol: str, handler: MessageHandler, *, max_message: int = MAX_MESSAGE
    ) -> Iterator[None]:
        """Take incoming messages of ``protocol`` for the length of the block."""
        self._check_open()
        served = (*self.handlers, *self._message_handlers)
        checked = check_handler(protocol, served, handler, takes_messages=True)
        check_number("max_message", max_message, 0, MAX_MESSAGE)
        self._message_handlers[checked] = (handler, max_message)
        try:
            yield
        finally:
            del self._message_handlers[checked]

    @contextmanager
    def watching(self, listener: Callable[[PeerEvent], None]) -> Iterator[None]:
        """Call ``listener`` whenever a peer connects or disconnects, for the length of the
        block."""
        check_function("listener", listener, 1)
        with self._watchers.adding(listener):
            yield

    @contextmanager
    def finding(self, find: PeerFinder) -> Iterator[None]:
        """Ask ``find`` before dialling a peer without a known address, for the length of the
        block."""
        check_function("find", find, 1, is_async=True)
        with self._finders.adding(find):
            yield

    def add_addrs(
        self, peer: PeerId, addrs: Sequence[Multiaddr], source: AddrSource = AddrSource.OWNER
    ) -> None:
        """Remember where ``peer`` may be dialled."""
        if type(peer) is not PeerId:
            check("peer", peer, PeerId)
        addrs = check_each("addrs", addrs, Multiaddr)
        self._gater.add_addrs(peer, addrs, source)

    def addrs_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Return the last known addresses of ``peer``, each ending in ``/p2p/`` and its id."""
        check("peer", peer, PeerId)
        return self._gater.addrs_of(peer)

    def traffic(self, peer: PeerId) -> tuple[int, int]:
        """Return the bytes sent to and received from ``peer``, over all connections."""
        sent, received = self._traffic.get(peer, (0, 0))
        end = self._ends.get(peer)
        if end is not None:
            sent += end.wire.directions[end.side].sent
            received += end.wire.directions[1 - end.side].sent
        return sent, received

    # Connections

    async def connect(self, peer: PeerId) -> None:
        """Connect to ``peer`` unless there is a connection.

        Raises:
            PeerUnreachable: Nothing answers.
            WrongPeer: Another peer answers.
        """
        check("peer", peer, PeerId)
        self._check_open()
        await trio.lowlevel.checkpoint()
        if peer in self._ends:
            return
        self._gater.check_dial(peer, self._world.now())
        dial = self._dials.get(peer) or self._dial(peer)
        await dial.done.wait()
        if dial.error is not None:
            raise type(dial.error)(*dial.error.args)

    async def connect_addr(self, addr: Multiaddr | str) -> PeerId:
        """Dial an address (or its text) that ends in ``/p2p/`` and return the peer.

        Raises:
            ConfigError: The address names no peer.
        """
        addr = as_multiaddr(addr, "dial")
        peer = addr.peer_id
        if peer is None:
            raise ConfigError(f"{addr} must end in /p2p/ and the id of who is to answer")
        self.add_addrs(peer, [addr])
        await self.connect(peer)
        return peer

    def _dial(self, peer: PeerId) -> _PendingDial:
        """Begin to connect; the outcome is decided when the round trips have passed."""
        dial = self._dials[peer] = _PendingDial()
        if self._finders and not self._gater.book.of(peer):
            self._nursery.start_soon(self._find, peer, dial, name=f"{self.name} finds a peer")
        else:
            self._dial_known(peer, dial)
        return dial

    async def _find(self, peer: PeerId, dial: _PendingDial) -> None:
        await self._finders.find(peer, lambda: bool(self._gater.book.of(peer)))
        if self._dials.get(peer) is dial:
            self._dial_known(peer, dial)

    def _dial_known(self, peer: PeerId, dial: _PendingDial) -> None:
        machines = [self._machine(addr) for addr in self._gater.book.of(peer)]
        delays = [self._delay(machine, peer) for machine in machines]
        target = machines[delays.index(min(delays))] if delays else None
        due = self._queue.now + min(delays, default=0)
        self._finish_dial_at(due, peer, dial, target, max(due, self._queue.now + DIAL_TIMEOUT))

    def _finish_dial_at(self, due: int, *dial: Any) -> None:
        self._queue.schedule(due, self._endpoint.owner, "dial", self._finish_dial, *dial)

    def _machine(self, addr: Multiaddr) -> Endpoint | None:
        number = memory_number(addr)
        return self.fabric.at(number) if number is not None else None

    def _delay(self, machine: Endpoint | None, peer: PeerId) -> int:
        """Return the seconds until it is known if ``peer`` is at ``machine``."""
        if machine is None or not self.fabric.reachable(self._endpoint, machine):
            return DIAL_TIMEOUT
        trips = DIAL_ROUND_TRIPS if machine.host is not None else 1
        wrong = machine.host is None or machine.host.peer_id != peer
        # Another peer's answer is no reason to stop waiting for the right one elsewhere.
        return 2 * trips * self.fabric.latency_of(self._endpoint, machine) + (
            DIAL_TIMEOUT // 2 if wrong else 0
        )

    def _finish_dial(
        self, peer: PeerId, dial: _PendingDial, machine: Endpoint | None, timeout: int
    ) -> None:
        """Report the outcome of a dial. ``timeout`` is the nanosecond after which it has
        failed, whether the other process was paused or this one."""
        if self._dials.get(peer) is not dial:
            return
        is_late = self._queue.now > timeout
        if machine is not None and machine.owner.paused_until > self._queue.now:
            if self._queue.now < timeout:
                answers = machine.owner.paused_until
                answers += 2 * self.fabric.latency_of(self._endpoint, machine)
                self._finish_dial_at(min(answers, timeout), peer, dial, machine, timeout)
                return
            is_late = True
        del self._dials[peer]
        if peer not in self._ends:
            dial.error = self._dial_error(peer, None if is_late else machine)
            if dial.error is None:
                assert machine is not None
                assert isinstance(machine.host, SimHost)
                self._join(machine.host)
        dial.done.set()
        end = self._ends.get(peer)
        if end is not None:
            for protocol, message in dial.waiting:
                end.send(protocol, message)
            return
        self._gater.dial_failed(peer, self._world.now())
        if dial.waiting:
            self.dropped += len(dial.waiting)
            self._tell(PeerEvent(peer, PeerState.UNREACHABLE))

    def _dial_error(self, peer: PeerId, machine: Endpoint | None) -> ShoalError | None:
        if (
            machine is None
            or machine.host is None
            or not self.fabric.reachable(self._endpoint, machine)
        ):
            return PeerUnreachable(
                f"{peer!r} does not answer at any of {len(self._gater.book.of(peer))} addresses"
            )
        if machine.host.peer_id != peer:
            return WrongPeer(f"{machine.host.peer_id!r} answered instead of {peer!r}")
        if self.refuses(peer) or machine.host.refuses(self._peer_id):
            return PeerUnreachable(f"{peer!r} and this node do not talk to each other")
        return None

    def _join(self, other: SimHost) -> None:
        wire = self.fabric.connect(self._endpoint, other._endpoint)
        near, far = End(self, other.peer_id, wire, 0), End(other, self._peer_id, wire, 1)
        near.other, far.other = far, near
        wire.on_broken = [near.lose, far.lose]
        self.admit(near)
        other.admit(far)
        self._tell(PeerEvent(near.peer, PeerState.CONNECTED, dialled=True))
        self._queue.schedule(self._queue.now, other._endpoint.owner, "accept", other.greet, far)

    def admit(self, end: End) -> None:
        """Add a connection. Identify has told each side the other's protocols and addresses."""
        self._ends[end.peer] = end
        end.spoken = (*end.spoken, *end.other.host.handlers)
        self._gater.connected(end.peer)
        if not end.direction.dst.spec.nat:
            self.add_addrs(end.peer, end.other.host.addrs, AddrSource.HEARSAY)

    def greet(self, end: End) -> None:
        """Tell this node of a connection that another has made."""
        if end.open:
            self._tell(PeerEvent(end.peer, PeerState.CONNECTED))

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection, if there is one."""
        check("peer", peer, PeerId)
        await trio.lowlevel.checkpoint()
        self._disconnect(peer)

    def _disconnect(self, peer: PeerId) -> None:
        end = self._ends.get(peer)
        if end is not None:
            self._drop(end)

    def give_up(self, wire: Wire) -> None:
        """Close the connection over ``wire``: its other side has been silent for too long."""
        for end in list(self._ends.values()):
            if end.wire is wire:
                self._drop(end)

    def _drop(self, end: End) -> None:
        end.close()
        self.forget(end)

    def forget(self, end: End) -> None:
        """Forget a connection that is gone."""
        if self._ends.get(end.peer) is end:
            self._traffic[end.peer] = self.traffic(end.peer)
            self.dropped += end.dropped
            del self._ends[end.peer]
            self._tell(PeerEvent(end.peer, PeerState.DISCONNECTED))

    def _tell(self, event: PeerEvent) -> None:
        self._watchers.tell(event)

    def _check_open(self) -> None:
        if self.is_over:
            raise trio.ClosedResourceError("this host is closed: its block has ended")

    def close(self) -> None:
        """End all connections; nothing is answered any more."""
        self._closed = True
        if self._endpoint.host is self:
            self._endpoint.host = None
        for end in list(self._ends.values()):
            end.close()
        self._ends.clear()
        for dial in self._dials.values():
            dial.error = PeerUnreachable("this host is closed")
            dial.done.set()
        self._dials.clear()

    def crash(self) -> None:
        """End the process. Later actions of its tasks reach no peer."""
        self._closed = True
        for end in self._ends.values():
            end.wire.on_broken[end.side] = end.shut
        self._ends.clear()

    # Messages and streams

    def send(self, peer: PeerId, protocol: str, message: bytes) -> bool:
        """Queue a message. False if it was dropped at once."""
        check_message(peer, protocol, message)
        self._check_open()
        message = bytes(message)
        end = self._ends.get(peer)
        if end is not None:
            return end.send(ProtocolId(protocol), message)
        if self._closed or not self._gater.may_send(peer, self._world.now()):
            self.dropped += 1
            return False
        dial = self._dials.get(peer) or self._dial(peer)
        if dial.waiting_bytes + len(message) > MAX_OUTBOX:
            self.dropped += 1
            return False
        dial.waiting.append((ProtocolId(protocol), message))
        dial.waiting_bytes += len(message)
        return True

    def take_message(self, end: End, protocol: ProtocolId, message: bytes) -> None:
        """Take a message that has arrived."""
        sender = end.other.direction.src.name
        self._queue.trace.record(
            (self._queue.now, self.name, protocol, sender, zlib.crc32(message))
        )
        taker = self._message_handlers.get(protocol)
        if taker is None:
            self.dropped += 1
            return
        handler, limit = taker
        try:
            if len(message) > limit:
                raise BadMessage(
                    f"a message of {len(message)} bytes is over the limit of {limit}"
                )
            handler(end.peer, message)
        except RemoteProtocolError as error:
            self.penalise(end.peer, Offence.VIOLATION.points, str(error))
            self._drop(end)

    async def open_stream(self, peer: PeerId, protocol: str) -> SimHostStream:
        """Open a stream, and a connection if there is none.

        Raises:
            PeerUnreachable: The peer cannot be reached.
            ProtocolNotSupported: The peer does not serve the protocol.
        """
        asked = check_protocol(protocol)
        await self.connect(peer)
        end = self._ends.get(peer)
        if end is None:
            raise PeerUnreachable(f"{peer!r} has just gone")
        if asked in end.spoken:
            return end.open_stream(asked, None)
        opening = Opening()
        stream = end.open_stream(asked, opening)
        try:
            await opening.done.wait()
        except trio.Cancelled:
            stream.reset()
            raise
        if not end.open:
            raise PeerUnreachable(f"the connection to {peer!r} was lost")
        if not opening.accepted:
            raise ProtocolNotSupported(f"{peer!r} does not speak {protocol}")
        end.spoken = (*end.spoken, asked)
        return stream

    def serve(self, stream: SimHostStream, handler: StreamHandler) -> None:
        """Run ``handler`` on an incoming stream."""
        self._nursery.start_soon(
            self._serve, stream, handler, name=f"{self.name}{stream.protocol}"
        )

    async def _serve(self, stream: SimHostStream, handler: StreamHandler) -> None:
        scope = self._served[stream] = trio.CancelScope()
        try:
            with scope:
                async with stream:
                    await handler(stream)
        except* RemoteProtocolError as errors:
            self.penalise(stream.peer, Offence.VIOLATION.points, str(next(leaves(errors))))
            self._disconnect(stream.peer)
        except* (trio.BrokenResourceError, PeerUnreachable, ProtocolNotSupported) as errors:
            logger.debug("a stream of %r ended early: %s", stream.peer, errors.exceptions)
        finally:
            del self._served[stream]

    # Whom not to talk to

    def refuses(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is banned or over the limit."""
        return self._gater.scores.is_refused(peer, self._world.now())

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to ``peers``: this host closes none for want of room."""
        check("purpose", purpose, str)
        peers = check_each("peers", peers, PeerId)
        self._gater.protect(purpose, peers)

    def network_of(self, peer: PeerId) -> str:
        """Return no network: simulated machines are in none that limits know."""
        check("peer", peer, PeerId)
        return ""

    def penalise(self, peer: PeerId, points: float, reason: str) -> None:
        """Lower a peer's score; at the limit it is disconnected and refused for a while."""
        check("peer", peer, PeerId)
        check_number("points", points, 0, math.inf, int, float)
        logger.info("%r gets %s penalty points: %s", peer, points, reason)
        if self._gater.scores.penalise(peer, points, self._world.now()):
            self._disconnect(peer)

    def ban(self, peer: PeerId) -> None:
        """Disconnect and refuse for as long as this host lives."""
        check("peer", peer, PeerId)
        self._gater.scores.ban(peer)
        self._disconnect(peer)


@asynccontextmanager
async def open_sim_host(world: SimWorld, fabric: Fabric) -> AsyncIterator[SimHost]:
    """Run the host of ``world``'s node for the length of the block."""
    endpoint = fabric.by_name[world.name]
    async with trio.open_nursery() as nursery:
        host = SimHost(world, fabric, endpoint, nursery)
        endpoint.host = host
        try:
            yield host
        finally:
            host.close()
            nursery.cancel_scope.cancel()
    host.is_over = True
