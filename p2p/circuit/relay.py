"""The relay: grants reservations, and copies bytes between two peers that are connected to it.

What it copies is a connection of the two with its own encryption. The relay sees who talks to
whom, when and how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from p2p.bounded import TokenBucket
from p2p.circuit.core.book import RelayBook, RelayConfig
from p2p.circuit.messages import (
    HOP_ID,
    MAX_MESSAGE,
    STOP_ID,
    HopMessage,
    HopStatus,
    HopType,
    Reservation,
    StopMessage,
    StopType,
    decode_hop_untrusted,
    decode_stop_untrusted,
    sign_voucher,
)
from p2p.errors import BadMessage, LimitExceeded, PeerUnreachable
from p2p.host import PEER_TROUBLE, Host, PeerEvent, PeerState, Stream, send_frame
from p2p.identity import PeerId, Signer
from p2p.wire import KI, decode_varint_untrusted
from p2p.world import World

PATIENCE: Final = 10.0
"""Seconds for one message of a handshake."""


class CircuitHost(Host, Protocol):
    """A host that tells direct connections from circuits."""

    def is_direct(self, peer: PeerId) -> bool:
        """Return True if there is a connection to ``peer`` that needs no relay."""


async def receive_message(stream: trio.abc.ReceiveStream) -> bytes:
    """Read one message, and no byte of what follows it. Raises `BadMessage`,
    `trio.BrokenResourceError`."""
    head, found = b"", None
    while found is None:
        head += await _receive(stream, 1)
        found = decode_varint_untrusted(head, 0)
    if found[0] > MAX_MESSAGE:
        raise BadMessage(f"a message of {found[0]} bytes (at most {MAX_MESSAGE})")
    body = b""
    while len(body) < found[0]:
        body += await _receive(stream, found[0] - len(body))
    return body


async def _receive(stream: trio.abc.ReceiveStream, most: int) -> bytes:
    data = await stream.receive_some(most)
    if not data:
        raise BadMessage("the stream ended within a message")
    return bytes(data)


class Relay:
    """The relay of one host. Open it with `relaying`."""

    def __init__(
        self,
        world: World,
        host: CircuitHost,
        signer: Signer,
        config: RelayConfig,
        is_member: Callable[[PeerId], bool],
    ) -> None:
        self._world = world
        self._host = host
        self._signer = signer
        self._config = config
        self._is_member = is_member
        self._book = RelayBook(config)
        self._allowance = TokenBucket(float(config.total_rate), world.now())

    @property
    def places(self) -> int:
        """Free reservations."""
        return self._config.reservations - len(self._book.reserved)

    def on_peer(self, event: PeerEvent) -> None:
        """End a peer's reservations with its last connection."""
        if event.state is PeerState.DISCONNECTED:
            self._book.lost(event.peer)

    async def serve(self, stream: Stream) -> None:
        """Answer one request, and carry the circuit that follows from it."""
        message = None
        with trio.move_on_after(PATIENCE):
            message = decode_hop_untrusted(await receive_message(stream))
        if message is None:
            return
        if not self._host.is_direct(stream.peer):
            await _refuse(stream, HopStatus.PERMISSION_DENIED)
        elif message.kind is HopType.RESERVE:
            await self._reserve(stream)
        elif message.kind is HopType.CONNECT:
            target = message.peer
            if target is None:
                raise BadMessage("a request for a circuit names no peer")
            scope = trio.CancelScope()
            source, now = stream.peer, self._world.now()
            status = self._book.connect(source, target, now, scope.cancel)
            if status is not HopStatus.OK:
                await _refuse(stream, status)
                return
            try:
                with scope:
                    await self._connect(stream, target)
                if scope.cancelled_caught:
                    stream.reset()
            finally:
                self._book.end(source, target, scope.cancel)
        else:
            await _refuse(stream, HopStatus.UNEXPECTED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        peer = stream.peer
        network = self._host.network_of(peer)
        is_member = self._is_member(peer)
        status = self._book.reserve(peer, network, self._world.now(), is_member=is_member)
        if status is not HopStatus.OK:
            await _refuse(stream, status)
            return
        self._host.protect("circuits", self._book.reserved)
        expires = int(self._world.wall() + self._config.lifetime)
        reservation = Reservation(
            expires,
            tuple(addr for addr in self._host.addrs if addr.relay is None),
            sign_voucher(self._signer, peer, expires),
        )
        answer = HopMessage(
            kind=HopType.STATUS,
            reservation=reservation,
            limit=self._config.limit,
            status=status,
        )
        await send_frame(stream, answer.encode())

    async def _connect(self, source: Stream, target: PeerId) -> None:
        stop = None
        try:
            with trio.fail_after(PATIENCE):
                if not self._host.is_direct(target):
                    raise PeerUnreachable(f"{target} has gone")
                stop = await self._host.open_stream(target, STOP_ID)
                question = StopMessage(
                    kind=StopType.CONNECT, peer=source.peer, limit=self._config.limit
                )
                await send_frame(stop, question.encode())
                answer = decode_stop_untrusted(await receive_message(stop))
            if answer.status != HopStatus.OK:
                raise PeerUnreachable(f"{target} answers {answer.status}")
        except PEER_TROUBLE:
            if stop is not None:
                stop.reset()
            await _refuse(source, HopStatus.CONNECTION_FAILED)
            return
        granted = HopMessage(kind=HopType.STATUS, limit=self._config.limit, status=HopStatus.OK)
        try:
            with trio.fail_after(self._config.seconds):
                await send_frame(source, granted.encode())
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._copy, source, stop)
                    nursery.start_soon(self._copy, stop, source)
            await stop.aclose()
        except* PEER_TROUBLE:
            source.reset()
        finally:
            stop.reset()  # does nothing to a stream that was closed

    async def _copy(self, source: Stream, sink: Stream) -> None:
        config = self._config
        left, pace = config.bytes, TokenBucket(2.0 * config.rate, self._world.now())
        while data := await source.receive_some(16 * KI):  # buffered for one direction
            left -= len(data)
            if left < 0:
                raise LimitExceeded("a circuit has carried what it may")
            now, delay = self._world.now(), 0.0
            for bucket, rate in ((pace, config.rate), (self._allowance, config.total_rate)):
                bucket.refill(now, rate)
                bucket.take(len(data))
                # The first 8 KiB, a handshake and a question, do not wait for other circuits.
                if bucket is pace or config.bytes - left > 8 * KI:
                    delay = max(delay, -bucket.level / rate)
            if delay > 0.0:
                await self._world.sleep(delay)
            await sink.send_all(data)
            del data
        await sink.send_eof()


async def _refuse(stream: Stream, status: HopStatus) -> None:
    await send_frame(stream, HopMessage(kind=HopType.STATUS, status=status).encode())


@contextmanager
def relaying(
    world: World,
    host: CircuitHost,
    signer: Signer,
    config: RelayConfig,
    is_member: Callable[[PeerId], bool] = lambda _: False,
) -> Iterator[Relay]:
    """Relay for the length of the block: for members, and for strangers if ``config`` says so.

    The signer is the host's own.
    """
    relay = Relay(world, host, signer, config, is_member)
    with host.serving(HOP_ID, relay.serve), host.watching(relay.on_peer):
        yield relay
