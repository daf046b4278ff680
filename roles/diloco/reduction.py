"""One exchange: the contributions of a plan become the next state, which is not in force yet.

Each owner fetches its pieces of all contributions, adds them up and signs the digests of what
came out; each member fetches every owner's pieces, and takes the outer step. By turns each
member repeats the sum of one piece of one owner from the contributors' own bytes before it
votes: an owner that lies in all its pieces is caught in the first round, with evidence that
every member judges by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import trio

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.identity import PeerId, Signer, Verify
from p2p.node.trouble import PEER_TROUBLE
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
from roles.diloco.core.outer import OuterAlgorithm, OuterState
from roles.diloco.core.pieces import PieceGrid, check_part, digest_of, root_of
from roles.diloco.core.round import is_unreadable, owners_of, sum_of
from roles.diloco.exchange import Blob, PieceClient, PieceServer, PiecesUnavailable
from roles.shared.backoff import Backoff

T = TypeVar("T")

logger = logging.getLogger(__name__)

SUM_RATE: Final = 500e6
"""Bytes of float32 that are decoded and added in a second, for simulated time."""


class ReductionFailed(Exception):
    """The pieces of some members did not come, or were none."""

    def __init__(self, suspects: Sequence[PeerId]) -> None:
        super().__init__(f"{len(suspects)} members gave nothing that can be used")
        self.suspects = tuple(suspects)


@dataclass(slots=True)
class Reduction:
    """What one view's exchange needs; made for it."""

    world: World
    signer: Signer
    verify: Verify
    run: bytes
    grid: PieceGrid
    server: PieceServer
    client: PieceClient
    request: Reduce
    found: Callable[[Fault], None]
    """Told of evidence."""
    heard: Callable[[Sum], None]
    """Told of what owners have signed."""
    parts_missing: dict[PeerId, None] = field(default_factory=dict)
    """Whose contributions are waited for."""
    sums_missing: dict[PeerId, None] = field(default_factory=dict)
    """Whose sums are waited for."""
    _news: Notifier = field(default_factory=Notifier)
    """Told of each part that has come."""

    @property
    def suspects(self) -> tuple[PeerId, ...]:
        """Who is to blame if time is over: an owner only if it has no excuse that we know."""
        return tuple(self.parts_missing or self.sums_missing)

    @property
    def _plan(self) -> Plan:
        return self.request.plan

    async def mean(self) -> list[bytes]:
        """All pieces of the mean, as their owners encoded them. Raises `ReductionFailed`."""
        me = self.signer.peer_id
        owner_of = owners_of(self.grid, self.request.readys)
        spans = {peer: span_of(owner_of, peer) for peer in dict.fromkeys(owner_of)}
        self.sums_missing = dict.fromkeys(peer for peer in spans if peer != me)
        sums: dict[PeerId, tuple[Sum, list[bytes]]] = {}
        async with trio.open_nursery() as nursery:
            if me in spans:
                nursery.start_soon(self._own, spans[me], sums)
            for peer, span in spans.items():
                if peer != me:
                    nursery.start_soon(self._fetch_sum, peer, span, sums)
        await self._audit(owner_of, sums)
        return [piece for peer in sorted(spans) for piece in sums[peer][1]]

    async def carried(self, outcome: Outcome) -> list[bytes]:
        """The pieces of a mean that was voted for before."""
        root, holders, count = outcome.sum_root, self.request.holders, self.grid.pieces
        self.sums_missing = dict.fromkeys(holders)
        sources = [peer for peer in holders if peer != self.signer.peer_id]
        held = self.server.holds(root)
        if held is not None:  # which may be a state, or an update: voters name what they like
            pieces = [held.piece(one) for one in range(len(held.digests))]
        else:
            pieces = await self._insist(partial(self.client.blob, root, sources, count))
        self._check_decodes(range(count), pieces, sources)
        return pieces

    def _check_decodes(
        self, span: range, pieces: Sequence[bytes], givers: Sequence[PeerId]
    ) -> None:
        """Raise `ReductionFailed` if a mean cannot be read, though it was signed."""
        try:
            if len(pieces) != len(span):
                raise BadMessage(f"a mean has {len(pieces)} pieces, not {len(span)}")
            for index, piece in zip(span, pieces, strict=True):
                self.grid.decode_untrusted(index, piece)
        except BadMessage as error:
            logger.warning("diloco_bad_mean step=%d: %s", self._plan.step, error)
            raise ReductionFailed(givers) from error

    async def _own(self, span: range, sums: dict[PeerId, tuple[Sum, list[bytes]]]) -> None:
        """Sum this member's pieces, each once it has come from all; others take it at once, so
        that no line waits for the last part."""
        me, step, view = self.signer.peer_id, self._plan.step, self.request.view
        parts: dict[PeerId, list[bytes]] = {one.author: [] for one in self.request.readys}
        pieces = list[bytes]()
        async with trio.open_nursery() as nursery:
            for ready in self.request.readys:
                nursery.start_soon(self._fetch_part, ready, span, parts[ready.author])
            for at, index in enumerate(span):
                while any(len(found) <= at for found in parts.values()):
                    await self._news.wait()
                one = [parts[ready.author][at] for ready in self.request.readys]
                cost = 4 * self.grid.values(index) / SUM_RATE
                pieces.append(await self.world.run_blocking(self._sum, index, one, cost=cost))
                self.server.offer_pieces(step, view, pieces)
        total = Sum(
            step, view, self._plan.id, span.start, tuple(map(digest_of, pieces)), author=me
        ).signed(self.run, self.signer)
        self.server.offer_sum(total, pieces)
        sums[me] = total, pieces

    def _sum(self, index: int, parts: Sequence[bytes]) -> bytes:
        return sum_of(self.grid, self._plan, self.request.readys, index, parts)

    async def _fetch_part(self, ready: Ready, span: range, into: list[bytes]) -> None:
        """A contributor's pieces, judged: what it signed and is none is evidence against it."""
        root = root_of(ready.digests)
        held = self.server.holds(root)
        if held is not None:
            into += [held.piece(one) for one in span]
            self._news.notify_all()
            return
        self.parts_missing[ready.author] = None

        def take(piece: bytes) -> None:
            index = span[len(into)]
            try:
                check_part(self.grid, index, piece, ready.norms[index])
            except BadMessage as error:
                logger.warning("diloco_bad_part peer=%s: %s", ready.author.short, error)
                self.found(BadPart(ready, index, piece))
                raise ReductionFailed([ready.author]) from error
            into.append(piece)
            self._news.notify_all()

        async def rest() -> None:
            first = span.start + len(into)
            wanted = ready.digests[first : span.stop]
            await self.client.pieces(ready.author, root, first, wanted, take)

        await self._insist(rest)
        self.parts_missing.pop(ready.author, None)

    async def _fetch_sum(
        self, owner: PeerId, span: range, sums: dict[PeerId, tuple[Sum, list[bytes]]]
    ) -> None:
        step, view = self._plan.step, self.request.view
        total, pieces = await self._insist(
            partial(self.client.sum, owner, step, view, len(span))
        )
        self.heard(total)
        if (
            not total.is_genuine(self.run, self.verify)
            or total.plan != self._plan.id
            or total.first != span.start
        ):
            raise ReductionFailed([owner])
        for index, piece in zip(span, pieces, strict=True):
            if is_unreadable(self.grid, index, piece):
                self.found(Unreadable(total, index, piece))
        self._check_decodes(span, pieces, [owner])
        sums[owner] = total, pieces
        self.sums_missing.pop(owner, None)

    async def _audit(
        self, owner_of: Sequence[PeerId], sums: dict[PeerId, tuple[Sum, list[bytes]]]
    ) -> None:
        """Repeat the sum of one piece. Each owner has another auditor at each step."""
        me, readys = self.signer.peer_id, self.request.readys
        peers = sorted(sums)
        owner = peers[(auditor_rank(self._plan, me) + self._plan.step) % len(peers)]
        if owner == me:
            return
        total, _ = sums[owner]
        index = total.first + self.world.rng("diloco/audit").randrange(len(total.digests))
        parts: dict[PeerId, list[bytes]] = {one.author: [] for one in readys}
        async with trio.open_nursery() as nursery:
            for one in readys:
                only = range(index, index + 1)
                nursery.start_soon(self._fetch_part, one, only, parts[one.author])
        right = self._sum(index, [parts[one.author][0] for one in readys])
        if digest_of(right) != total.digests[index - total.first]:
            logger.warning("diloco_bad_sum peer=%s piece=%d", owner.short, index)
            evidence = tuple(parts[one.author][0] for one in readys)
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
    """The pieces of an owner, which lie together."""
    first = list(owner_of).index(peer)
    return range(first, first + list(owner_of).count(peer))


def auditor_rank(plan: Plan, peer: PeerId) -> int:
    """A member's place among those that contribute, or may join."""
    everyone = sorted({*plan.summed, *plan.members, peer})
    return everyone.index(peer)


@dataclass(frozen=True, slots=True)
class DigestedState:
    """A state with the digests of its pieces, which take as long as the step: made in a
    thread."""

    state: OuterState
    blob: Blob

    @classmethod
    def of(cls, state: OuterState) -> DigestedState:
        """With its digests."""
        return cls(state, Blob.of_state(state))

    @classmethod
    def joined(cls, size: int, pieces: Sequence[bytes], moments: int) -> DigestedState:
        """Of pieces as they travel. Raises `BadMessage`."""
        return cls.of(OuterState.joined(size, list(pieces), moments))

    @classmethod
    def after(
        cls,
        outer: OuterAlgorithm,
        grid: PieceGrid,
        state: OuterState,
        pieces: Sequence[bytes],
        step: int,
    ) -> DigestedState:
        """The state after the mean of a step. Raises `BadMessage`."""
        return cls.of(outer.after(state, grid.join(pieces), step))
