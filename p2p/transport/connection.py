"""A secured connection to one peer, driven by trio: one task reads, one task writes.

Theory of operation
-------------------
A task that has something for the peer puts it into the `Mux` and calls `flush`; the writer task
seals what has gathered, up to four full Noise records at a time, and sends it in one call. So
small writes of many tasks share records and system calls, and no lock is needed. The reader
task opens records and feeds the streams synchronously. Buffers for sealing are shared by all
connections of the process and held only while there is something to send, which keeps an idle
connection at a few KiB.

A peer that asks for more than it pays for gets back-pressure. The reader stops while the peer
leaves too many of our answers untaken (`Mux.is_choked`), and pauses for a peer whose frames and
records are so small that they cost more to look at than to receive (`_Pace`). If two peers
choke each other, neither hears the other, and the keep-alive ends the connection without blame.

A connection ends when the raw stream does, when the peer breaks the protocol, when nothing was
heard for three keep-alive intervals although we asked, when the host's budget needs what it
holds, or when `close` is called; then what is queued is flushed first, for a moment at most.
However it ends, every stream fails: what the peer did before it broke the protocol is carried
out, then all streams fail, then we say goodbye. A keep-alive that comes late says that this
machine stood still, not that the peer was silent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from p2p.bounded import TokenBucket
from p2p.door import check_fields
from p2p.errors import ProtocolError, RemoteProtocolError
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.burst import Burst
from p2p.transport.core.negotiate import Chooser, Proposer
from p2p.transport.core.noise import MAX_PLAINTEXT, MAX_RECORD
from p2p.transport.core.yamux import Mux
from p2p.transport.core.yamux_frames import (
    NORMAL,
    PROTOCOL_FAILURE,
    DataReceived,
    EndReceived,
    Event,
    PongReceived,
    ProtocolViolated,
    StreamOpened,
    StreamReset,
    WentAway,
)
from p2p.transport.stream import OVER, MuxedStream
from p2p.transport.turns import Turns
from p2p.transport.upgrade import Secured
from p2p.transport.wakeup import DirectStream, MeteredStream, Wakeup
from p2p.wire import KI
from p2p.world import Timer, World

BATCH: Final = 4
"""Records sealed for one send; more measured no faster."""
_BATCH_BYTES: Final = BATCH * (2 + MAX_RECORD)
"""Bytes of those records with their lengths: the size of a sealing buffer, 256 KiB."""
_WORTH_KEEPING: Final = 8
"""A waiting connection keeps its sealing buffer only if an eighth of it is unsent; less is
copied, so a peer that ignores the answer to a ping does not hold 256 KiB."""
_POOL: Final = 4
"""Sealing buffers kept for reuse; as many connections can be sending at full speed on one
core.
"""
_buffers: list[bytearray] = []
MAX_SPOKEN: Final = 256
"""Protocols remembered of one peer: what it may tell by identify (128), twice, as a program
that is updated tells others."""
READ_BYTES: Final = 512 * KI
"""Bytes asked of the raw stream at once: eight full records, two of the peer's batches, opened
one after the other without another system call."""
_CAUTIOUS_READ: Final = 16 * KI
"""Bytes read at a time from a peer that last sent small frames: 1,260 empty ones take 3 ms,
`READ_BYTES` of them would hold up all others for 90 ms."""
MAX_FRAME_RATE: Final = 25_000
"""Frames and records a second, beyond one per KiB, that a connection may send before its reader
pauses. One costs 2 to 4 µs whatever it carries, so that is a tenth of a core."""
FRAME_BURST: Final = 50_000
"""Frames and records that may come at once after a pause: 0.15 s of work."""
_CROWD: Final = 256
"""Frames (a new stream counts as `STREAM_WORK`) after which other tasks have their turn: about
a millisecond of work. The short end of a record of bulk is no crowd."""
_MESSAGE: Final = KI
"""A record of at most this many bytes counts as a message: its few frames are charged with
later ones, since a look at the clock for each would cost half as much as the record."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds to flush a connection, or all of a host, when it closes: the 8 MiB that they may hold
together leave at 34 Mbit/s in that time. A peer that takes nothing must not hold up the end."""
_scratch: Final = memoryview(bytearray(READ_BYTES))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Pacing and patience of one connection."""

    keepalive: float = 30.0
    """Seconds without a byte from the peer before we ask for one; two more, and it is gone."""

    yield_every: int = 64 * KI
    """Bytes a task may send or receive on a stream between two schedule points."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.keepalive > 0 and self.yield_every >= 0):
            raise ValueError("keepalive is positive, yield_every is not negative")


class _Keepalive:
    """What we know of the peer's liveness."""

    __slots__ = ("due", "heard", "silence")

    def __init__(self) -> None:
        self.heard = True
        self.silence = 0
        self.due = math.inf


class _Pace(TokenBucket):
    """How fast a peer may make us work: `MAX_FRAME_RATE`, with `FRAME_BURST` at once.

    One frame or record a KiB is free, so bulk never waits and is read in large pieces.
    """

    __slots__ = ("_charged", "read_bytes")

    def __init__(self) -> None:
        super().__init__(FRAME_BURST, 0.0)
        self.read_bytes = _CAUTIOUS_READ
        self._charged = 0

    def charge(self, size: int, frames: int, now: float) -> float:
        """Seconds to wait: the peer sent ``size`` bytes, and we looked at so many things of its
        in all.
        """
        excess = frames - self._charged - size // KI
        self._charged = frames
        self.refill(now, MAX_FRAME_RATE)
        if excess > 0:
            self.take(excess)
            if excess > _CROWD:
                self.read_bytes = _CAUTIOUS_READ
        elif self.read_bytes < READ_BYTES:
            self.read_bytes *= 2
        return max(0.0, -self.level) / MAX_FRAME_RATE


class _Tail:
    """What a connection holds beside its streams, as the host's budget counts it.

    That is the unfinished record, and, while the reader waits, the whole ones that it has yet
    to look at: up to `READ_BYTES`. A peer that asks for answers, takes none, and fills up what
    we had read when we stopped makes us keep them, 0.4 MiB for each of 768 connections.
    """

    __slots__ = ("_connection", "held", "peer", "since")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.peer = connection.peer
        self.held = 0
        self.since = 0.0

    def count(self, pending: int, *, progress: bool) -> None:
        """There are ``pending`` bytes of it; new ones, after ``progress``."""
        if progress:
            self.let_go()
        if pending > self.held:
            self._connection.budget.hold(self, pending - self.held)

    def wait(self, count: int) -> None:
        """``count`` bytes of whole records wait as well."""
        self._connection.budget.hold(self, count)

    def go_on(self, count: int) -> None:
        """``count`` of the waiting bytes went on, unless they were given up."""
        self._connection.budget.release(self, min(count, self.held))

    def let_go(self) -> None:
        """It is finished, or the connection is."""
        self._connection.budget.forget(self)

    def evict(self) -> None:
        """The budget needs the bytes: without the record there is no connection."""
        logger.info("gave up the connection to %r: the host holds too much", self.peer)
        self.let_go()
        self._connection.abort()


class _Drains:
    """Streams that wait until what they sent has left this machine (`Stream.drained`)."""

    __slots__ = ("_meter", "given", "looking", "sealed", "waiting")

    def __init__(self, meter: MeteredStream | None) -> None:
        self._meter = meter
        self.sealed = 0
        """Bytes taken from the mux so far."""
        self.given = 0
        """Those of them that the raw stream has taken."""
        self.waiting: dict[MuxedStream, int] = {}
        """Which of the bytes have to leave for each."""
        self.looking: trio.CancelScope | None = None
        """What to cancel if there is something to send while the writer waits for the line."""

    @property
    def left(self) -> int:
        """Bytes that are on the line, as far as the raw stream says."""
        return self.given - (0 if self._meter is None else self._meter.unsent)

    def unsent(self, mark: int) -> int:
        """How many of the first ``mark`` bytes are still here."""
        return max(0, mark - self.left)

    def keep_short(self, burst: int) -> None:
        """Let the kernel hold no more than is sealed at a time."""
        if self._meter is not None:
            self._meter.keep_short(burst)

    def wake(self) -> None:
        """Something has left: let all waiters look again."""
        waiting, self.waiting = self.waiting, {}
        for stream in waiting:
            stream.wake_sender()

    async def wait(self) -> None:
        """Return when a stream has something to look at, or `looking` was cancelled."""
        if self._meter is not None:
            at_most = self.given - min(self.waiting.values())
            with trio.CancelScope() as self.looking:
                await self._meter.wait_unsent(max(0, at_most))
            interrupted, self.looking = self.looking.cancelled_caught, None
            if interrupted:
                return
        self.wake()


class Connection:
    """Streams to one authenticated peer. Run `run` in a nursery; it returns when all is
    over.
    """

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
        budget: HostBudget | None = None,
        turns: Turns | None = None,
    ) -> None:
        """``on_stream`` gets every incoming stream whose protocol ``serves`` accepts; it must
        not block.

        ``budget`` and ``turns`` are the host's, shared by all of its connections.
        """
        self.peer: PeerId = secured.peer
        self.dialer = dialer
        self.budget = budget or HostBudget(world.now)
        self.mux = Mux(dialer=dialer, budget=self.budget)
        self.mux.allowance = _CROWD
        self.remote_addr: Multiaddr | None = None
        """Where the peer was dialled, or seems to come from."""
        self.is_circuit = False
        """Whether it runs through a relay."""
        self.spoken: dict[ProtocolId, None] = {}
        """Protocols that the peer is known to speak: streams of these open without waiting."""
        self.failure: RemoteProtocolError | None = None
        """How the peer broke the protocol, if that ended the connection."""
        self._world = world
        self._raw = raw
        self._direct = raw if isinstance(raw, DirectStream) else None
        self._drains = _Drains(raw if isinstance(raw, MeteredStream) else None)
        self._burst = Burst(_BATCH_BYTES)
        self._session = secured.session
        self._early = secured.early
        self._serves = serves
        self._on_stream = on_stream
        self._config = config or ConnectionConfig()
        self.yield_every = self._config.yield_every
        self._streams: dict[int, MuxedStream] = {}
        self._work = Wakeup()
        self._unchoked = Wakeup()
        self._pace = _Pace()
        self._turns = turns or Turns()
        self._tail = _Tail(self)
        self._scope = trio.CancelScope()
        self._closing = False
        self._over = False
        self._closed = trio.Event()
        self._timers: list[Timer] = []
        self._keepalive = _Keepalive()
        # incoming streams without a protocol, and for how many ticks
        self._fresh: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether streams can be opened."""
        return not (self._closing or self._over) and self.mux.may_open

    @property
    def stream_count(self) -> int:
        """Streams that are open, of either side."""
        return len(self._streams)

    async def run(self) -> None:
        """Carry bytes until either side closes. Raises nothing: how it ended is in
        `failure`.
        """
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
            deadline = self._world.now() + CLOSE_TIMEOUT
            self._timers.append(self._world.call_at(deadline, self._scope.cancel))
            self.flush()

    async def wait_closed(self) -> None:
        """Return when nothing is left of the connection."""
        await self._closed.wait()

    def flush(self) -> None:
        """The mux has something for the peer."""
        self._work.set()
        if self._drains.looking is not None:
            self._drains.looking.cancel()

    @property
    def sealed(self) -> int:
        """Bytes taken from the mux so far, as they are on the wire."""
        return self._drains.sealed

    def unsent(self, mark: int) -> int:
        """How many of the first ``mark`` of those are still on this machine."""
        return self._drains.unsent(mark)

    def drain(self, stream: MuxedStream, mark: int) -> None:
        """Wake ``stream`` when the first ``mark`` bytes have left, or sooner."""
        self._drains.waiting[stream] = mark
        self.flush()

    def undrain(self, stream: MuxedStream) -> None:
        """It waits no more."""
        self._drains.waiting.pop(stream, None)

    def abort(self) -> None:
        """End at once."""
        self._scope.cancel()

    def negotiated(self, stream: MuxedStream) -> None:
        """An incoming stream knows its protocol."""
        self._on_stream(stream)

    def let_go(self, stream_id: int) -> None:
        """The application has closed a stream: the mux alone waits for the peer to end it."""
        self._streams.pop(stream_id, None)

    def __repr__(self) -> str:
        return (
            f"Connection({'to' if self.dialer else 'from'} {self.peer!r}, {len(self._streams)}"
            " streams)"
        )

    # The two tasks.

    async def _read(self) -> None:
        try:
            await self._take([bytearray(self._early)])
            self._early = b""
            self.flush()
            while data := await self._receive_raw():
                self._keepalive.heard = True
                opened = self._session.receive_data(data)
                if self._session.tail or self._tail.held:
                    self._tail.count(self._session.pending, progress=bool(opened))
                if len(opened) == 1 and len(opened[0]) < _MESSAGE:
                    if self._receive(opened[0]) and self.mux.is_choked:
                        await self._wait_unchoked()
                    if self.mux.allowance <= 0:
                        await self._wait_turn()
                        await self._take([self.mux.rest])
                elif opened:
                    await self._take(opened)
        except RemoteProtocolError as error:
            self.failure = error
            self._fail_streams(error)
            self.close(PROTOCOL_FAILURE)
            return
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("the connection to %r broke: %s", self.peer, error)
        self._scope.cancel()

    async def _wait_unchoked(self, opened: Sequence[bytearray] = ()) -> None:
        waiting = sum(map(len, opened)) + len(self.mux.rest)
        self._tail.wait(waiting)
        while self.mux.is_choked:
            await self._unchoked.wait()
        self._tail.go_on(waiting)

    async def _wait_turn(self, opened: Sequence[bytearray] = ()) -> None:
        waiting = sum(map(len, opened)) + len(self.mux.rest)
        self._tail.wait(waiting)
        await self._turns.wait()
        self._tail.go_on(waiting)
        self.mux.allowance = _CROWD

    async def _take(self, opened: list[bytearray]) -> None:
        """Hand on records, piece by piece, and let go of them."""
        self.budget.time = self._world.now()
        size = sum(map(len, opened))
        while opened:
            # Of eight, or of some hundred small ones.
            if self._receive(opened.pop(0)) and self.mux.is_choked:
                await self._wait_unchoked(opened)
            if self.mux.allowance <= 0:
                await self._wait_turn(opened)
                if self.mux.rest:
                    opened.insert(0, self.mux.rest)
        if pause := self._pace.charge(size, self.mux.frames, self.budget.time):
            await self._world.sleep(pause)

    async def _write(self) -> None:
        try:
            while True:
                if self.mux.has_data:
                    await self._send_batch()
                    if self._drains.waiting:
                        self._drains.wake()
                elif self._closing:
                    break
                elif self._drains.waiting:
                    await self._wait_left()
                else:
                    await self._work.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("the connection to %r broke: %s", self.peer, error)
        self._scope.cancel()

    async def _wait_left(self) -> None:
        """Let the line take what it was given, until a stream is drained or there is more."""
        before, since = self._drains.left, self._world.now()
        await self._drains.wait()
        if (left := self._drains.left - before) > 0:
            self._note_slow(left, self._world.now() - since)

    def _note_slow(self, count: int, seconds: float) -> None:
        self._burst.note_slow(count, seconds)
        self._shorten()

    def _shorten(self) -> None:
        """Commit to no more than the line empties soon."""
        self.mux.shorten(min(MAX_PLAINTEXT, self._burst.size))
        self._drains.keep_short(self._burst.size)

    async def _receive_raw(self) -> bytes | bytearray | memoryview:
        """The next bytes, in memory that all connections share: use them before the next
        checkpoint.
        """
        if self._direct is None:
            return await self._raw.receive_some(self._pace.read_bytes)
        return _scratch[: await self._direct.receive_into(_scratch[: self._pace.read_bytes])]

    async def _send_batch(self) -> None:
        buffer = _buffers.pop() if _buffers else bytearray(_BATCH_BYTES)
        with memoryview(buffer) as view:
            used = records = 0
            while (
                records < BATCH
                and used < self._burst.size
                and self.mux.has_data
                and (piece := self.mux.data_to_send()) is not None
            ):
                used += self._session.seal_into(piece, view[used:])
                records += 1
            if self.mux.has_news:
                self._settle()
            self._unchoked.set()
            self._drains.sealed += used
            sent = 0 if self._direct is None else self._direct.send_nowait(view[:used])
            if used - sent > _BATCH_BYTES // _WORTH_KEEPING:
                await self._send_slowly(view[sent:used], len(buffer))
                sent = used
            left = bytes(view[sent:used]) if sent < used else b""
        if len(_buffers) < _POOL:
            _buffers.append(buffer)
        if left:
            await self._send_slowly(left, len(left))
        elif sent == used and self._burst.size < _BATCH_BYTES:
            self._burst.note_free()
            self._shorten()
        self._drains.given = self._drains.sealed

    async def _send_slowly(self, data: bytes | memoryview, held: int) -> None:
        """Send what the network does not take at once; meanwhile ``held`` bytes count as
        queued.
        """
        self.mux.seal(held)
        since = self._world.now()
        try:
            await self._raw.send_all(data)
            self._note_slow(len(data), self._world.now() - since)
        finally:
            self.mux.seal(-held)
            if self.mux.has_news:
                self._settle()

    # What the peer does.

    def _receive(self, plaintext: bytearray) -> bool:
        """Carry out what the peer says. Whether there is something to send."""
        mux, streams = self.mux, self._streams
        for event in mux.receive_data(plaintext):
            # by far the most frequent, and `match` takes ten times as long
            if type(event) is DataReceived:
                if stream := streams.get(event.stream_id):
                    stream.feed(event.data)
            else:
                self._handle(event)
        if mux.has_news:
            self._settle()
        if not mux.has_data:
            return False
        self.flush()
        return True

    def _handle(self, event: Event) -> None:
        match event:
            case StreamOpened(stream_id):
                self._streams[stream_id] = MuxedStream(
                    self, stream_id, self.peer, Chooser(self._serves)
                )
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
            case ProtocolViolated(reason):
                raise RemoteProtocolError(reason)

    def _settle(self) -> None:
        """Tell streams what the mux found out about them."""
        for stream_id in self.mux.take_writable():
            if stream := self._streams.get(stream_id):
                stream.wake_sender()
        for stream_id in self.mux.take_closed():
            if stream := self._streams.pop(stream_id, None):
                # it is ended, reset or closed already: nothing is to wait for it
                stream.fail(OVER)
            self._fresh.pop(stream_id, None)

    def _fail_streams(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)

    def _tear_down(self) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()
        self._fail_streams(self.failure or ProtocolError("the connection was lost"))
        self._streams.clear()
        self.mux.abandon()
        self._tail.let_go()
        del self._tail  # it refers to us, and what is in no cycle is freed at once

    # Keep-alive.

    def _schedule_tick(self) -> None:
        if self._config.keepalive < math.inf and not self._closing:
            self._keepalive.due = self._world.now() + self._config.keepalive
            self._timers = [self._world.call_at(self._keepalive.due, self._tick)]

    def _tick(self) -> None:
        """Once per interval: ask a silent peer for a sign of life; drop streams that never got
        a protocol.
        """
        if self._closing or self._over:
            return
        if self._world.now() - self._keepalive.due > self._config.keepalive / 2:
            # We stood still (stopped, or swapped out): what the peer sent meanwhile is yet to
            # be read.
            logger.info("a keep-alive is %.0f s late", self._world.now() - self._keepalive.due)
            self._schedule_tick()
            return
        self._keepalive.silence = 0 if self._keepalive.heard else self._keepalive.silence + 1
        self._keepalive.heard = False
        if self._keepalive.silence >= 3:
            logger.info(
                "%r has been silent for %s keep-alives", self.peer, self._keepalive.silence
            )
            self._scope.cancel()
            return
        if self._keepalive.silence == 1:
            self.mux.ping(self._keepalive.silence)
            self.flush()
        for stream_id, ticks in list(self._fresh.items()):
            stream = self._streams.get(stream_id)
            if stream is None or stream.is_negotiated:
                del self._fresh[stream_id]
            elif ticks:
                stream.reset()
            else:
                self._fresh[stream_id] = 1
        self.mux.sweep()
        if self.mux.has_data:
            self.flush()
        self._settle()
        self._schedule_tick()
