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

One stream of a connection: trio's stream interface over a `p2p.transport.core.yamux.Mux`.

What the peer sends is fed in synchronously by the connection's reader; the protocol is
negotiated there too, so a stream costs no task until a handler serves it.

Before that, `secure` upgrades raw bytes: negotiation, Noise, muxer.

A dialer pipelines: its first packet carries the negotiation header, the proposal of Noise and
the first Noise message; with a peer that names yamux in its Noise extensions, streams may be
opened one round trip later. There is no unauthenticated path, whatever a peer offers.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, runtime_checkable

import trio

from p2p.bounded import TokenBucket
from p2p.door import check, check_number
from p2p.errors import (
    LimitExceeded,
    LocalProtocolError,
    ProtocolError,
    ProtocolNotSupported,
    RemoteProtocolError,
)
from p2p.host import Stream
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.transport.core import noise, yamux
from p2p.transport.core.budget import Burst, HostBudget
from p2p.transport.core.negotiate import Chooser, Proposer
from p2p.transport.core.noise import (
    MAX_PLAINTEXT,
    MAX_RECORD,
    NoiseHandshake,
    NoiseSession,
    StaticKey,
)
from p2p.transport.core.yamux import (
    NORMAL,
    PROTOCOL_FAILURE,
    DataReceived,
    EndReceived,
    Event,
    Mux,
    ProtocolViolated,
    StreamOpened,
    StreamReset,
)
from p2p.wire import KI, conforms
from p2p.world import Timer, World

OVER: Final = ProtocolError("the stream is over")
"""The error of a stream that both sides have ended. Nothing that was sent is lost."""


class Turns:
    """A queue from which one task continues in each pass of the scheduler, first come, first
    served.

    trio runs every task that can run in each pass. Tasks that only make a checkpoint between
    two pieces of costly work therefore all work in every pass: with 36 peers that opened 256
    streams each a pass took up to a second, and a newcomer's dial, ping and identify take about
    ten passes. A task that waits here between its pieces shares one piece a pass with all
    others that do, and everything else runs in every pass.
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[trio.Event, None] = {}
        self._taken = False

    async def wait(self) -> None:
        """Wait for a turn: return in a pass of the scheduler in which no other task returns
        from here. This is a checkpoint."""
        if not self._taken:
            self._taken = True
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._call()
            return
        turn = trio.Event()
        self._waiting[turn] = None
        try:
            await turn.wait()
        finally:
            if self._waiting.pop(turn, turn) is turn:
                self._call()

    def _call(self) -> None:
        """Let the next waiting task continue, in the next pass."""
        for turn in self._waiting:
            del self._waiting[turn]
            turn.set()
            return
        self._taken = False


class Wakeup:
    """Lets one task sleep until another calls `set`, which does nothing if no task sleeps."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Sleep until the next `set`."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is waiting here")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def set(self) -> None:
        """Wake the sleeping task, if there is one."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None


@runtime_checkable
class AddressedStream(Protocol):
    """A raw stream that knows the address of its other end and how it ended."""

    remote_addr: Multiaddr

    def has_spoken(self) -> bool:
        """Return True if there is something to read."""

    def has_gone(self) -> bool:
        """Return True if the other end has closed its direction, even if some bytes are still
        to be read."""


@runtime_checkable
class MeteredStream(Protocol):
    """A raw stream that knows how many of its bytes have not left this machine."""

    @property
    def unsent(self) -> int:
        """Bytes that the stream has taken and that have not left this machine."""

    async def wait_unsent(self, at_most: int) -> None:
        """Return when at most ``at_most`` bytes have not left. Raise what sending raises."""

    def keep_short(self, low_water: int) -> None:
        """Stop taking data while ``low_water`` bytes are unsent, or the usual limit if that is
        lower, from now on."""


@runtime_checkable
class DirectStream(Protocol):
    """A raw stream that saves a connection the copies and scheduler passes of trio's
    interface."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive into ``buffer`` and return the number of bytes; 0 at the end. The buffer is
        not touched before the last schedule point."""

    def send_nowait(self, data: memoryview) -> int:
        """Send as much as is possible without waiting, and return how many bytes that is. Raise
        `trio.BrokenResourceError` if the stream is broken."""


@dataclass(frozen=True, slots=True)
class Secured(trio.abc.AsyncResource):
    """An authenticated byte stream, ready for `Connection`."""

    raw: trio.abc.HalfCloseableStream
    session: NoiseSession
    early: bytes
    """Decrypted bytes that came behind the handshake: the first of the muxer."""

    @property
    def peer(self) -> PeerId:
        """The proven identity of the other side."""
        return self.session.hello.peer

    async def aclose(self) -> None:
        await self.raw.aclose()


async def secure(
    raw: trio.abc.HalfCloseableStream,
    static: StaticKey,
    entropy: Callable[[int], bytes],
    *,
    dialer: bool,
    expected: PeerId | None = None,
    first: bytes | bytearray = b"",
) -> Secured:
    """Perform the handshake on ``raw``, of which ``first`` was read already.

    The caller sets the deadline, and closes ``raw`` on any error.

    Raises `RemoteProtocolError` (`WrongPeer` among them), `ProtocolNotSupported` when the peer
    speaks no Noise or no yamux, `trio.BrokenResourceError` when it goes away.
    """
    muxers = (yamux.PROTOCOL_ID,)
    handshake = NoiseHandshake(
        static, entropy(32), initiator=dialer, muxers=muxers, expected=expected
    )
    negotiation = Proposer(noise.PROTOCOL_ID) if dialer else Chooser(noise.PROTOCOL_ID.__eq__)
    await _send(raw, negotiation.data_to_send() + handshake.data_to_send())
    while negotiation.chosen is None:
        negotiation.receive_data(first or await _receive(raw))
        first = b""
        await _send(raw, negotiation.data_to_send())
        _check_listens(negotiation)
    handshake.receive_data(negotiation.leftover)
    await _send(raw, handshake.data_to_send())
    while (session := handshake.session) is None:
        handshake.receive_data(await _receive(raw))
        await _send(raw, handshake.data_to_send())
    early = b"".join(session.receive_data(handshake.leftover))
    if handshake.muxer is None:
        early = await _negotiate_muxer(raw, session, early, dialer=dialer)
    return Secured(raw, session, early)


async def _negotiate_muxer(
    raw: trio.abc.HalfCloseableStream, session: NoiseSession, early: bytes, *, dialer: bool
) -> bytes:
    """Negotiate the muxer with peers without the Noise extension, such as py-libp2p."""
    wanted = yamux.PROTOCOL_ID
    negotiation = Proposer(wanted) if dialer else Chooser(wanted.__eq__)
    await _send(raw, session.seal(negotiation.data_to_send()))
    negotiation.receive_data(early)
    while negotiation.chosen is None:
        for plaintext in session.receive_data(await _receive(raw)):
            negotiation.receive_data(plaintext)
        await _send(raw, session.seal(negotiation.data_to_send()))
        _check_listens(negotiation)
    await _send(raw, session.seal(negotiation.data_to_send()))
    return negotiation.leftover


def _check_listens(negotiation: Proposer | Chooser) -> None:
    """End the connection of a dialer that continues in a protocol that was refused. Nothing
    that it sends is read."""
    if negotiation.is_deaf:
        raise ProtocolNotSupported("the peer wants to go on in a protocol that was refused")


async def _send(raw: trio.abc.SendStream, data: bytes) -> None:
    if data:
        await raw.send_all(data)


async def _receive(raw: trio.abc.ReceiveStream) -> bytes | bytearray:
    # Bytes read at once; a whole handshake has about 500, so one read has all that a peer sends
    # before it waits for us.
    data = await raw.receive_some(4096)
    if not data:
        raise RemoteProtocolError("the peer hung up during the handshake")
    return data


class MuxedStream(Stream):
    """An ordered byte stream to one peer, for one protocol. An exception that leaves its block
    resets it."""

    protocol = ProtocolId("")
    yield_every = 64 * KI
    """Bytes that a task may send or receive between two schedule points."""

    def __init__(
        self, owner: Connection, stream_id: int, peer: PeerId, negotiation: Proposer | Chooser
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._id = stream_id
        self._negotiation: Proposer | Chooser | None = negotiation
        # a few, at most: an empty deque takes 0.7 KiB, and streams are idle
        self._chunks: list[bytearray] = []
        self._readable = Wakeup()
        self.writable = Wakeup()
        """Woken when the sender may have room again."""
        # Flags, not a `p2p.concurrency.ConflictDetector` each: with two more objects a stream
        # and three more blocks a request, small requests took 3 to 6 % more CPU time.
        self._receiving = self._sending = False
        # looks of `has_stalled` during the present wait for room, or of `is_nameless`
        self._stalls = 0
        self._ended = False  # the peer will send no more
        self._sent_end = False
        self._closed = False
        self._failure: Exception | None = None
        self._credit = self.yield_every
        self.held = 0
        """Bytes from the peer that this node keeps, as the budget counts them."""
        self.since = 0.0
        """Time at which the application last took some of those bytes, or at which the first
        came."""
        self._kept = 0  # of them, what a `p2p.wire.FrameReader` has
        self._taken = 0  # of them, what the application received last, until it asks for more
        self._answer(negotiation.data_to_send())
        if isinstance(negotiation, Chooser):
            # What the objects of a stream without a protocol take. If they did not count, 1,024
            # connections with 256 openings each would hold 786 MiB for two keep-alives.
            owner.budget.hold(self, 4 * KI)

    @property
    def is_negotiated(self) -> bool:
        """True if both sides have agreed on `protocol`."""
        return self._negotiation is None

    @property
    def is_open(self) -> bool:
        """True if `try_send` can succeed."""
        return not (self._closed or self._sent_end or self._failure)

    # trio's interface.

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Queue ``data`` for the peer, waiting as it, or the network, cannot keep up.

        Raises `trio.BrokenResourceError`, `trio.ClosedResourceError`, `trio.BusyResourceError`.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            check("data", data, bytes, bytearray, memoryview)
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_sending()
        await trio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data)
        if view.nbytes != len(view):
            view = view.cast("B")
        size = len(view)
        self._credit -= size
        waited = False
        self._sending = True
        try:
            while size:
                sent = self._owner.mux.send(self._id, view)
                self._owner.flush()
                size -= sent
                if size:
                    view = view[sent:]
                    waited = True
                    self._stalls = 0
                    await self.writable.wait()
                    self._check_sending()
        except LocalProtocolError as error:
            # We check what we do: the peer has ended the stream, and we are yet to be told.
            raise trio.BrokenResourceError(str(error)) from error
        finally:
            self._sending = False
        if self._credit <= 0:
            self._credit = self.yield_every
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def drained(self, at_most: int = 0) -> None:
        """Return once at most `at_most` bytes of what was sent are still on this node.

        The count includes what other streams of the connection had sealed before, and excludes
        what they send later.
        """
        check_number("at_most", at_most)
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_draining()
        await trio.lowlevel.checkpoint()
        queued, mark = -1, 0
        self._sending = True
        try:
            while True:
                self._check_draining()
                now = self._owner.mux.queued(self._id)
                if now != queued:
                    # what has been taken since the last look lies below
                    queued, mark = now, self._owner.drains.sealed
                    self._stalls = 0
                drains = self._owner.drains
                if queued + max(0, mark - drains.left) <= at_most:
                    return
                drains.waiting[self] = mark + queued - at_most
                self._owner.flush()
                await self.writable.wait()
        finally:
            self._sending = False
            self._owner.drains.waiting.pop(self, None)

    def _check_draining(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._failure is not None and self._failure is not OVER:
            raise trio.BrokenResourceError(str(self._failure)) from self._failure

    async def wait_send_all_might_not_block(self) -> None:
        """Return when `send_all` would accept at least one byte at once."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_sending()
        await trio.lowlevel.checkpoint()
        self._sending = True
        try:
            self._check_sending()
            while not self._owner.mux.room(self._id):
                await self.writable.wait()
                self._check_sending()
        except LocalProtocolError as error:
            raise trio.BrokenResourceError(str(error)) from error
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Announce that nothing more will be sent. Receiving goes on."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        if not self._sent_end or self._closed:
            self._check_sending()
        self._sent_end = True
        self._owner.mux.send_end(self._id)
        self._owner.flush()
        await self._checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the next bytes, or ``b""`` when the peer has ended the stream.

        The bytes count as held until the next call: an echo, or a service whose answers the
        peer does not take, holds what it received for as long as it waits, 64 KiB for each of
        4,096 streams. Bytes to which a task still refers while it waits in the next call are
        not counted, so readers ``del`` them. Raises `trio.BrokenResourceError`,
        `trio.ClosedResourceError`, `trio.BusyResourceError`.
        """
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this stream")
        self._release_taken()  # the application comes back, and is done with it
        if self._chunks and self._credit > 0 and not self._closed:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._wait_readable()
        if not self._chunks:
            return b""
        chunk = self._chunks.pop(0)
        if max_bytes is not None and len(chunk) > max_bytes:
            head = chunk[:max_bytes]
            del chunk[:max_bytes]
            self._chunks.insert(0, chunk)
            chunk = head
        self._credit -= len(chunk)
        self._taken = len(chunk)
        self.since = self._owner.budget.time
        if self._owner.mux.consumed(self._id, len(chunk)):
            self._owner.flush()
        return chunk

    async def _wait_readable(self) -> None:
        """Return, after a checkpoint, once a chunk or the end has arrived. Raise if the stream
        is broken."""
        self._receiving = True
        try:
            if self._is_readable():
                await self._checkpoint()
            while not self._is_readable():
                await self._readable.wait()
        finally:
            self._receiving = False

    def _is_readable(self) -> bool:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._chunks:
            return True
        if self._failure is not None and not self._ended:
            raise trio.BrokenResourceError(str(self._failure)) from self._failure
        return self._ended

    def _check_sending(self) -> None:
        if self._closed or self._sent_end:
            raise trio.ClosedResourceError("this stream was closed")
        if self._failure is not None:
            raise trio.BrokenResourceError(str(self._failure)) from self._failure

    async def aclose(self) -> None:
        """End both directions. Bytes that were sent still arrive."""
        if not self._closed:
            self._owner.mux.send_end(self._id)
            self._owner.mux.stop_receiving(self._id, unread=bool(self._chunks))
            self._close()
        await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Run a cancellation point, and now and then a schedule point: a request has five of
        its own."""
        if self._credit > 0:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._credit = self.yield_every
            await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Abandon both directions at once."""
        if not self._closed:
            self._owner.mux.reset(self._id)
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._let_go()
        self._owner.let_go(self._id)
        if self._owner.mux.has_data:
            self._owner.flush()
        self._readable.set()
        self.writable.set()

    def _let_go(self) -> None:
        self._chunks.clear()
        self._kept = self._taken = 0
        self._owner.budget.forget(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            # The peer must not take half of what we meant to send for the whole.
            self.reset()
        await self.aclose()

    # What the connection tells us.

    def try_send(self, data: bytes) -> bool:
        """Queue all of ``data`` if there is room at once, else nothing. Return True if it was
        queued. Nothing that a peer does raises an exception here."""
        try:
            if self._sending or not self.is_open or self._owner.mux.room(self._id) < len(data):
                return False
            self._owner.mux.send(self._id, memoryview(data))
        except LocalProtocolError:
            return False  # the peer has ended the stream, and we are yet to be told
        self._owner.flush()
        return True

    async def wait_negotiated(self) -> None:
        """Return once `protocol` is agreed.

        Raises:
            ProtocolNotSupported: The peer refuses the protocol.
            trio.BrokenResourceError: The stream ended first.
        """
        while self._negotiation is not None:
            if isinstance(self._failure, ProtocolNotSupported):
                raise ProtocolNotSupported(str(self._failure))
            if self._failure is not None or self._ended or self._closed:
                raise trio.BrokenResourceError(
                    "the stream ended before its protocol was agreed"
                )
            await self._readable.wait()

    def feed(self, data: bytearray) -> None:
        """Take bytes from the peer. Raise `RemoteProtocolError` if they garble the negotiation.

        The stored bytes take at most a quarter more memory than their number: a record that was
        cut in front may still own all of its memory, and is then copied.
        """
        if self._closed or self._failure is not None:
            return
        if self._negotiation is not None:
            data = self._negotiate(self._negotiation, data)
            if not data or self._closed:  # closed at once, by a host that serves too many
                return
        size, chunks = len(data), self._chunks
        # Bytes of a piece that is copied behind the one before it. A bytearray of one byte
        # costs 85 bytes, so a window of 256 KiB that came byte by byte cost 21 MiB; larger
        # pieces stay where they were opened.
        # Bytes up to which small pieces are joined: what `receive_some` returns at once is
        # bounded by it.
        if size < (4 * KI) and chunks and len(chunks[-1]) < (16 * KI):
            chunks[-1] += data
        else:
            chunks.append(data if data.__alloc__() <= size + size // 4 + 1 else bytearray(data))
        self._readable.set()
        self._owner.budget.hold(self, size)

    def keep(self, count: int) -> None:
        """Count ``count`` bytes of an unfinished frame that the reader keeps (see
        `p2p.wire.Holds`)."""
        if not self._closed and self._failure is None:
            self._release_taken()  # it says itself what it keeps of that
            more, self._kept = count - self._kept, count
            if more > 0:
                self._owner.budget.hold(self, more)
            elif more:
                self._owner.budget.release(self, -more)

    def _release_taken(self) -> None:
        if self._taken:
            self._owner.budget.release(self, self._taken)
            self._taken = 0

    def evict(self) -> None:
        """Give up the stream because the host holds too much. The application sees a broken
        stream, and the peer a reset."""
        self._owner.mux.reset(self._id)
        self._ended = False
        self.fail(
            LimitExceeded("too much was unread over all connections, and most of it the peer's")
        )
        self._let_go()
        self._owner.flush()

    def feed_end(self) -> None:
        """Record that the peer will send no more."""
        if isinstance(self._negotiation, Chooser):
            self.reset()
        self._ended = True
        self._readable.set()

    def fail(self, error: Exception) -> None:
        """Break the stream with ``error``, which its readers and writers then see."""
        if self._failure is None:
            self._failure = error
        if isinstance(self._negotiation, Chooser):
            self._let_go()  # no application has it yet, and none will
        self._readable.set()
        self.writable.set()

    def has_stalled(self) -> bool:
        """Return True if a `send_all` waits in vain for the third time. This is called every 15
        s. A peer that takes nothing of an answer for so long holds a task, its question and the
        answer."""
        self._stalls = self._stalls + 1 if self._sending else 0
        return self._stalls > 2

    def is_nameless(self) -> bool:
        """Return True if the peer has not said what an incoming stream is for, and had not at
        the last call. This is called at each keep-alive."""
        is_waiting = isinstance(self._negotiation, Chooser)
        self._stalls += is_waiting
        return is_waiting and self._stalls > 1

    def _answer(self, data: bytes) -> None:
        """Send our part of a negotiation."""
        if data:
            self._owner.mux.answer(self._id, data)
            self._owner.flush()

    def _negotiate(self, negotiation: Proposer | Chooser, data: bytearray) -> bytearray:
        mux = self._owner.mux
        proposals = negotiation.proposals if isinstance(negotiation, Chooser) else 0
        try:
            negotiation.receive_data(data)
        except ProtocolNotSupported as error:
            mux.reset(self._id)
            self._owner.flush()
            self.fail(error)
            return bytearray()
        # one takes as long as a frame, and a frame has room for 32
        if isinstance(negotiation, Chooser):
            mux.frames += negotiation.proposals - proposals
        self._answer(negotiation.data_to_send())
        if negotiation.chosen is None:
            # else the rest of the window is all that the peer can waste
            if not negotiation.is_deaf:
                mux.consumed(self._id, len(data))
            return bytearray()
        leftover = bytearray(negotiation.leftover)
        mux.consumed(self._id, len(data) - len(leftover))
        self._negotiation = None
        self.protocol = negotiation.chosen
        self._readable.set()
        if isinstance(negotiation, Chooser):
            self._owner.budget.release(self, self.held)
            self._owner.on_stream(self)
        return leftover


_BATCH_BYTES: Final = 4 * (2 + MAX_RECORD)
"""Bytes of a sealing buffer, 256 KiB: four records with their lengths. More measured no
faster."""
_buffers: list[bytearray] = []
_CROWD: Final = 256
"""Number of frames (a new stream counts as 32) after which other tasks have their turn: about a
millisecond of work. The short end of a record of bulk stays below it."""
KEEPALIVE: Final = 30.0
"""Seconds between two keep-alive ticks."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds to flush a connection, or all of a host, when it closes: the 8 MiB that they may hold
together leave at 34 Mbit/s in that time. A peer that takes nothing must not hold up the end."""
_scratch: Final = memoryview(bytearray(512 * KI))
"""What is read from a raw stream at once: eight full records, two of the peer's batches, which
are opened one after the other without another system call."""

logger = logging.getLogger(__name__)


class _Pace(TokenBucket):
    """Limits the work that a peer may cause.

    One frame or record a KiB is free, so bulk never waits and is read in large pieces. Each
    costs 2 to 4 µs whatever it carries, so 25,000 a second are a tenth of a core.
    """

    __slots__ = ("_charged", "read_bytes")
    cautious = 16 * KI
    """Bytes read at a time from a peer that last sent small frames: 1,260 empty ones take 3 ms.
    All of `_scratch` would hold up all others for 90 ms."""

    def __init__(self) -> None:
        # As many frames and records may come at once after a pause: 0.15 s of work.
        super().__init__(50_000, 0.0)
        self.read_bytes = self.cautious
        self._charged = 0

    def charge(self, size: int, frames: int, now: float) -> float:
        """Return the seconds to pause, after the peer sent ``size`` bytes. ``frames`` is the
        total number of frames and records looked at so far."""
        excess = frames - self._charged - size // KI
        self._charged = frames
        self.refill(now, 25_000)
        if excess > 0:
            self.take(excess)
            if excess > _CROWD:
                self.read_bytes = self.cautious
        elif self.read_bytes < len(_scratch):
            self.read_bytes *= 2
        return max(0.0, -self.level) / 25_000


class _Drains:
    """The streams that wait until their sent bytes have left this machine
    (`Stream.drained`)."""

    __slots__ = ("_meter", "given", "looking", "sealed", "waiting")

    def __init__(self, meter: MeteredStream | None) -> None:
        self._meter = meter
        self.sealed = 0
        """Bytes taken from the mux so far."""
        self.given = 0
        """Bytes that the raw stream has taken."""
        self.waiting: dict[MuxedStream, int] = {}
        """Maps each waiting stream to the number of bytes of the connection that have to
        leave."""
        self.looking: trio.CancelScope | None = None
        """Scope to cancel if there is something to send while the writer waits for the line."""

    @property
    def left(self) -> int:
        """Bytes that have left for the line, as far as the raw stream can tell."""
        return self.given - (0 if self._meter is None else self._meter.unsent)

    def keep_short(self, burst: int) -> None:
        """Limit unsent bytes in the kernel to about ``burst``, the bytes sealed at a time."""
        if self._meter is not None:
            self._meter.keep_short(burst)

    def wake(self) -> None:
        """Wake all waiting streams, since bytes have left."""
        waiting, self.waiting = self.waiting, {}
        for stream in waiting:
            stream.writable.set()

    async def wait(self) -> None:
        """Return when some waiting stream may be done, or when `looking` was cancelled."""
        if self._meter is not None:
            at_most = self.given - min(self.waiting.values())
            with trio.CancelScope() as self.looking:
                await self._meter.wait_unsent(max(0, at_most))
            interrupted, self.looking = self.looking.cancelled_caught, None
            if interrupted:
                return
        self.wake()


class Connection:
    """The streams to one authenticated peer. Start `run` in a nursery; it returns when the
    connection is over."""

    def __init__(
        self,
        world: World,
        secured: Secured,
        *,
        dialer: bool,
        serves: Callable[[ProtocolId], bool],
        on_stream: Callable[[MuxedStream], None],
        keepalive: float = KEEPALIVE,
        budget: HostBudget | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Carry streams over ``secured``.

        ``on_stream`` is called with every incoming stream whose protocol ``serves`` accepts; it
        must not block. ``budget`` and ``turns`` are the host's, shared by all of its
        connections.
        """
        self.peer: PeerId = secured.peer
        self.dialer = dialer
        self.budget = budget or HostBudget(world.now)
        self.mux = Mux(dialer=dialer, budget=self.budget)
        self.mux.allowance = _CROWD
        self.remote_addr: Multiaddr | None = None
        """Address of the peer, as dialled or seen by the listener."""
        self.is_circuit = False
        """True if the connection runs through a relay."""
        self.is_replaced = False
        """True if a direct connection has replaced this one."""
        self.spoken: dict[ProtocolId, None] = {}
        """Protocols that the peer is known to speak. Streams of these open without waiting."""
        self.failure: RemoteProtocolError | None = None
        """The error by which the peer broke the protocol, if that ended the connection."""
        self._world = world
        self._raw = raw = secured.raw
        self._direct = raw if conforms(raw, DirectStream) else None
        self.drains = _Drains(raw if conforms(raw, MeteredStream) else None)
        self._burst = Burst(_BATCH_BYTES)
        self._session = secured.session
        self._early = secured.early
        self._serves = serves
        self.on_stream = on_stream
        self._keepalive = keepalive
        self.streams: dict[int, MuxedStream] = {}
        """Open streams, of either side."""
        self._work = Wakeup()
        self._unchoked = Wakeup()
        self._pace = _Pace()
        self._turns = turns or Turns()
        self.held = 0
        """Bytes in the host's budget that belong to no stream: those of the unfinished record
        and, while the reader waits, of the whole records that it has yet to look at, up to 512
        KiB. A peer that asks for answers, takes none, and fills up what we had read when we
        stopped makes us keep them, 0.4 MiB for each of 768 connections."""
        self.since = 0.0
        self._scope = trio.CancelScope()
        self._closing = False
        self._over = False
        self._closed = trio.Event()
        self._timers: list[Timer] = []
        self._heard = True  # since the last tick
        self._silence = 0  # ticks without a word of the peer
        self._tick_due = math.inf

    @property
    def is_open(self) -> bool:
        """True if new streams can be opened."""
        return not (self._closing or self._over) and self.mux.may_open

    async def run(self) -> None:
        """Carry bytes until either side closes. Nothing is raised; `failure` says how the
        connection ended."""
        self._schedule_tick()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._write()
        finally:
            self._over = True
            for timer in self._timers:
                timer.cancel()
            self._fail_streams(self.failure or ProtocolError("the connection was lost"))
            self.streams.clear()
            self.mux.abandon()
            self.budget.forget(self)
            try:
                await trio.aclose_forcefully(self._raw)
            finally:
                self._closed.set()

    def open_stream(self, protocol: ProtocolId) -> MuxedStream:
        """Open a stream for a protocol to which the peer has yet to agree.

        Raises:
            LimitExceeded: Too many streams are open.
            trio.BrokenResourceError: The connection is over.
        """
        if self._over or self._closing:
            raise trio.BrokenResourceError("the connection is closed")
        stream_id = self.mux.open_stream()
        stream = MuxedStream(self, stream_id, self.peer, Proposer(protocol))
        stream.protocol = protocol
        self.streams[stream_id] = stream
        return stream

    def learn(self, protocols: Iterable[ProtocolId]) -> None:
        """Remember protocols that the peer speaks."""
        for protocol in protocols:
            # Protocols remembered of one peer: what it may tell by identify (128), twice, as a
            # program that is updated tells others.
            if len(self.spoken) < 256:
                self.spoken[protocol] = None

    def close(self, code: int = NORMAL) -> None:
        """Announce the end, flush the queue, and close."""
        if not self._closing and not self._over:
            self._closing = True
            self.mux.go_away(code)
            deadline = self._world.now() + CLOSE_TIMEOUT
            self._timers.append(self._world.call_at(deadline, self._scope.cancel))
            self.flush()

    async def wait_closed(self) -> None:
        """Return when the connection has ended and its raw stream is closed."""
        await self._closed.wait()

    def flush(self) -> None:
        """Wake the writer, since the mux has data for the peer."""
        self._work.set()
        if self.drains.looking is not None:
            self.drains.looking.cancel()

    def abort(self) -> None:
        """End the connection at once."""
        self._scope.cancel()

    def evict(self) -> None:
        """Abort the connection, because the budget needs its bytes and it cannot go on without
        its record."""
        logger.info("gave up the connection to %r: the host holds too much", self.peer)
        self.budget.forget(self)
        self.abort()

    def let_go(self, stream_id: int) -> None:
        """Forget a stream that the application has closed. The mux alone waits for the peer to
        end it."""
        self.streams.pop(stream_id, None)

    def __repr__(self) -> str:
        return (
            f"Connection({'to' if self.dialer else 'from'} {self.peer!r}, {len(self.streams)}"
            " streams)"
        )

    # The two tasks.

    async def _read(self) -> None:
        try:
            await self._take([bytearray(self._early)])
            self._early = b""
            self.flush()
            while data := await self._receive_raw():
                self._heard = True
                opened = self._session.receive_data(data)
                if self._session.tail or self.held:
                    self._hold_tail(len(self._session.tail), progress=bool(opened))
                # A record of at most this many bytes counts as a message: its few frames are
                # charged with later ones, since a look at the clock for each would cost half as
                # much as the record.
                if len(opened) == 1 and len(opened[0]) < (KI):
                    if self._receive(opened[0]):
                        await self._wait_turn(())
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

    def _hold_tail(self, pending: int, *, progress: bool) -> None:
        """Count ``pending`` bytes of a record. With ``progress`` the record before is
        complete."""
        if progress:
            self.budget.forget(self)
        if pending > self.held:
            self.budget.hold(self, pending - self.held)

    async def _take(self, opened: list[bytearray]) -> None:
        """Process records piece by piece, and release each."""
        self.budget.time = self._world.now()
        size = sum(map(len, opened))
        while opened:
            # Of eight, or of some hundred small ones.
            if self._receive(opened.pop(0)):
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
                    if self.drains.waiting:
                        self.drains.wake()
                elif self._closing:
                    break
                elif self.drains.waiting:
                    # Let the line take what it was given, until a stream is drained or there is
                    # more.
                    before, since = self.drains.left, self._world.now()
                    await self.drains.wait()
                    if (left := self.drains.left - before) > 0:
                        self._note_line(left, self._world.now() - since)
                else:
                    await self._work.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("the connection to %r broke: %s", self.peer, error)
        self._scope.cancel()

    def _note_line(self, count: int = 0, seconds: float = 0.0) -> None:
        """Limit what is sealed at a time to what the line empties soon, given that it took
        ``count`` bytes in some seconds; all of a batch at once if ``count`` is 0."""
        if count:
            self._burst.note_slow(count, seconds)
        else:
            self._burst.note_free()
        self.mux.queue.shorten(min(MAX_PLAINTEXT, self._burst.size))
        self.drains.keep_short(self._burst.size)

    async def _receive_raw(self) -> bytes | bytearray | memoryview:
        """Return the next bytes, in memory that all connections share. They must be used before
        the next checkpoint."""
        if self._direct is None:
            return await self._raw.receive_some(self._pace.read_bytes)
        return _scratch[: await self._direct.receive_into(_scratch[: self._pace.read_bytes])]

    async def _send_batch(self) -> None:
        buffer = _buffers.pop() if _buffers else bytearray(_BATCH_BYTES)
        with memoryview(buffer) as view:
            used = records = 0
            while (
                records < 4
                and used < self._burst.size
                and self.mux.has_data
                and (piece := self.mux.data_to_send()) is not None
            ):
                used += self._session.seal_into(piece, view[used:])
                records += 1
            if self.mux.has_news:
                self._settle()
            self._unchoked.set()
            self.drains.sealed += used
            sent = 0 if self._direct is None else self._direct.send_nowait(view[:used])
            # A waiting connection keeps its sealing buffer only if an eighth of it is unsent;
            # less is copied, so a peer that ignores the answer to a ping does not hold 256 KiB.
            if used - sent > _BATCH_BYTES // 8:
                await self._send_slowly(view[sent:used], len(buffer))
                sent = used
            left = bytes(view[sent:used]) if sent < used else b""
        # Four sealing buffers are kept for reuse: as many connections can send at full speed on
        # one core.
        if len(_buffers) < 4:
            _buffers.append(buffer)
        if left:
            await self._send_slowly(left, len(left))
        elif sent == used and self._burst.size < _BATCH_BYTES:
            self._note_line()
        self.drains.given = self.drains.sealed

    async def _send_slowly(self, data: bytes | memoryview, held: int) -> None:
        """Send what the network does not take at once. Meanwhile ``held`` bytes count as
        queued."""
        self.mux.queue.seal(held)
        since = self._world.now()
        try:
            await self._raw.send_all(data)
            self._note_line(len(data), self._world.now() - since)
        finally:
            self.mux.queue.seal(-held)
            if self.mux.has_news:
                self._settle()

    # What the peer does.

    def _receive(self, plaintext: bytearray) -> bool:
        """Process a record of the peer. Return True if the reader must wait before the next, or
        before the rest of this one (`_wait_turn`)."""
        mux, streams = self.mux, self.streams
        for event in mux.receive_data(plaintext):
            # by far the most frequent, and `match` takes ten times as long
            if type(event) is DataReceived:
                if stream := streams.get(event.stream_id):
                    stream.feed(event.data)
            else:
                self._handle(event)
        if mux.has_news:
            self._settle()
        if mux.has_data:
            self.flush()
        return mux.allowance <= 0 or mux.is_choked

    async def _wait_turn(self, later: Sequence[bytearray]) -> None:
        """Wait while the peer takes none of our answers, and for a turn if this one's work is
        done. The rest of the record and ``later`` ones count as held meanwhile."""
        waiting = sum(map(len, later)) + len(self.mux.rest)
        self.budget.hold(self, waiting)
        while self.mux.is_choked:
            await self._unchoked.wait()
        if self.mux.allowance <= 0:
            await self._turns.wait()
            self.mux.allowance = _CROWD
        self.budget.release(self, min(waiting, self.held))

    def _handle(self, event: Event) -> None:
        match event:
            case StreamOpened(stream_id):
                self.streams[stream_id] = MuxedStream(
                    self, stream_id, self.peer, Chooser(self._serves)
                )
            case EndReceived(stream_id):
                if stream := self.streams.get(stream_id):
                    stream.feed_end()
            case StreamReset(stream_id):
                if stream := self.streams.get(stream_id):
                    stream.fail(ProtocolError("the peer reset the stream"))
            case ProtocolViolated(reason):
                raise RemoteProtocolError(reason)

    def _settle(self) -> None:
        """Wake the streams that may send again, and end those that are over."""
        for stream_id in self.mux.take_writable():
            if stream := self.streams.get(stream_id):
                stream.writable.set()
        for stream_id in self.mux.take_closed():
            if stream := self.streams.pop(stream_id, None):
                # it is ended, reset or closed already: nothing is to wait for it
                stream.fail(OVER)

    def _fail_streams(self, error: Exception) -> None:
        for stream in list(self.streams.values()):
            stream.fail(error)

    # Keep-alive.

    def _schedule_tick(self) -> None:
        if self._keepalive < math.inf and not self._closing:
            self._tick_due = self._world.now() + self._keepalive
            self._timers = [self._world.call_at(self._tick_due, self._tick)]

    def _tick(self) -> None:
        """Ping a silent peer, and drop streams that never got a protocol. This runs once per
        interval."""
        if self._closing or self._over:
            return
        if self._world.now() - self._tick_due > self._keepalive / 2:
            # We stood still (stopped, or swapped out): what the peer sent meanwhile is yet to
            # be read.
            logger.info("a keep-alive is %.0f s late", self._world.now() - self._tick_due)
            self._schedule_tick()
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
        for stream in list(self.streams.values()):
            if stream.is_nameless():
                stream.reset()
        self.mux.sweep()
        if self.mux.has_data:
            self.flush()
        self._settle()
        self._schedule_tick()
