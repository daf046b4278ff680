"""Authenticated peers, as roles and services see them: messages, streams and who is connected.

Two ways to talk, for two needs. A *message* is fire-and-forget on one long-lived stream per
peer and protocol: in order, never blocking, dropped (and counted) when the peer is gone or too
slow. A *stream* is an ordered pipe with back-pressure, for requests and bulk. The production
side is `p2p.swarm.swarm.SwarmHost` over any `Network`, the simulated one
`sim.node.host.SimHost`; one suite, tests/conformance/test_hosts.py, holds them together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

import trio

from p2p.door import check, check_function, check_has, check_host, check_number
from p2p.errors import (
    BadMessage,
    LimitExceeded,
    LocalProtocolError,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
)
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import AddrSource as AddrSource, Multiaddr
from p2p.wire import KI, MIB, FrameReader, encode_varint, frame

PEER_TROUBLE: Final = (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    LimitExceeded,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)
"""Exceptions that a request or a stream to one peer may raise although this node works
correctly."""
MAX_MESSAGE: Final = MIB
"""Most bytes of one message. Larger things (chunks, submissions) travel on streams."""
MAX_OUTBOX: Final = 4 * MIB
"""Most bytes of messages that may wait for one peer; beyond it messages to that peer are
dropped. It is four largest messages, or 16 s of a heartbeat a millisecond."""


class Stream(trio.abc.HalfCloseableStream):
    """An ordered byte stream to one authenticated peer, for one protocol."""

    peer: PeerId
    protocol: ProtocolId

    def reset(self) -> None:
        """Abandon both directions at once; the other side sees `trio.BrokenResourceError`."""
        raise trio.BrokenResourceError

    async def drained(self, at_most: int = 0) -> None:
        """Return once at most ``at_most`` bytes of what was sent are still on this node.

        `send_all` returns when the last byte is queued; this says when it is on the line. What
        waits in this node's queues counts, and what its kernel has not sent yet; what the line
        and the peer hold does not. A sender that decides late what to send next waits for this
        first, with as many bytes as its line carries while it decides.

        Raises `trio.BrokenResourceError` when they will never leave, `trio.ClosedResourceError`
        if this end was closed, `trio.BusyResourceError` while another task sends.
        """
        raise trio.BrokenResourceError


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream. The stream is closed when the handler returns and reset when it
raises."""

MessageHandler = Callable[[PeerId, bytes], None]
"""Takes one incoming message; must not block. Raising `RemoteProtocolError` costs the peer its
connection.
"""


class PeerState(Enum):
    """The kinds of `PeerEvent`."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    UNREACHABLE = "unreachable"
    """Messages were waiting for the peer, and none of its addresses answered."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A peer connected, disconnected or could not be reached."""

    peer: PeerId
    state: PeerState
    dialled: bool = field(default=False, compare=False)
    """True for an outbound connection, to a peer that we chose."""


PeerFinder = Callable[[PeerId], Awaitable[object]]
"""Looks for the addresses of a peer, and passes them to `Host.add_addrs`. It gives up by
itself, and raises nothing."""
_Function = TypeVar("_Function", bound=Callable[..., object])


class _Registered(Generic[_Function]):
    """Functions that a host calls, each for the length of a block."""

    def __init__(self) -> None:
        self._all: tuple[_Function, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    @contextmanager
    def adding(self, function: _Function) -> Iterator[None]:
        """Call ``function`` as well for the length of the block.

        At its end one registration of the function is removed. The tuple is replaced, not
        changed, so that a listener whose block ends while an event is being told causes no
        other listener to be skipped.
        """
        self._all = (*self._all, function)
        try:
            yield
        finally:
            place = self._all.index(function)
            self._all = self._all[:place] + self._all[place + 1 :]


class PeerWatchers(_Registered[Callable[[PeerEvent], None]]):
    """The listeners of one host."""

    def tell(self, event: PeerEvent) -> None:
        """Call all listeners, in the order in which they came.

        All of them are called, even if one raises: gossip that missed a disconnect because the
        DHT's listener crashed would keep the peer in its mesh for ever. The exception then
        reaches the caller.
        """
        with ExitStack() as calls:
            for listener in reversed(self._all):
                calls.callback(listener, event)


class PeerFinders(_Registered[PeerFinder]):
    """Functions that are called, one after another, to find the address of a peer.

    go-libp2p calls this a routed host.
    """

    async def find(self, peer: PeerId, is_known: Callable[[], bool]) -> None:
        """Call the finders, one after another, until ``is_known`` returns True."""
        for find in self._all:
            if is_known():
                return
            await find(peer)


def check_handler(
    protocol: str,
    served: Container[ProtocolId],
    handler: object,
    *,
    takes_messages: bool = False,
) -> ProtocolId:
    """Return the protocol id that ``protocol`` spells, for a handler that is about to be added.

    Raises:
        ValueError: ``protocol`` spells none, or one that is ``served`` already.
        TypeError: ``handler`` cannot serve streams, or take messages.
    """
    checked = check_protocol(protocol)
    check_function("handler", handler, 1 + takes_messages, is_async=not takes_messages)
    if checked in served:
        raise ValueError(f"{protocol} is served already: end the block that serves it first")
    return checked


def check_protocol(protocol: str) -> ProtocolId:
    """Return the protocol id that ``protocol`` spells. Raises `ValueError` if no peer could ask
    for it, since multistream sends ids as lines of text."""
    check("protocol", protocol, str)
    if (
        not (protocol.startswith("/") and protocol.isascii() and protocol.isprintable())
        or " " in protocol
    ):
        raise ValueError(
            f"{protocol!r} is no protocol id; write for example /example/echo/1.0.0"
        )
    # A line of multistream has 256 bytes, the last a newline.
    if len(protocol) > 255:
        raise ValueError(
            f"a protocol id of {len(protocol)} characters is too long (at most 255)"
        )
    return ProtocolId(protocol)


def check_message(peer: PeerId, protocol: str, message: bytes) -> None:
    """Raise `TypeError` or `LocalProtocolError` unless the message can be sent."""
    if not (isinstance(peer, PeerId) and isinstance(message, bytes)):
        check("peer", peer, PeerId)
        check("message", message, bytes, bytearray, memoryview)
    if not isinstance(protocol, str):
        check("protocol", protocol, str)
    if len(message) > MAX_MESSAGE:
        raise LocalProtocolError(f"a message of {len(message)} bytes (at most {MAX_MESSAGE})")


class Host(Protocol):
    """The local endpoint that owns all connections. Its suite is
    tests/conformance/test_hosts.py."""

    @property
    def peer_id(self) -> PeerId:
        """The peer id of this host."""

    @property
    def addrs(self) -> tuple[Multiaddr, ...]:
        """Addresses of this host, each ending in ``/p2p/``."""

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a live connection, oldest first."""

    def serving(self, protocol: str, handler: StreamHandler) -> AbstractContextManager[None]:
        """Serve incoming streams of ``protocol`` for the length of the block.

        When it ends, streams that are still being served are reset and their handlers
        cancelled, and peers that ask for the protocol are told that it is not supported.
        Entering the block raises `ValueError` if ``protocol`` is no protocol id or is served
        already.
        """

    def receiving(
        self, protocol: str, handler: MessageHandler, *, max_message: int = MAX_MESSAGE
    ) -> AbstractContextManager[None]:
        """Deliver incoming messages of ``protocol`` for the length of the block, and none
        later.

        A message longer than ``max_message`` bytes breaks the protocol. Entering the block
        raises `ValueError` as `serving` does.
        """

    def watching(self, listener: Callable[[PeerEvent], None]) -> AbstractContextManager[None]:
        """Call ``listener`` (which must not block) whenever a peer connects or disconnects, for
        the length of the block."""

    def finding(self, find: PeerFinder) -> AbstractContextManager[None]:
        """Call ``find`` before dialling a peer without a known address, for the length of the
        block."""

    def set_handler(
        self, protocol: str, handler: StreamHandler, *, replaces: bool = False
    ) -> None:
        """Serve incoming streams of ``protocol`` while the host is open.

        Raises `ValueError` as `serving` does, unless the handler ``replaces`` an earlier one.
        """

    def add_addrs(
        self, peer: PeerId, addrs: Sequence[Multiaddr], source: AddrSource = AddrSource.OWNER
    ) -> None:
        """Remember addresses of ``peer``. They are hints; the newest few are kept."""

    def addrs_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Return the last known addresses of ``peer``, newest first, each ending in ``/p2p/``
        and its id.

        They can be handed to `connect_addr` of any host as they are. Empty for an unknown peer.
        """

    async def connect(self, peer: PeerId) -> None:
        """Connect to ``peer`` if there is no connection. Raises `PeerUnreachable`,
        `WrongPeer`."""

    async def connect_addr(self, addr: Multiaddr | str) -> PeerId:
        """Dial an address (or its text) that ends in ``/p2p/`` and an id; return the peer of
        that id."""

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection to ``peer``, if there is one."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Connect if need be and open a stream. Raises `PeerUnreachable`,
        `ProtocolNotSupported`.
        """

    def send(self, peer: PeerId, protocol: str, message: bytes) -> bool:
        """Queue a message, connecting in the background if need be. Return False if it was
        dropped at once."""

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to ``peers``, and room for them, when strangers fill this node.

        Replaces what was protected for the same ``purpose`` ("officers", "neighbours", "work").
        """

    def network_of(self, peer: PeerId) -> str:
        """Return the network of a connected peer, for limits; empty if it is unknown or there
        are no networks.

        Two peers with the same name here are as good as one: see `p2p.swarm.core.limits`.
        """

    def penalise(self, peer: PeerId, points: float, reason: str) -> None:
        """Lower a peer's score; at the limit it is disconnected and refused for a while."""

    def ban(self, peer: PeerId) -> None:
        """Disconnect ``peer``, and refuse it for as long as this host lives."""


async def send_frame(stream: trio.abc.SendStream, payload: bytes) -> None:
    """Send one length-prefixed frame."""
    check_has("stream", stream, "stream", "send_all")
    check("payload", payload, bytes, bytearray, memoryview)
    # From this size on a payload is not copied behind its length prefix: thousands of streams
    # that send one document share its bytes.
    if len(payload) < (4 * KI):
        await stream.send_all(frame(payload))
    else:
        await stream.send_all(encode_varint(len(payload)))
        await stream.send_all(payload)


async def request(
    host: Host, peer: PeerId, protocol: str, payload: bytes, *, max_reply: int = MAX_MESSAGE
) -> bytes:
    """Send a request on a stream of its own and return the answer. The caller sets the
    deadline.

    Raises `PeerUnreachable`, `ProtocolNotSupported`, `trio.BrokenResourceError` when the peer
    goes away, `LimitExceeded` while 256 streams to it are open, `BadMessage` when it answers
    with anything but one frame of at most ``max_reply`` bytes.
    """
    check_host(host)
    check("payload", payload, bytes, bytearray, memoryview)
    check_number("max_reply", max_reply)
    stream = await host.open_stream(peer, protocol)
    async with stream:
        try:
            await send_frame(stream, payload)
            await stream.send_eof()
        except trio.BrokenResourceError:
            # a peer that has heard enough may have answered, and closed, before the last byte
            pass
        reply = await FrameReader(stream, max_reply).receive()
        if reply is None:
            raise BadMessage("the peer closed the stream without an answer")
        return reply


class FrameReceiver(FrameReader):
    """Reads frames from a stranger. The stream may be idle between frames, but not within one:
    a frame that is never completed would hold its bytes for ever."""

    def __init__(self, stream: Stream, max_bytes: int) -> None:
        super().__init__(stream, max_bytes)
        # Seconds within which a frame must be whole after its first byte, even a short one.
        # Bytes per second granted to a longer frame beyond that, as much as two ISDN channels:
        # 1 MiB has 74 s.
        self._patience = 10.0 + max_bytes / (16 * KI)

    async def _receive_rest(self) -> bytes:
        """Receive the rest of a frame. Raises `LimitExceeded` if that takes too long."""
        with trio.move_on_after(self._patience):
            return await super()._receive_rest()
        raise LimitExceeded(f"a frame was not whole within {self._patience:.0f} s")


def serve_requests(
    answer: Callable[[PeerId, bytes], Awaitable[bytes]],
    *,
    max_request: int = MAX_MESSAGE,
    may_have: Callable[[PeerId, int], bool] | None = None,
) -> StreamHandler:
    """Return a `StreamHandler` that answers each frame of a stream with one frame.

    ``may_have`` is asked whether the peer may have an answer of so many bytes, such as
    `p2p.meter.StrangerMeter.allows`; if not, the stream ends without one.
    """
    check_function("answer", answer, 2, is_async=True)
    check_number("max_request", max_request)
    if may_have is not None:
        check_function("may_have", may_have, 2)

    async def serve(stream: Stream) -> None:
        receiver = FrameReceiver(stream, max_request)
        while (payload := await receiver.receive()) is not None:
            reply = await answer(stream.peer, payload)
            check("the reply of answer", reply, bytes, bytearray, memoryview)
            del payload  # neither is kept while the peer takes its time
            if may_have is not None and not may_have(stream.peer, len(reply)):
                return
            await send_frame(stream, reply)
            del reply

    return serve
