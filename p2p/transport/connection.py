"""A secured connection to one peer, driven by trio: one task reads, one task writes.

Theory of operation
-------------------
Whoever has something for the peer puts it into the `Mux` and calls `flush`; the writer task seals what
has gathered, up to four full Noise records at a time, and sends it in one call. So small writes of many
tasks share records and system calls, and no lock is needed. The reader task opens records and feeds the
streams synchronously. Buffers for sealing are shared by all connections of the process and held only
while there is something to send, which keeps an idle connection at a few KiB.

A connection ends when the raw stream does, when the peer breaks the protocol, when nothing was heard for
three keep-alive intervals although we asked, or when `close` is called; then what is queued is
flushed first, for a moment at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from p2p.errors import ProtocolError, RemoteProtocolError
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.transport.negotiate import Chooser, Proposer
from p2p.transport.noise import MAX_RECORD
from p2p.transport.stream import MuxedStream
from p2p.transport.upgrade import Secured
from p2p.transport.wakeup import DirectStream, Wakeup
from p2p.transport.yamux import Mux
from p2p.transport.yamux_frames import (
    NORMAL,
    PROTOCOL_FAILURE,
    DataReceived,
    EndReceived,
    Event,
    PongReceived,
    StreamOpened,
    StreamReset,
    WentAway,
)
from p2p.wire import KI
from p2p.world import Timer, World

BATCH: Final = 4
"""Records sealed for one send; more measured no faster."""
_BATCH_BYTES: Final = BATCH * (2 + MAX_RECORD)
_POOL: Final = 4
"""Sealing buffers kept for reuse; as many connections can be sending at full speed on one core."""
_buffers: list[bytearray] = []
MAX_SPOKEN: Final = 256
"""Protocols remembered of one peer: what it may tell by identify, twice."""
READ_BYTES: Final = 512 * KI
"""Bytes asked of the raw stream at once: eight full records."""
_scratch: Final = memoryview(bytearray(READ_BYTES))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Pacing and patience of one connection."""

    keepalive: float = 30.0
    """Seconds without a byte from the peer before we ask for one; two more, and it is gone."""

    close_timeout: float = 2.0
    """Seconds to flush what is queued when we close."""

    yield_every: int = 64 * KI
    """Bytes a task may send or receive on a stream between two schedule points."""


class Connection:
    """Streams to one authenticated peer. Run `run` in a nursery; it returns when all is over."""

    def __init__(
        self,
        world: World,
        raw: trio.abc.HalfCloseableStream,
        secured: Secured,
        *,
        dialer: bool,
        serves: Callable[[ProtocolId], bool],
        on_stream: Callable[[MuxedStream], None],
        config: ConnectionConfig | None = None,
    ) -> None:
        """``on_stream`` gets every incoming stream whose protocol ``serves`` accepts; it must not block."""
        self.peer: PeerId = secured.peer
        self.dialer = dialer
        self.mux = Mux(dialer=dialer)
        self.remote_addr: Multiaddr | None = None
        """Where the peer was dialled, or seems to come from."""
        self.spoken: dict[ProtocolId, None] = {}
        """Protocols that the peer is known to speak: streams of these open without waiting."""
        self.failure: RemoteProtocolError | None = None
        """How the peer broke the protocol, if that ended the connection."""
        self._world = world
        self._raw = raw
        self._direct = raw if isinstance(raw, DirectStream) else None
        self._session = secured.session
        self._early = secured.early
        self._serves = serves
        self._on_stream = on_stream
        self._config = config or ConnectionConfig()
        self.yield_every = self._config.yield_every
        self._streams: dict[int, MuxedStream] = {}
        self._work = Wakeup()
        self._scope = trio.CancelScope()
        self._closing = False
        self._over = False
        self._closed = trio.Event()
        self._timers: list[Timer] = []
        self._heard = True
        self._silence = 0
        self._fresh: dict[int, int] = {}  # incoming streams without a protocol, and for how many ticks

    @property
    def is_open(self) -> bool:
        """Whether streams can be opened."""
        return not (self._closing or self._over or self.mux.gone)

    @property
    def stream_count(self) -> int:
        """Streams that are open, of either side."""
        return len(self._streams)

    async def run(self) -> None:
        """Carry bytes until either side closes. Raises nothing: how it ended is in `failure`."""
        self._schedule_tick()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._write()
        finally:
            self._tear_down()
            try:
                await trio.aclose_forcefully(self._raw)
            finally:
                self._closed.set()

    def open_stream(self, protocol: ProtocolId) -> MuxedStream:
        """A stream whose protocol the peer has yet to agree to.

        Raises `LimitExceeded`, or `trio.BrokenResourceError` when the connection is over.
        """
        if self._over or self._closing:
            raise trio.BrokenResourceError("the connection is closed")
        stream_id = self.mux.open_stream()
        stream = MuxedStream(self, stream_id, self.peer, Proposer([protocol]))
        stream.protocol = protocol
        self._streams[stream_id] = stream
        return stream

    def learn(self, protocols: Iterable[ProtocolId]) -> None:
        """The peer speaks these."""
        for protocol in protocols:
            if len(self.spoken) < MAX_SPOKEN:
                self.spoken[protocol] = None

    def close(self, code: int = NORMAL) -> None:
        """Say goodbye, flush what is queued, and end."""
        if not self._closing and not self._over:
            self._closing = True
            self.mux.go_away(code)
            deadline = self._world.now() + self._config.close_timeout
            self._timers.append(self._world.call_at(deadline, self._scope.cancel))
            self.flush()

    async def wait_closed(self) -> None:
        """Return when nothing is left of the connection."""
        await self._closed.wait()

    def flush(self) -> None:
        """The mux has something for the peer."""
        self._work.set()

    def negotiated(self, stream: MuxedStream) -> None:
        """An incoming stream knows its protocol."""
        self._on_stream(stream)

    def __repr__(self) -> str:
        return f"Connection({'to' if self.dialer else 'from'} {self.peer!r}, {len(self._streams)} streams)"

    # The two tasks.

    async def _read(self) -> None:
        try:
            self._receive(bytearray(self._early))
            self._early = b""
            while data := await self._receive_raw():
                self._heard = True
                for plaintext in self._session.receive_data(data):
                    self._receive(plaintext)
        except RemoteProtocolError as error:
            self.failure = error
            self.close(PROTOCOL_FAILURE)
            return
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("the connection to %r broke: %s", self.peer, error)
        self._scope.cancel()

    async def _write(self) -> None:
        try:
            while True:
                if self.mux.has_data:
                    await self._send_batch()
                elif self._closing:
                    break
                else:
                    await self._work.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("the connection to %r broke: %s", self.peer, error)
        self._scope.cancel()

    async def _receive_raw(self) -> bytes | bytearray | memoryview:
        """The next bytes, in memory that all connections share: use them before the next checkpoint."""
        if self._direct is None:
            return await self._raw.receive_some(READ_BYTES)
        return _scratch[: await self._direct.receive_into(_scratch)]

    async def _send_batch(self) -> None:
        buffer = _buffers.pop() if _buffers else bytearray(_BATCH_BYTES)
        with memoryview(buffer) as view:
            used = 0
            for _ in range(BATCH):
                piece = self.mux.data_to_send()
                if piece is None:
                    break
                used += self._session.seal_into(piece, view[used:])
            self._settle()
            sent = 0 if self._direct is None else self._direct.send_nowait(view[:used])
            if sent < used:
                await self._raw.send_all(view[sent:used])
        if len(_buffers) < _POOL:
            _buffers.append(buffer)

    # What the peer does.

    def _receive(self, plaintext: bytearray) -> None:
        for event in self.mux.receive_data(plaintext):
            self._handle(event)
        self._settle()
        if self.mux.has_data:
            self.flush()

    def _handle(self, event: Event) -> None:
        match event:
            case DataReceived(stream_id, data):
                if stream := self._streams.get(stream_id):
                    stream.feed(data)
            case StreamOpened(stream_id):
                self._streams[stream_id] = MuxedStream(self, stream_id, self.peer, Chooser(self._serves))
                self._fresh[stream_id] = 0
            case EndReceived(stream_id):
                if stream := self._streams.get(stream_id):
                    stream.feed_end()
            case StreamReset(stream_id):
                if stream := self._streams.get(stream_id):
                    stream.fail(ProtocolError("the peer reset the stream"))
            case WentAway():
                logger.debug("%r is going away", self.peer)
            case PongReceived():
                pass  # that it was heard is all we wanted

    def _settle(self) -> None:
        """Tell streams what the mux found out about them."""
        for stream_id in self.mux.take_writable():
            if stream := self._streams.get(stream_id):
                stream.wake_sender()
        for stream_id in self.mux.take_closed():
            self._streams.pop(stream_id, None)
            self._fresh.pop(stream_id, None)

    def _tear_down(self) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()
        broken = self.failure or ProtocolError("the connection was lost")
        for stream in list(self._streams.values()):
            stream.fail(broken)
        self._streams.clear()

    # Keep-alive.

    def _schedule_tick(self) -> None:
        if self._config.keepalive < math.inf:
            self._timers = [self._world.call_at(self._world.now() + self._config.keepalive, self._tick)]

    def _tick(self) -> None:
        """Once per interval: ask a silent peer for a sign of life; drop streams that never got a protocol."""
        if self._closing or self._over:
            return
        self._silence = 0 if self._heard else self._silence + 1
        self._heard = False
        if self._silence >= 3:
            logger.info("%r has been silent for %s keep-alives", self.peer, self._silence)
            self._scope.cancel()
            return
        if self._silence == 1:
            self.mux.ping(self._silence)
            self.flush()
        for stream_id, ticks in list(self._fresh.items()):
            stream = self._streams.get(stream_id)
            if stream is None or stream.is_negotiated:
                del self._fresh[stream_id]
            elif ticks:
                stream.reset()
            else:
                self._fresh[stream_id] = 1
        self._settle()
        self._schedule_tick()
