"""Circuits as a `p2p.network.Network`: a dial asks a relay for one, listening is a reservation.

What a dial returns is the raw stream through the relay; Noise and Yamux run inside of it, end
to end, as over TCP. Addresses that name no relay go to the network below.
"""

from __future__ import annotations

import logging

import trio

from p2p.circuit.messages import (
    HOP_ID,
    HopMessage,
    HopStatus,
    HopType,
    StopMessage,
    StopType,
    check_voucher_untrusted,
    decode_hop_untrusted,
    decode_stop_untrusted,
)
from p2p.circuit.relay import PATIENCE, CircuitHost, receive_message
from p2p.errors import BadMessage, ConfigError, PeerUnreachable
from p2p.host import PEER_TROUBLE, AddrSource, PeerEvent, PeerState, Stream, send_frame
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.network import Listener, Network, PunchingNetwork
from p2p.world import World

logger = logging.getLogger(__name__)


class CircuitStream(trio.abc.HalfCloseableStream):
    """A byte stream through a relay (a `p2p.transport.connection.AddressedStream`)."""

    def __init__(self, stream: Stream, remote_addr: Multiaddr) -> None:
        self._stream = stream
        self.remote_addr = remote_addr
        self.closed = trio.Event()

    def has_gone(self) -> bool:
        """Return False, since only a reader of the stream can know."""
        return False

    def has_spoken(self) -> bool:
        """Return False, since only a reader of the stream can know."""
        return False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        self.closed.set()
        await self._stream.aclose()


class CircuitListener:
    """Accepts circuits at one relay as long as its reservation is renewed."""

    def __init__(self, network: CircuitNetwork, addr: Multiaddr, relay: PeerId) -> None:
        self._network = network
        self._addr = addr
        self.relay = relay
        self.renew_at = 0.0
        """Time of the next renewal, on the world's monotonic clock."""
        # At most 16 circuits wait to be accepted.
        self._send, self._receive = trio.open_memory_channel[CircuitStream | None](16)

    @property
    def addr(self) -> Multiaddr:
        """Our address through the relay."""
        return self._addr

    def offer(self, stream: CircuitStream | None) -> bool:
        """Put a circuit into the backlog if there is room. None asks for a new reservation."""
        try:
            self._send.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Return the next circuit, renewing the reservation meanwhile. Raises
        `trio.ClosedResourceError` once closed, or when the relay renews it no more."""
        while True:
            with trio.move_on_after(max(0.0, self.renew_at - self._network.now())):
                try:
                    stream = await self._receive.receive()
                except trio.EndOfChannel:
                    raise trio.ClosedResourceError("this listener was closed") from None
                if stream is not None:
                    return stream
            try:
                await self._network.reserve(self)
            except PeerUnreachable as error:
                logger.info("lost the reservation at %r: %s", self.relay, error)
                await self.aclose()

    async def aclose(self) -> None:
        """Accept no more circuits. The relay forgets the reservation in time."""
        self._network.forget(self)
        self._send.close()
        while True:
            try:
                stream = self._receive.receive_nowait()
                if stream is not None:
                    await stream.aclose()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
        await trio.lowlevel.checkpoint()


class CircuitNetwork:
    """Dials and listens at circuits, and at what the network below reaches."""

    def __init__(self, world: World, host: CircuitHost, below: Network) -> None:
        self._world = world
        self._host = host
        self._below = below
        self._listeners: dict[PeerId, CircuitListener] = {}

    def now(self) -> float:
        return self._world.now()

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """Relays with a reservation."""
        return tuple(self._listeners)

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Open a stream to ``addr``. Raises `PeerUnreachable`."""
        if addr.relay is None:
            return await self._below.dial(addr)
        if addr.peer_id is None:
            raise PeerUnreachable(f"{addr} does not say who is behind the relay")
        connect = HopMessage(kind=HopType.CONNECT, peer=addr.peer_id)
        stream, _ = await self._ask(addr.relay, connect)
        return CircuitStream(stream, addr)

    async def punch(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Dial ``addr`` from our listener's port, if the network below can. Raises
        `PeerUnreachable`."""
        if not isinstance(self._below, PunchingNetwork):
            raise PeerUnreachable("this network has no routers")
        return await self._below.punch(addr)

    async def listen(self, addr: Multiaddr) -> Listener:
        """Listen at ``addr``; behind a relay, by a reservation. Raises `ConfigError`."""
        relay = addr.relay
        if relay is None:
            return await self._below.listen(addr)
        assert relay.peer_id is not None
        listener = CircuitListener(self, addr.with_peer(self._host.peer_id), relay.peer_id)
        if listener.relay in self._listeners:
            raise ConfigError(f"cannot listen at {addr}: there is a reservation at that relay")
        self._listeners[listener.relay] = listener
        try:
            await self.reserve(listener)
        except PeerUnreachable as error:
            await listener.aclose()
            raise ConfigError(f"cannot listen at {addr}: {error}") from error
        except BaseException:
            self.forget(listener)
            raise
        return listener

    async def reserve(self, listener: CircuitListener) -> None:
        """Make or renew a reservation. Raises `PeerUnreachable` if the relay grants none."""
        assert listener.addr.relay is not None
        stream, answer = await self._ask(listener.addr.relay, HopMessage(kind=HopType.RESERVE))
        await stream.aclose()
        self._host.protect("relays", self._listeners)
        granted = answer.reservation
        if granted is None:
            raise PeerUnreachable(f"{listener.relay} answers without a reservation")
        if granted.voucher:
            try:
                check_voucher_untrusted(granted.voucher, listener.relay, self._host.peer_id)
            except BadMessage as error:
                raise PeerUnreachable(f"the voucher of {listener.relay}: {error}") from error
        # Renewed two minutes before its end, or after half of a shorter life. No relay is
        # believed more than two hours, or makes us ask more often than every 15 s.
        life = min(granted.expires - self._world.wall(), 7200.0)
        wait = max(life - 120.0, life / 2, 15.0)
        listener.renew_at = self._world.now() + wait

    async def _ask(self, relay: Multiaddr, question: HopMessage) -> tuple[Stream, HopMessage]:
        """Ask a relay, and return the stream if the answer is yes. Raises
        `PeerUnreachable`."""
        peer = relay.peer_id
        assert peer is not None
        self._host.add_addrs(peer, [relay], AddrSource.HEARSAY)
        stream = None
        try:
            with trio.fail_after(PATIENCE):
                stream = await self._host.open_stream(peer, HOP_ID)
                if not self._host.is_direct(peer):
                    raise PeerUnreachable(f"{peer} is itself behind a relay")
                await send_frame(stream, question.encode())
                answer = decode_hop_untrusted(await receive_message(stream))
        except BaseException as error:
            if stream is not None:
                stream.reset()
            if isinstance(error, PEER_TROUBLE):
                reason = str(error) or "no answer"
                raise PeerUnreachable(f"the relay {peer} is of no use: {reason}") from error
            raise
        if answer.kind is not HopType.STATUS or answer.status != HopStatus.OK:
            stream.reset()
            raise PeerUnreachable(f"the relay {peer} refuses: {_name(answer.status)}")
        return stream, answer

    async def serve_stop(self, stream: Stream) -> None:
        """Accept a circuit from a relay, and keep its stream open while it is in use."""
        message = None
        with trio.move_on_after(PATIENCE):
            message = decode_stop_untrusted(await receive_message(stream))
        if message is None:
            return
        listener = self._listeners.get(stream.peer)
        source = message.peer
        status = HopStatus.OK
        if message.kind is not StopType.CONNECT or source is None:
            status = HopStatus.UNEXPECTED_MESSAGE
        elif listener is None or source in (self._host.peer_id, stream.peer):
            status = HopStatus.PERMISSION_DENIED
        await send_frame(stream, StopMessage(kind=StopType.STATUS, status=status).encode())
        if status is not HopStatus.OK or listener is None or source is None:
            return
        circuit = CircuitStream(stream, listener.addr.with_peer(source))
        if listener.offer(circuit):
            await circuit.closed.wait()
        else:
            stream.reset()

    def on_peer(self, event: PeerEvent) -> None:
        """Ask for a new reservation when the last connection to a relay has ended."""
        listener = self._listeners.get(event.peer)
        if listener is not None and event.state is PeerState.DISCONNECTED:
            listener.offer(None)

    async def release(self, relay: PeerId) -> None:
        """Give up the reservation at ``relay``."""
        if relay in self._listeners:
            await self._listeners[relay].aclose()

    def forget(self, listener: CircuitListener) -> None:
        """Forget a listener that has closed."""
        if self._listeners.get(listener.relay) is listener:
            del self._listeners[listener.relay]
            self._host.protect("relays", self._listeners)


def _name(status: int) -> str:
    try:
        return HopStatus(status).name
    except ValueError:
        return str(status)
