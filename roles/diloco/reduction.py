"""One exchange: the contributions of a plan become the next state, which is not in force yet.

Each owner fetches its pieces of all contributions, adds them up and signs the digests of what
came out; each member fetches every owner's pieces, and takes the outer step. By turns each
member repeats the sum of one piece of one owner from the contributors' own bytes before it
votes: an owner that lies in all its pieces is caught in the first round, with evidence that
every member judges by itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.host import PEER_TROUBLE
from p2p.identity import PeerId, Signer, Verify
from p2p.wire import MIB
from p2p.world import World
from roles.diloco.core.events import Reduce
from roles.diloco.core.messages import (
    BadPart,
    BadSum,
    Fault,
    Outcome,
    Plan,
    Ready,
    Sum,
    Unreadable,
)
from roles.diloco.core.outer import BadPiece
from roles.diloco.core.pieces import digest_of, root_of
from roles.diloco.core.round import owners_of, shares_of
from roles.diloco.exchange import PieceClient, PieceFile, PieceServer, PiecesUnavailable
from roles.diloco.inner import InnerEngine
from roles.shared.backoff import Backoff

T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 16 * MIB
"""Bytes of contributions that wait to be summed, and cross to the worker at a time."""


class ReductionFailed(Exception):
    """The pieces of some members did not come, or were none."""

    def __init__(self, suspects: Sequence[PeerId]) -> None:
        super().__init__(f"{len(suspects)} members gave nothing that can be used")
        self.suspects = tuple(suspects)


@dataclass(slots=True)
class Reduction:
    """One view's exchange: fetches contributions, sums pieces and collects the mean."""

    world: World
    signer: Signer
    verify: Verify
    run: bytes
    engine: InnerEngine
    server: PieceServer
    client: PieceClient
    request: Reduce
    file: PieceFile
    """The file that receives the mean."""
    found: Callable[[Fault], None]
    """Called with each piece of evidence."""
    heard: Callable[[Sum], None]
    """Called with each `Sum` that an owner has signed."""
    parts_missing: dict[PeerId, None] = field(default_factory=dict)
    """Contributors whose pieces are still missing."""
    sums_missing: dict[PeerId, None] = field(default_factory=dict)
    """Owners whose sums are still missing."""
    _sums: dict[PeerId, Sum] = field(default_factory=dict)
    """Maps each owner to its signed `Sum`."""
    _news: Notifier = field(default_factory=Notifier)
    """Notified when a part has come and when one was taken."""

    @property
    def suspects(self) -> tuple[PeerId, ...]:
        """Peers to blame if the time runs out: missing contributors, or else owners of missing
        sums.
        """
        return tuple(self.parts_missing or self.sums_missing)

    @property
    def _plan(self) -> Plan:
        return self.request.plan

    async def mean(self) -> tuple[bytes, ...]:
        """Fetch the mean into its file, as its owners encoded it. Return the digests of its
        pieces.

        Raises:
            ReductionFailed: Some peers did not give their pieces.
            StorageError: The disk failed.
        """
        me = self.signer.peer_id
        owner_of = owners_of(self.file.grid, self.request.readys)
        spans = {peer: span_of(owner_of, peer) for peer in dict.fromkeys(owner_of)}
        self.sums_missing = dict.fromkeys(peer for peer in spans if peer != me)
        async with trio.open_nursery() as nursery:
            for peer, span in spans.items():
                nursery.start_soon(self._own if peer == me else self._fetch_sum, peer, span)
        await self._audit()
        return tuple(one for peer in sorted(spans) for one in self._sums[peer].digests)

    async def carried(self, outcome: Outcome) -> tuple[bytes, ...]:
        """Bring a mean that was voted for before into the file."""
        root, holders, count = outcome.sum_root, self.request.holders, self.file.grid.pieces
        self.sums_missing = dict.fromkeys(holders)
        sources = [peer for peer in holders if peer != self.signer.peer_id]
        held = self.server.holds(root)
        if held is None:
            fetch = partial(self.client.blob, root, sources, count, self.file.write)
            return await self._insist(fetch)
        try:  # it may be a state, or an update: voters name what they like
            if len(held.digests) != count:
                raise BadMessage(f"a mean has {count} pieces, not {len(held.digests)}")
            for index in range(count):
                await self.file.write(index, await held.read(index))
        except BadMessage as error:
            logger.warning("diloco_bad_mean step=%d: %s", self._plan.step, error)
            raise ReductionFailed(sources) from error
        return held.digests

    async def unreadable(self, index: int) -> ReductionFailed:
        """Report that a signed piece of the mean cannot be decoded, and return the error to
        raise.
        """
        logger.warning("diloco_bad_mean step=%d: piece %d", self._plan.step, index)
        for owner, total in self._sums.items():
            if index in total.span:
                self.found(Unreadable(total, index, await self.file.read(index)))
                return ReductionFailed([owner])
        return ReductionFailed(self.request.holders)

    async def _own(self, me: PeerId, span: range) -> None:
        """Sum this member's pieces, each as soon as all contributors' parts are here. Others
        fetch it at once, so that no line waits for the last part."""
        step, view, readys = self._plan.step, self.request.view, self.request.readys
        parts = [deque[bytes]() for _ in readys]
        digests = list[bytes]()
        async with trio.open_nursery() as nursery:
            for ready, into in zip(readys, parts, strict=True):
                nursery.start_soon(self._fetch_part, ready, span, into)
            while len(digests) < len(span):
                count = min(map(len, parts))
                if not count:
                    await self._news.wait()
                    continue
                first = span.start + len(digests)
                taken = [[into.popleft() for _ in range(count)] for into in parts]
                self._news.notify_all()
                for index, piece in enumerate(await self._sum(first, taken), first):
                    await self.file.write(index, piece)
                    digests.append(digest_of(piece))
                there = range(span.start, span.start + len(digests))
                self.server.offer_pieces(step, view, self.file.read, there)
        total = Sum(step, view, self._plan.id, span.start, tuple(digests), author=me)
        self._sums[me] = total.signed(self.run, self.signer)
        await self.server.offer_sum(self._sums[me], self.file.read)

    async def _sum(self, first: int, parts: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return the pieces of the mean from ``first`` on. An invalid piece is evidence against
        the contributor that signed it."""
        readys = self.request.readys
        norms, by = [one.norms for one in readys], list(shares_of(readys).values())
        try:
            return await self.engine.sum(first, parts, norms, by)
        except BadPiece as bad:
            ready, piece = readys[bad.rank], parts[bad.rank][bad.index - first]
            logger.warning("diloco_bad_part peer=%s piece=%d", ready.author.short, bad.index)
            self.found(BadPart(ready, bad.index, piece))
            raise ReductionFailed([ready.author]) from bad

    async def _fetch_part(self, ready: Ready, span: range, into: deque[bytes]) -> None:
        """Fetch a contributor's pieces into a short queue, where they wait to be summed."""
        root, most = root_of(ready.digests), MOST_WAITING // len(self.request.readys)
        reached = span.start

        async def take(index: int, piece: bytes) -> None:
            nonlocal reached
            while into and len(into) * len(piece) >= most:
                await self._news.wait()
            into.append(piece)
            reached = index + 1
            self._news.notify_all()

        held = self.server.holds(root)
        if held is not None:
            for index in span:
                await take(index, await held.read(index))
            return
        self.parts_missing[ready.author] = None

        async def rest() -> None:
            wanted = ready.digests[reached : span.stop]
            await self.client.pieces(ready.author, root, reached, wanted, take)

        await self._insist(rest)
        self.parts_missing.pop(ready.author, None)

    async def _fetch_sum(self, owner: PeerId, span: range) -> None:
        step, view = self._plan.step, self.request.view
        total, odd = await self._insist(
            partial(self.client.sum, owner, step, view, span, self.file)
        )
        self.heard(total)
        if (
            not total.is_genuine(self.run, self.verify)
            or total.plan != self._plan.id
            or total.first != span.start
        ):
            raise ReductionFailed([owner])
        for index, piece in odd.items():
            self.found(Unreadable(total, index, piece))
            raise ReductionFailed([owner])
        self._sums[owner] = total
        self.sums_missing.pop(owner, None)

    async def _audit(self) -> None:
        """Repeat the sum of one piece. Each owner has another auditor at each step."""
        me, readys = self.signer.peer_id, self.request.readys
        peers = sorted(self._sums)
        owner = peers[(auditor_rank(self._plan, me) + self._plan.step) % len(peers)]
        if owner == me:
            return
        total = self._sums[owner]
        index = total.first + self.world.rng("diloco/audit").randrange(len(total.digests))
        parts = [deque[bytes]() for _ in readys]
        async with trio.open_nursery() as nursery:
            for one, into in zip(readys, parts, strict=True):
                nursery.start_soon(self._fetch_part, one, range(index, index + 1), into)
        evidence = tuple(into[0] for into in parts)
        (right,) = await self._sum(index, [[one] for one in evidence])
        if digest_of(right) != total.digests[index - total.first]:
            logger.warning("diloco_bad_sum peer=%s piece=%d", owner.short, index)
            self.found(BadSum(total, self._plan, readys, index, evidence))
            raise ReductionFailed([owner])

    async def _insist(self, fetch: Callable[[], Awaitable[T]]) -> T:
        """Try again as long as the view lasts: its deadline is the caller's."""
        backoff = Backoff(self.world, "diloco/fetch")
        while True:
            try:
                return await fetch()
            except (PiecesUnavailable, *PEER_TROUBLE) as error:
                logger.debug("diloco_fetch step=%d: %r", self._plan.step, error)
            await backoff.wait()


def span_of(owner_of: Sequence[PeerId], peer: PeerId) -> range:
    """Return the range of an owner's pieces."""
    first = list(owner_of).index(peer)
    return range(first, first + list(owner_of).count(peer))


def auditor_rank(plan: Plan, peer: PeerId) -> int:
    """Return a member's rank among the peers that contribute or are members after the step."""
    everyone = sorted({*plan.summed, *plan.members, peer})
    return everyone.index(peer)
