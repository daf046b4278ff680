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
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage, ShoalError
from p2p.host import FrameReceiver, Host, Stream, send_frame
from p2p.identity import PeerId
from p2p.node.trouble import PEER_TROUBLE
from p2p.patience import fail_after_own, move_on_after_own
from p2p.wire import FrameReader, pack, unpack_untrusted
from p2p.world import World
from roles.diloco.core.messages import (
    PIECES_PROTOCOL,
    Sum,
    decode_message_untrusted,
    encode_message,
    split_digests,
)
from roles.diloco.core.outer import OuterState
from roles.diloco.core.pieces import (
    MAX_PIECE_BYTES,
    digest_of,
    root_of,
)

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
    """No peer that was asked gave all pieces of what was wanted."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Pieces, and how they are known."""

    digests: tuple[bytes, ...]
    piece: Callable[[int], bytes]

    @property
    def root(self) -> bytes:
        """What the whole is known by."""
        return root_of(self.digests)

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> Blob:
        """Of pieces in memory."""
        return cls(tuple(map(digest_of, pieces)), pieces.__getitem__)

    @classmethod
    def of_state(cls, state: OuterState) -> Blob:
        """Of weights and moments, which are cut when a piece is asked for."""
        digests = tuple(digest_of(state.piece(one)) for one in range(state.grid.pieces))
        return cls(digests, state.piece)


class PieceServer:
    """What a member gives to others."""

    def __init__(
        self,
        world: World,
        may: Callable[[PeerId], bool],
        may_have: Callable[[PeerId, int], bool] = lambda peer, size: True,
    ) -> None:
        """``may`` says who may fetch, ``may_have`` whether a peer gets so many bytes more
        (`p2p.meter.StrangerMeter.allows`)."""
        self._world, self._may, self._may_have = world, may, may_have
        self._blobs: dict[bytes, Blob] = {}
        self._sums: dict[tuple[int, int], tuple[Sum, Sequence[bytes]]] = {}
        self._growing: dict[tuple[int, int], Sequence[bytes]] = {}
        self._oldest = (0, 0)
        self._news = Notifier()
        self.sent = 0
        """Bytes of pieces given."""
        self.rate = 0.0
        """Bytes a second of late, while something was sent; 0 before."""

    def offer(self, blob: Blob) -> bytes:
        """Give this to those that ask; returns its root."""
        root = blob.root
        self._blobs[root] = blob
        return root

    def keep_only(self, roots: Sequence[bytes]) -> None:
        """Forget all else."""
        self._blobs = {root: blob for root, blob in self._blobs.items() if root in roots}

    def holds(self, root: bytes) -> Blob | None:
        """The blob of this root, if it is here."""
        return self._blobs.get(root)

    def offer_pieces(self, step: int, view: int, pieces: Sequence[bytes]) -> None:
        """Give the first of what is summed to those that wait for it; told again when there are
        more. Of views that have failed, the last is kept, for members that are behind."""
        self._forget_sums((step, view - 1))
        self._growing[step, view] = pieces
        self._news.notify_all()

    def offer_sum(self, total: Sum, pieces: Sequence[bytes]) -> None:
        """Give what was summed, whole and signed."""
        self._sums[total.step, total.view] = total, pieces
        self._news.notify_all()

    def forget_before(self, step: int, view: int) -> None:
        """No sum of an earlier step or view is of use any more."""
        self._forget_sums((step, view))
        self._news.notify_all()

    def _forget_sums(self, oldest: tuple[int, int]) -> None:
        self._oldest = max(self._oldest, oldest)
        self._sums = {at: one for at, one in self._sums.items() if at >= self._oldest}
        self._growing = {at: one for at, one in self._growing.items() if at >= self._oldest}

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
        if blob is not None and 0 <= first < first + count <= len(blob.digests):
            await self._send(stream, map(blob.piece, range(first, first + count)))
        else:
            await send_frame(stream, b"")

    async def _give_sum(self, stream: Stream, step: int, view: int) -> None:
        given = 0
        while (step, view) >= self._oldest:
            whole = self._sums.get((step, view))
            pieces = self._growing.get((step, view), ()) if whole is None else whole[1]
            if len(pieces) > given:
                if not self._may_have(stream.peer, len(pieces[given])):
                    break
                await send_frame(stream, pieces[given])
                self.sent += len(pieces[given])
                given += 1
            elif whole is not None:
                await send_frame(stream, encode_message(whole[0]))
                return
            else:
                with move_on_after_own(self._world, SUM_PATIENCE) as patience:
                    await self._news.wait()
                if patience.cancelled_caught:
                    break
        await send_frame(stream, b"")

    async def _send(self, stream: Stream, pieces: Iterable[bytes]) -> None:
        began, sent = self._world.now(), 0
        for piece in pieces:
            if not self._may_have(stream.peer, len(piece)):
                await send_frame(stream, b"")
                break
            await send_frame(stream, piece)
            sent += len(piece)
        await stream.drained()
        self.sent += sent
        seconds = self._world.now() - began
        if seconds > 0:
            rate = sent / seconds
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate


@dataclass(slots=True)
class PieceClient:
    """What a member takes from others."""

    world: World
    host: Host
    patience: float = PIECE_PATIENCE
    """Seconds that one piece may take."""
    received: int = 0
    """Bytes of pieces taken."""

    async def _ask(
        self, peer: PeerId, request: Sequence[object], frames: int, patience: float
    ) -> AsyncGenerator[bytes, None]:
        """So many frames of the answer, each behind the first within ``patience`` seconds;
        fewer if the peer has nothing. Raises `PEER_TROUBLE`."""
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
        take: Callable[[bytes], None],
    ) -> None:
        """Have ``take`` called with each of the pieces from ``first`` on, which have these
        digests. Raises `PiecesUnavailable`, `PEER_TROUBLE`."""
        request, found = ["pieces", root, first, len(digests)], 0
        async with aclosing(self._ask(peer, request, len(digests), self.patience)) as answer:
            async for data in answer:
                if digest_of(data) != digests[found]:
                    self.host.penalise(peer, LIAR, "another piece than it was asked for")
                    raise BadMessage("a piece has another digest than it was asked for by")
                take(data)
                found += 1
        if found < len(digests):
            raise PiecesUnavailable(f"{peer.short} gave {found} of {len(digests)} pieces")

    async def sum(
        self, peer: PeerId, step: int, view: int, count: int
    ) -> tuple[Sum, list[bytes]]:
        """What an owner has summed, judged by its own list: the caller judges that. Raises
        `PiecesUnavailable`, `PEER_TROUBLE`."""
        request, patience = ["sum", step, view], max(self.patience, SUM_PATIENCE)
        async with aclosing(self._ask(peer, request, count + 1, patience)) as answer:
            found = [data async for data in answer]
        if len(found) <= count:
            raise PiecesUnavailable(f"{peer.short} gave {len(found)} of {count} summed pieces")
        total = decode_message_untrusted(found.pop())
        if (
            not isinstance(total, Sum)
            or (total.author, total.step, total.view) != (peer, step, view)
            or len(total.digests) != count
        ):
            raise BadMessage("an owner's sum is another than it was asked for")
        if tuple(map(digest_of, found)) != total.digests:
            raise BadMessage("a summed piece has another digest than its owner signed")
        return total, found

    async def blob(
        self, root: bytes, sources: Sequence[PeerId], count: int | None = None
    ) -> list[bytes]:
        """All pieces of a blob, from all ``sources`` at once, each judged.

        Args:
            root: Names the blob.
            sources: Who is asked.
            count: Number of pieces that it must have, if that is known. Whoever named the root
                may have made it of pieces without end.

        Raises:
            PiecesUnavailable: No source has it, or it has another number of pieces.
        """
        digests = await self._list(root, sources)
        if digests is not None and count not in (None, len(digests)):
            raise PiecesUnavailable(f"it has {len(digests)} pieces, not {count}")
        if digests is None:
            raise PiecesUnavailable(f"none of {len(sources)} peers has what is wanted")
        pull, before = _Pull(digests, deque(range(0, len(digests), BATCH))), -1
        while pull.waiting and len(pull.found) > before:  # what one failed at, the others take
            before = len(pull.found)
            async with trio.open_nursery() as nursery:
                pull.scope = nursery.cancel_scope
                for peer in sources:
                    nursery.start_soon(self._pull, peer, root, pull)
        if len(pull.found) < len(digests):
            raise PiecesUnavailable(
                f"{len(digests) - len(pull.found)} pieces came from no peer"
            )
        return [pull.found[one] for one in range(len(digests))]

    async def _list(self, root: bytes, sources: Sequence[PeerId]) -> tuple[bytes, ...] | None:
        """A blob's digests, from the first of all ``sources`` that gives them."""
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
            pieces = list[bytes]()
            try:
                await self.pieces(peer, root, first, wanted, pieces.append)
            except (PiecesUnavailable, *PEER_TROUBLE) as error:
                pull.give_back(first)
                logger.info("pieces_failed peer=%s: %r", peer.short, error)
                return
            pull.found.update(enumerate(pieces, first))
            if len(pull.found) == len(pull.digests):
                pull.scope.cancel()


@dataclass(slots=True)
class _Pull:
    """What several sources give at once: a common list of batches.

    When it is empty, a source that is done takes one that another has still under way. So a
    source that drips costs its batch a second time, and no time.
    """

    digests: Sequence[bytes]
    waiting: deque[int]
    found: dict[int, bytes] = field(default_factory=dict)
    takers: dict[int, int] = field(default_factory=dict)
    """Batches under way, by how many sources."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def next_batch(self, tried: Collection[int]) -> int | None:
        """The next of the list, or the one under way that the fewest have."""
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
        """A source has failed at a batch: if no other is at it, it waits again."""
        self.takers[first] -= 1
        if not self.takers[first] and first not in self.found:
            del self.takers[first]
            self.waiting.append(first)
