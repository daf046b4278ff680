"""Pieces between members, over streams: served by digest, fetched from one peer or several.

A *blob* is a list of pieces that is known by its root, the digest of its pieces' digests: a
contribution, a mean, a state. A member serves those that it holds, and judges each piece that
it fetches by its digest; so one may come from several peers at a time, and a peer that gives
another piece is found out by the piece.

A request is one frame, ``[what, ...]``; the answer is frames of its own, an empty one if there
is nothing:

* ``["list", root]``: the digests, end to end
* ``["pieces", root, first, count]``: so many pieces
* ``["sum", step, view]``: the pieces that the asked peer sums in that view, each as soon as it
  is there, and behind them its signed `Sum`
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, ShoalError, StorageError
from p2p.host import PEER_TROUBLE, FrameReceiver, Host, Stream, send_frame
from p2p.identity import PeerId
from p2p.patience import fail_after_own, move_on_after_own
from p2p.wire import FrameReader, pack, unpack_untrusted
from p2p.world import Disk, World
from roles.diloco.core.messages import (
    PIECES_PROTOCOL,
    Sum,
    decode_message_untrusted,
    encode_message,
    split_digests,
)
from roles.diloco.core.pieces import MAX_PIECE_BYTES, PieceGrid, digest_of, root_of

logger = logging.getLogger(__name__)

MAX_REQUEST: Final = 128
"""Bytes: a word, a root and two numbers."""
MAX_ANSWER: Final = MAX_PIECE_BYTES + 64
"""Bytes of a frame: a piece, or the digests of `MAX_PIECES` pieces."""
SUM_PATIENCE: Final = 120.0
"""Seconds that a peer waits for a sum that is not there yet; then it asks again."""
PIECE_PATIENCE: Final = 60.0
"""Seconds that one piece of at most half a mebibyte may take: 70 kbit/s. A round's own patience
ends far earlier as a rule."""
BATCH: Final = 4
"""Pieces that one source is asked for at a time when there are several: with the last batches
under way no source has more than two mebibytes to go."""
LIAR: Final = 100.0
"""Penalty points of a piece with another digest than it was asked for by: at once refused."""


class PiecesUnavailable(ShoalError):
    """None of the peers that were asked gave all the wanted pieces."""


Read = Callable[[int], Awaitable[bytes]]
"""Gives the piece with a number."""
Take = Callable[[int, bytes], Awaitable[None]]
"""A callback that takes the number of a piece and its bytes."""


@dataclass(frozen=True, slots=True)
class PieceFile:
    """Pieces that lie end to end in a file of this node's disk."""

    disk: Disk
    path: str
    grid: PieceGrid

    async def read(self, index: int) -> bytes:
        """Return a piece.

        Raises:
            StorageError: The file is gone.
        """
        offset, length = index * self.grid.length(0), self.grid.length(index)
        try:
            return await self.disk.read(self.path, offset, length)
        except FileNotFoundError as error:
            raise StorageError(f"{self.path} is gone") from error

    async def write(self, index: int, piece: bytes) -> None:
        """Write a piece at its place in the file.

        Raises:
            StorageError: The disk failed.
            BadMessage: The piece has the wrong length.
        """
        if len(piece) != self.grid.length(index):
            raise BadMessage(f"piece {index} has {len(piece)} bytes")
        await self.disk.write(self.path, piece, index * self.grid.length(0))


@dataclass(frozen=True)
class Blob:
    """A file of pieces on disk, with the digests that name them."""

    digests: tuple[bytes, ...]
    file: PieceFile

    @property
    def root(self) -> bytes:
        """The digest that names the whole blob."""
        return root_of(self.digests)

    async def read(self, index: int) -> bytes:
        """Return a piece.

        Raises:
            StorageError: The disk failed or has damaged the piece, which a peer would take for
                a lie.
        """
        piece = await self.file.read(index)
        if digest_of(piece) != self.digests[index]:
            raise StorageError(f"piece {index} of {self.file.path} is damaged")
        return piece


class PieceServer:
    """Serves blobs and sums to other members."""

    def __init__(
        self,
        world: World,
        may: Callable[[PeerId], bool],
        may_have: Callable[[PeerId, int], bool] = lambda peer, size: True,
    ) -> None:
        """Begin without blobs.

        Args:
            world: Clock and randomness.
            may: Returns True if a peer may fetch.
            may_have: Returns True if a peer may get that many bytes more (see
                `p2p.meter.StrangerMeter.allows`).
        """
        self._world, self._may, self._may_have = world, may, may_have
        self._blobs: dict[bytes, Blob] = {}
        self._sums: dict[tuple[int, int], _Sums] = {}
        self._oldest = (0, 0)
        self._news = Notifier()
        self.sent = 0
        """Bytes of pieces sent."""
        self.rate = 0.0
        """Bytes a second of late, while something was sent; 0 before."""

    def offer(self, blob: Blob) -> bytes:
        """Serve a blob to peers that ask, and return its root."""
        root = blob.root
        self._blobs[root] = blob
        return root

    def keep_only(self, roots: Sequence[bytes]) -> None:
        """Forget all blobs but those with these roots."""
        self._blobs = {root: blob for root, blob in self._blobs.items() if root in roots}

    def holds(self, root: bytes) -> Blob | None:
        """Return the blob with this root, or None."""
        return self._blobs.get(root)

    def offer_pieces(self, step: int, view: int, read: Read, span: range) -> None:
        """Serve the first summed pieces, those at ``span`` of the mean, to peers that wait for
        them. It is called again when there are more. The last failed view is kept for members
        that are behind."""
        self._forget_sums((step, view - 1))
        self._sums[step, view] = _Sums(read, span)
        self._news.notify_all()

    async def offer_sum(self, total: Sum, read: Read) -> None:
        """Serve the whole sum, signed."""
        self._sums[total.step, total.view] = _Sums(read, total.span, total)
        self._news.notify_all()

    def forget_before(self, step: int, view: int) -> None:
        """Forget the sums of earlier steps and views."""
        self._forget_sums((step, view))
        self._news.notify_all()

    def _forget_sums(self, oldest: tuple[int, int]) -> None:
        self._oldest = max(self._oldest, oldest)
        self._sums = {at: one for at, one in self._sums.items() if at >= self._oldest}

    async def serve(self, stream: Stream) -> None:
        """Answer the requests of one stream."""
        if not self._may(stream.peer):
            return  # it may have a newer edition of the run than we
        receiver = FrameReceiver(stream, MAX_REQUEST)
        while (request := await receiver.receive()) is not None:
            match unpack_untrusted(request):
                case ["list", bytes(root)]:
                    blob = self._blobs.get(root)
                    digests = b"" if blob is None else b"".join(blob.digests)
                    if not self._may_have(stream.peer, len(digests)):
                        return
                    await send_frame(stream, digests)
                case ["pieces", bytes(root), int(first), int(count)]:
                    await self._give(stream, root, first, count)
                case ["sum", int(step), int(view)]:
                    await self._give_sum(stream, step, view)
                case _:
                    raise BadMessage("a request for pieces is none of ours")

    async def _give(self, stream: Stream, root: bytes, first: int, count: int) -> None:
        blob = self._blobs.get(root)
        if blob is None or not 0 <= first < first + count <= len(blob.digests):
            await send_frame(stream, b"")
            return
        began, sent = self._world.now(), 0
        for index in range(first, first + count):
            size = await self._send(stream, blob.read, index)
            sent += size
            if not size:
                break
        await stream.drained()
        seconds = self._world.now() - began
        if seconds > 0:
            rate = sent / seconds
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate

    async def _give_sum(self, stream: Stream, step: int, view: int) -> None:
        given = 0
        while (step, view) >= self._oldest:
            sums = self._sums.get((step, view))
            if sums is not None and given < len(sums.span):
                if not await self._send(stream, sums.read, sums.span[given]):
                    return
                given += 1
            elif sums is not None and sums.total is not None:
                await send_frame(stream, encode_message(sums.total))
                return
            else:
                with move_on_after_own(self._world, SUM_PATIENCE) as patience:
                    await self._news.wait()
                if patience.cancelled_caught:
                    break
        await send_frame(stream, b"")

    async def _send(self, stream: Stream, read: Read, index: int) -> int:
        """Send a piece and return the bytes sent; None, which ends the answer, if the peer may
        not have the piece or it is gone."""
        try:
            piece = await read(index)
        except StorageError as error:
            logger.info("no_piece index=%d: %s", index, error)
            piece = b""
        if not self._may_have(stream.peer, len(piece)):
            piece = b""
        await send_frame(stream, piece)
        self.sent += len(piece)
        return len(piece)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The pieces that this member has summed in a view so far."""

    read: Read
    span: range
    """Numbers of the pieces that it sums."""
    total: Sum | None = None
    """The signed digests of the pieces, once all are summed."""


@dataclass(slots=True)
class PieceClient:
    """Fetches pieces from other members."""

    world: World
    host: Host
    patience: float = PIECE_PATIENCE
    """Seconds that one piece may take."""
    received: int = 0
    """Bytes of pieces received."""

    async def _ask(
        self, peer: PeerId, request: Sequence[object], frames: int, patience: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield up to ``frames`` frames of the answer; fewer if the peer has no more.

        Each frame after the first must come within ``patience`` seconds.

        Raises:
            PEER_TROUBLE: The peer failed.
        """
        with fail_after_own(self.world, SUM_PATIENCE):
            stream = await self.host.open_stream(peer, PIECES_PROTOCOL)
        async with stream:
            await send_frame(stream, pack(list(request)))
            await stream.send_eof()
            reader = FrameReader(stream, MAX_ANSWER)
            for number in range(frames):
                enough = patience if number else max(patience, SUM_PATIENCE)
                with fail_after_own(self.world, enough):
                    data = await reader.receive()
                if not data:
                    return
                self.received += len(data)
                yield data

    async def pieces(
        self,
        peer: PeerId,
        root: bytes,
        first: int,
        digests: Sequence[bytes],
        take: Take,
    ) -> None:
        """Fetch the pieces from ``first`` on, which have these digests, and give each to
        ``take``.

        Raises:
            PiecesUnavailable: The peer does not have them.
            PEER_TROUBLE: The peer failed or lied.
        """
        request, found = ["pieces", root, first, len(digests)], 0
        async with aclosing(self._ask(peer, request, len(digests), self.patience)) as answer:
            async for data in answer:
                if digest_of(data) != digests[found]:
                    self.host.penalise(peer, LIAR, "another piece than it was asked for")
                    raise BadMessage("a piece has another digest than it was asked for by")
                await take(first + found, data)
                found += 1
        if found < len(digests):
            raise PiecesUnavailable(f"{peer.short} gave {found} of {len(digests)} pieces")

    async def sum(
        self, peer: PeerId, step: int, view: int, span: range, mean: PieceFile
    ) -> tuple[Sum, dict[int, bytes]]:
        """Fetch the pieces that an owner has summed, at ``span``, into a mean.

        Returns:
            Its signed list, which the caller judges, and one of its pieces if that has another
            length than the mean's.

        Raises:
            PiecesUnavailable: It is not there yet.
        """
        request, patience = ["sum", step, view], max(self.patience, SUM_PATIENCE)
        digests, odd, total = list[bytes](), dict[int, bytes](), None
        async with aclosing(self._ask(peer, request, len(span) + 1, patience)) as answer:
            async for data in answer:
                if len(digests) < len(span):
                    index = span[len(digests)]
                    digests.append(digest_of(data))
                    if len(data) == mean.grid.length(index):
                        await mean.write(index, data)
                    else:
                        odd = {index: data}
                else:
                    total = decode_message_untrusted(data)
        if total is None:
            raise PiecesUnavailable(f"{peer.short} gave {len(digests)} of {len(span)} sums")
        if (
            not isinstance(total, Sum)
            or (total.author, total.step, total.view) != (peer, step, view)
            or len(total.digests) != len(span)
        ):
            raise BadMessage("an owner's sum is another than it was asked for")
        if tuple(digests) != total.digests:
            raise BadMessage("a summed piece has another digest than its owner signed")
        return total, odd

    async def blob(
        self,
        root: bytes,
        sources: Sequence[PeerId],
        count: int,
        take: Take,
    ) -> tuple[bytes, ...]:
        """Fetch all pieces of a blob from all ``sources`` at once, and pass each checked piece
        to ``take``, possibly twice.

        Args:
            root: Root that names the blob.
            sources: Peers to ask.
            count: Number of pieces that it must have. Whoever named the root may have made it
                of pieces without end.
            take: Receives the pieces.

        Returns:
            The digests of the pieces.

        Raises:
            PiecesUnavailable: No source has it, or it has another number of pieces.
            StorageError: ``take`` raised it.
        """
        digests = await self._list(root, sources)
        if digests is None:
            raise PiecesUnavailable(f"none of {len(sources)} peers has what is wanted")
        if count != len(digests):
            raise PiecesUnavailable(f"it has {len(digests)} pieces, not {count}")
        pull, before = _Pull(digests, take, deque(range(0, len(digests), BATCH))), -1
        while pull.waiting and len(pull.found) > before:  # what one failed at, the others take
            before = len(pull.found)
            async with trio.open_nursery() as nursery:
                pull.scope = nursery.cancel_scope
                for peer in sources:
                    nursery.start_soon(self._pull, peer, root, pull)
        if pull.trouble is not None:
            raise pull.trouble
        if len(pull.found) < len(digests):
            raise PiecesUnavailable(
                f"{len(digests) - len(pull.found)} pieces came from no peer"
            )
        return digests

    async def _list(self, root: bytes, sources: Sequence[PeerId]) -> tuple[bytes, ...] | None:
        """Return a blob's digests from the first of ``sources`` that answers, or None."""
        found: list[tuple[bytes, ...]] = []

        async def ask(peer: PeerId) -> None:
            try:
                async with aclosing(
                    self._ask(peer, ["list", root], 1, self.patience)
                ) as answer:
                    async for data in answer:
                        if digest_of(data) != root:
                            self.host.penalise(
                                peer, LIAR, "another list of pieces than it was asked for"
                            )
                            return
                        found.append(split_digests(data))
            except PEER_TROUBLE as error:
                logger.info("no_list peer=%s: %r", peer.short, error)
            if found:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in sources:
                nursery.start_soon(ask, peer)
        return found[0] if found else None

    async def _pull(self, peer: PeerId, root: bytes, pull: _Pull) -> None:
        """Take batches until there are none, or this peer fails."""
        tried: set[int] = set()
        while (first := pull.next_batch(tried)) is not None:
            tried.add(first)
            wanted = pull.digests[first : first + BATCH]
            try:
                await self.pieces(peer, root, first, wanted, pull.take)
            except (PiecesUnavailable, *PEER_TROUBLE) as error:
                pull.give_back(first)
                logger.info("pieces_failed peer=%s: %r", peer.short, error)
                return
            except StorageError as error:  # of our own disk
                pull.trouble = error
                pull.scope.cancel()
                return
            pull.found.update(range(first, first + len(wanted)))
            if len(pull.found) == len(pull.digests):
                pull.scope.cancel()


@dataclass(slots=True)
class _Pull:
    """A download from several sources at once, which share a list of batches.

    When it is empty, a source that is done takes one that another has still under way. So a
    source that drips costs its batch a second time, and no time.
    """

    digests: Sequence[bytes]
    take: Take
    waiting: deque[int]
    found: set[int] = field(default_factory=set)
    takers: dict[int, int] = field(default_factory=dict)
    """Batches under way, by how many sources."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    trouble: StorageError | None = None

    def next_batch(self, tried: Collection[int]) -> int | None:
        """Return the next waiting batch, or else the unfinished batch that the fewest sources
        fetch.
        """
        late = [one for one in self.takers if one not in tried and one not in self.found]
        if self.waiting:
            first = self.waiting.popleft()
        elif late:
            first = min(late, key=lambda one: (self.takers[one], one))
        else:
            return None
        self.takers[first] = self.takers.get(first, 0) + 1
        return first

    def give_back(self, first: int) -> None:
        """Take a batch back from a failed source; it waits again if no other source fetches
        it.
        """
        self.takers[first] -= 1
        if not self.takers[first] and first not in self.found:
            del self.takers[first]
            self.waiting.append(first)
