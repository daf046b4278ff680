"""One stream of a connection: trio's stream interface over a `p2p.transport.core.yamux.Mux`.

What the peer sends is fed in synchronously by the connection's reader; the protocol is
negotiated there too, so a stream costs no task until a handler serves it.
"""

from __future__ import annotations

import operator
from types import TracebackType
from typing import Final, Protocol

import trio

from p2p.door import check, check_number
from p2p.errors import LimitExceeded, LocalProtocolError, ProtocolError, ProtocolNotSupported
from p2p.host import Stream
from p2p.identity import PeerId, ProtocolId
from p2p.transport.core.budget import HostBudget
from p2p.transport.core.negotiate import Chooser, Proposer
from p2p.transport.core.yamux import Mux
from p2p.transport.wakeup import Wakeup
from p2p.wire import KI

STALLS: Final = 2
"""Looks (one each 15 s) at which a served stream may be found to wait for the same room; at the
next it is given up. A peer that takes nothing of an answer for so long holds a task, its
question and the answer."""
OVER: Final = ProtocolError("the stream is over")
"""Both sides have ended it: nothing that was sent is lost."""
_UNKNOWN: Final = ProtocolId("")
_SMALL: Final = 4 * KI
"""Bytes of a piece that is copied behind the one before it. A bytearray of one byte costs 85
bytes, so a window of 256 KiB that came byte by byte cost 21 MiB; larger pieces stay where they
were opened."""
_JOINED: Final = 16 * KI
"""Bytes up to which small pieces are joined: what `receive_some` returns at once is bounded by
it.
"""
_UNNAMED_COST: Final = 4 * KI
"""Bytes that an incoming stream counts as until its protocol is agreed: what its objects take.
Without it, 1,024 connections with 256 openings each and nothing else hold 786 MiB for two
keep-alive intervals."""


class StreamOwner(Protocol):
    """What a stream needs of its connection."""

    mux: Mux
    budget: HostBudget
    """What the streams of all connections hold."""
    yield_every: int
    """Bytes a task may send or receive between two schedule points. trio would like 0; that
    costs 4 KiB writes three quarters of their speed, since the writer then sees them one by
    one."""

    def flush(self) -> None:
        """The mux has something for the peer."""
        ...

    @property
    def sealed(self) -> int:
        """Bytes taken from the mux so far, as they are on the wire."""
        ...

    def unsent(self, mark: int) -> int:
        """How many of the first ``mark`` of those are still on this machine."""
        ...

    def drain(self, stream: MuxedStream, mark: int) -> None:
        """Wake ``stream`` when the first ``mark`` bytes have left, or sooner."""
        ...

    def undrain(self, stream: MuxedStream) -> None:
        """It waits no more."""
        ...

    def negotiated(self, stream: MuxedStream) -> None:
        """An incoming stream knows its protocol."""
        ...

    def let_go(self, stream_id: int) -> None:
        """The application has closed the stream: nothing that the peer does is news to it."""
        ...


class MuxedStream(Stream):
    """An ordered byte stream to one peer, for one protocol. Left by an exception, it is
    reset.
    """

    def __init__(
        self, owner: StreamOwner, stream_id: int, peer: PeerId, negotiation: Proposer | Chooser
    ) -> None:
        self.peer = peer
        self.protocol = _UNKNOWN
        self._owner = owner
        self._id = stream_id
        self._negotiation: Proposer | Chooser | None = negotiation
        self._chunks: list[
            bytearray
        ] = []  # a few, at most: an empty deque takes 0.7 KiB, and streams are idle
        self._readable = Wakeup()
        self._writable = Wakeup()
        # Flags, not a `p2p.concurrency.ConflictDetector` each: with two more objects a stream
        # and three more blocks a request, small requests took 3 to 6 % more CPU time.
        self._receiving = self._sending = False
        self._stalls = 0  # looks of `has_stalled` during the present wait for room
        self._ended = False  # the peer will send no more
        self._sent_end = False
        self._closed = False
        self._failure: Exception | None = None
        self._credit = owner.yield_every
        self.held = 0
        """Bytes of the peer's that we keep, as the budget counts them."""
        self.since = 0.0
        """When the application last took some of them, or when the first came."""
        self._kept = 0  # of them, what a `p2p.wire.FrameReader` has
        self._taken = 0  # of them, what the application received last, until it asks for more
        self._answer(negotiation.data_to_send())
        if isinstance(negotiation, Chooser):
            self._owner.budget.hold(self, _UNNAMED_COST)

    @property
    def is_negotiated(self) -> bool:
        """Whether both sides have agreed on `protocol`."""
        return self._negotiation is None

    @property
    def is_open(self) -> bool:
        """Whether `try_send` has a chance."""
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
                    await self._writable.wait()
                    self._check_sending()
        except LocalProtocolError as error:
            # We check what we do: the peer has ended the stream, and we are yet to be told.
            raise trio.BrokenResourceError(str(error)) from error
        finally:
            self._sending = False
        if self._credit <= 0:
            self._credit = self._owner.yield_every
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def drained(self, at_most: int = 0) -> None:
        """Return once at most ``at_most`` bytes of what was sent are still on this node.

        What other streams of the connection had sealed before counts too; what they say later
        does not.
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
                    queued, mark = now, self._owner.sealed
                    self._stalls = 0
                if queued + self._owner.unsent(mark) <= at_most:
                    return
                self._owner.drain(self, mark + queued - at_most)
                await self._writable.wait()
        finally:
            self._sending = False
            self._owner.undrain(self)

    def _check_draining(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._failure is not None and self._failure is not OVER:
            raise trio.BrokenResourceError(str(self._failure)) from self._failure

    async def wait_send_all_might_not_block(self) -> None:
        """Return when `send_all` would take at least one byte at once."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_sending()
        await trio.lowlevel.checkpoint()
        self._sending = True
        try:
            self._check_sending()
            while not self._owner.mux.room(self._id):
                await self._writable.wait()
                self._check_sending()
        except LocalProtocolError as error:
            raise trio.BrokenResourceError(str(error)) from error
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Say that nothing more will be sent; receiving goes on."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        if not self._sent_end or self._closed:
            self._check_sending()
        self._sent_end = True
        self._owner.mux.send_end(self._id)
        self._owner.flush()
        await self._checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """The next bytes, or ``b""`` when the peer has ended the stream.

        They count as held until the next call: an echo, or a service whose answers the peer
        does not take, holds what it received for as long as it waits, 64 KiB for each of 4,096
        streams. What a task still names while it waits in the next call is in no account:
        readers ``del`` it. Raises `trio.BrokenResourceError`, `trio.ClosedResourceError`,
        `trio.BusyResourceError`.
        """
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this stream")
        if self._taken:  # the application comes back, and is done with it
            self._owner.budget.release(self, self._taken)
            self._taken = 0
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
        """Return, after a checkpoint, once there is a chunk or the end. Raises otherwise."""
        self._receiving = True
        try:
            if self._is_readable():
                if self._credit > 0:
                    await trio.lowlevel.checkpoint_if_cancelled()
                else:
                    self._credit = self._owner.yield_every
                    await trio.lowlevel.checkpoint()
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
        """End both directions; what was sent still arrives."""
        if not self._closed:
            self._owner.mux.send_end(self._id)
            self._owner.mux.stop_receiving(self._id, unread=bool(self._chunks))
            self._close()
        await self._checkpoint()

    async def _checkpoint(self) -> None:
        """A cancellation point, and a schedule point once in a while: a request has five of its
        own.
        """
        if self._credit > 0:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._credit = self._owner.yield_every
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
        self._writable.set()

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
        """Queue all of ``data`` if there is room at once, else nothing. Never raises for what a
        peer did.
        """
        try:
            if self._sending or not self.is_open or self._owner.mux.room(self._id) < len(data):
                return False
            self._owner.mux.send(self._id, memoryview(data))
        except LocalProtocolError:
            return False  # the peer has ended the stream, and we are yet to be told
        self._owner.flush()
        return True

    async def wait_negotiated(self) -> None:
        """Return once `protocol` is agreed. Raises `ProtocolNotSupported` or
        `trio.BrokenResourceError`.
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
        """Bytes from the peer. Raises `RemoteProtocolError` when it garbles the negotiation.

        What is kept takes at most a quarter more memory than it has bytes: a record that was
        cut in front may still own all of its memory, and is copied then.
        """
        if self._closed or self._failure is not None:
            return
        if self._negotiation is not None:
            data = self._negotiate(self._negotiation, data)
            if not data or self._closed:  # closed at once, by a host that serves too many
                return
        size, chunks = len(data), self._chunks
        if size < _SMALL and chunks and len(chunks[-1]) < _JOINED:
            chunks[-1] += data
        else:
            chunks.append(data if data.__alloc__() <= size + size // 4 + 1 else bytearray(data))
        self._readable.set()
        self._owner.budget.hold(self, size)

    def keep(self, count: int) -> None:
        """The reader keeps ``count`` bytes of an unfinished frame (a `p2p.wire.Holds`)."""
        if not self._closed and self._failure is None:
            if self._taken:  # it says itself what it keeps of that
                self._owner.budget.release(self, self._taken)
                self._taken = 0
            more, self._kept = count - self._kept, count
            if more > 0:
                self._owner.budget.hold(self, more)
            elif more:
                self._owner.budget.release(self, -more)

    def evict(self) -> None:
        """Our host holds too much: the application sees a broken stream and the peer a
        reset.
        """
        self._owner.mux.reset(self._id)
        self._ended = False
        self.fail(
            LimitExceeded("too much was unread over all connections, and most of it the peer's")
        )
        self._let_go()
        self._owner.flush()

    def feed_end(self) -> None:
        """The peer will send no more."""
        if isinstance(self._negotiation, Chooser):
            self.reset()
        self._ended = True
        self._readable.set()

    def fail(self, error: Exception) -> None:
        """The stream, or its connection, is broken."""
        if self._failure is None:
            self._failure = error
        if isinstance(self._negotiation, Chooser):
            self._let_go()  # no application has it yet, and none will
        self._readable.set()
        self._writable.set()

    def has_stalled(self) -> bool:
        """Asked once in a while: whether a `send_all` waited in vain at the last `STALLS`
        looks.
        """
        self._stalls = self._stalls + 1 if self._sending else 0
        return self._stalls > STALLS

    def wake_sender(self) -> None:
        """Wake the sender: there may be room again."""
        self._writable.set()

    def _answer(self, data: bytes) -> None:
        """Our part of a negotiation."""
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
            if self.held:
                self._owner.budget.release(self, _UNNAMED_COST)
            self._owner.negotiated(self)
        return leftover
