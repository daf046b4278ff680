"""Pulls: requests to other peers for chunks that the forest did not bring.

Neighbours tell each other, and their parents, what they have. A chunk that others have had for
longer than it usually takes to get here is asked for, from the holder that would bring it
first; the origin is asked when nothing has come for long and no other peer has it. A node
outside the roster lives by pulling alone. Before a chunk is pulled, the parents hear that it is
*taken*; when it comes from another peer, the one that was asked hears so too.

Each peer that was ever asked has a `Source`: how long it takes for a chunk, lately, and how
many it owes. What is asked for in all is limited by what this node's own line has lately
carried: more would only queue there, be given up as late, and come twice. Every request has a
deadline. A source that lets one pass is expected to take twice as long from then on, and the
chunk is asked of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import islice
from operator import or_
from random import Random
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download, Request
from p2p.shardcast.core.pace import IN_FLIGHT, SLOW_LINK, Patience, longest_wait
from p2p.shardcast.core.peers import MAX_REMEMBERED, Peers
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.core.upload import Upload
from p2p.shardcast.messages import Ask, Taken, Want

WINDOW: Final = 4
"""Most chunks asked of one holder at a time: enough that it never idles for a round trip, few
enough to lose little when it dies. A holder that has delivered none yet is tried with a single
chunk."""


class Source:
    """Speed and open requests of one holder."""

    __slots__ = ("_slowest", "_time", "last", "owed")

    def __init__(self, chunk_time: float, longest: float) -> None:
        """Start with ``chunk_time`` as a guess. The estimate never exceeds ``longest`` seconds
        a chunk."""
        self.owed = 0
        """Number of chunks that it was asked for and has not delivered."""
        self.last = 0.0
        """Time at which it last delivered a chunk; 0 if never."""
        self._time = Patience(chunk_time, ceiling=longest)
        self._slowest = 16 * longest

    @property
    def chunk_time(self) -> float:
        """Recent mean seconds that it takes to deliver a chunk."""
        return self._time.usual

    @property
    def late(self) -> float:
        """Seconds per chunk after which it counts as late."""
        return self._time.wait()

    @property
    def room(self) -> int:
        """Number of chunks that it may be asked for now."""
        return (WINDOW if self.last else 1) - self.owed

    def release(self) -> None:
        """Cancel one chunk that it owes."""
        self.owed = max(0, self.owed - 1)

    def deliver(self, request: Request, now: float) -> None:
        """Record a delivered request.

        The time counts from the source's last chunk if this one was requested before that,
        since it answers in order.
        """
        self._time.observe(now - max(request.asked, self.last))
        self.last = now

    def miss(self, request: Request, now: float) -> None:
        """Record a missed deadline. The source is now expected to take twice as long, or as
        long as it has taken so far, up to a limit."""
        waited = now - max(request.asked, self.last)
        self._time.reset(min(self._slowest, max(2 * self._time.usual, waited)))


class Repair:
    """Pulls late chunks from holders, and cancels requests that are no longer needed."""

    def __init__(
        self,
        local: PeerId,
        statements: Statements,
        peers: Peers,
        upload: Upload,
        rng: Random,
        stall: float,
    ) -> None:
        self._local = local
        self._statements = statements
        self._peers = peers
        self._upload = upload
        self._rng = rng
        self._stall = stall
        self._sources: dict[PeerId, Source] = {}
        self._proven: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        """Peers that have delivered a chunk."""

    def inquire(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Ask some other peers for their have-lists. Ask the origin if there are no such peers,
        or if they did not help."""
        origin = download.manifest.publisher
        roster = self._statements.roster(origin)
        fed = roster.peers if roster is not None and download.pull_only else ()
        others = dict.fromkeys([*self._upload.audience(download), *self._peers.connected, *fed])
        us = origin, self._local
        candidates = [p for p in others if p not in us and not self._peers.is_gone(p)]
        # Peers asked at a time what they have of a version: one of them will know, and four are
        # soon told. Asking all of up to 64 neighbours would bring as many have-lists of up to 4
        # KiB each.
        chosen = self._rng.sample(candidates, min(4, len(candidates)))
        wants_index = download.index is None
        if download.note_inquiry(now, found=bool(chosen)) and wants_index:
            chosen.append(origin)
        yield from (ev.Send(peer, Ask(download.name, wants_index)) for peer in chosen)

    def pull(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Request late chunks, and tell parents that they are taken."""
        if download.is_whole:
            return
        plan = self._plan(download, now)
        wanted = {peer: ChunkSet.of(chunks) for peer, chunks in plan.items()}
        yield from (
            ev.Send(peer, Want(download.name, tuple(chunks))) for peer, chunks in plan.items()
        )
        if not wanted or download.pull_only:
            return
        origin = download.manifest.publisher  # it may answer along a stripe
        taken = reduce(or_, (c for peer, c in wanted.items() if peer != origin), EMPTY)
        for peer in self._upload.parents(download):
            yield from _taken(download, peer, taken - wanted.get(peer, EMPTY))

    def cancel(self, download: Download, chunks: dict[int, PeerId]) -> Iterator[ev.Effect]:
        """Tell the peers that were asked for these chunks that they are no longer needed."""
        asked: dict[PeerId, ChunkSet] = {}
        for chunk, peer in chunks.items():
            asked[peer] = asked.get(peer, EMPTY).including(chunk)
        for peer, taken in asked.items():
            if self._can_tell(download, peer):
                yield from _taken(download, peer, taken)

    def decline(self, download: Download) -> Iterator[ev.Effect]:
        """Tell parents, and peers that were asked for chunks, that this node needs none of
        them."""
        for peer in dict.fromkeys([*self._upload.parents(download), *download.asked_peers()]):
            if self._can_tell(download, peer):
                yield ev.Send(peer, Taken(download.name, ((0, download.count),)))

    def _can_tell(self, download: Download, peer: PeerId) -> bool:
        return peer != download.manifest.publisher and not self._peers.is_gone(peer)

    def _rate(self, download: Download, peer: PeerId) -> float:
        """Return the expected uplink of `peer` in bytes per second; 0 if it is gone.

        Of a peer outside the roster nothing is known. One that claims nothing is given an
        eighth of a slow link: it may have had no time to measure.
        """
        if self._peers.is_gone(peer):
            return 0.0
        roster = self._statements.roster(download.manifest.publisher)
        if roster is None or peer not in roster.positions:
            return SLOW_LINK
        return max(roster.upload(peer), SLOW_LINK / 8)

    def _plan(self, download: Download, now: float) -> dict[PeerId, list[int]]:
        """Return the late chunks to request, grouped by holder."""
        late = download.late(now)
        if not (late or download.lateness.overdue) or download.index is None:
            return {}
        # A second's worth at the usual ``stall``. More would queue on this node's own line.
        ahead = math.ceil(2 * self._stall / max(download.chunk_time, 0.001))
        room = max(WINDOW, ahead) - len(download.requests)
        if room <= 0:
            return {}  # a third of all calls while a node is busy
        plan: dict[PeerId, list[int]] = {}
        origin = download.manifest.publisher
        claims = {
            p: claim
            for p in download.holders
            if p != origin and (claim := self._rate(download, p))
        }
        held = self._believable(download, claims)
        late |= (download.lateness.overdue & download.missing) - held
        for peer, chunk in islice(self._deal(download, claims, late), room):
            plan.setdefault(peer, []).append(chunk)
            self._ask(download, peer, chunk, now)
        orphans = (download.missing & late) - held
        if not download.may_ask_origin:
            claimed = reduce(or_, (download.holders[peer] for peer in claims), EMPTY)
            orphans &= download.failed | download.lateness.overdue | claimed
        if orphans and (claim := self._rate(download, origin)):
            # It is owed a window at once, and may answer along a stripe.
            most = WINDOW - self._source(download, origin, claim).owed
            for chunk in self._pick(orphans, min(most, room - sum(map(len, plan.values())))):
                plan.setdefault(origin, []).append(chunk)
                self._ask(download, origin, chunk, now)
        return plan

    def _deal(
        self, download: Download, claims: dict[PeerId, float], late: ChunkSet
    ) -> Iterator[tuple[PeerId, int]]:
        """Assign each chunk to the holder that would bring it first, while there is room: first
        to proven holders, then to others as a trial."""
        order, own = list(claims), download.chunk_time
        self._rng.shuffle(order)
        open_to = {peer: self._source(download, peer, claims[peer]) for peer in order}

        def finish(peer: PeerId) -> tuple[bool, float]:
            # No source is faster than this node's own line; beyond its rate several at once are
            # better than one.
            source = open_to[peer]
            doubt = peer not in self._proven
            return doubt, (source.owed + 1) * max(source.chunk_time, own)

        while open_to:
            peer = min(open_to, key=finish)
            room = open_to[peer].room
            chunk = next(self._pick(download.holders[peer] & late, room), None)
            if chunk is None:
                del open_to[peer]
                continue
            late = late.excluding(chunk)
            yield peer, chunk

    def _believable(self, download: Download, claims: Iterable[PeerId]) -> ChunkSet:
        """Return the chunks for which the origin need not be asked: those at a proven holder,
        or at two.

        A holder that has never delivered is asked for a single chunk as a trial. The origin is
        asked for the other chunks that no other peer has. Example: a root claims 20 chunks and
        sends none. Its children ask it for one chunk each and the origin for four each at a
        time, instead of asking for one chunk after the other until they have lost patience with
        it twice. A node to which nothing is pushed knows no peer yet, and believes them all.
        """
        holders = download.holders
        once = twice = proven = EMPTY
        for peer in claims:
            twice |= once & holders[peer]
            once |= holders[peer]
            if peer in self._proven or download.pull_only:
                proven |= holders[peer]
        return twice | proven

    def _source(self, download: Download, peer: PeerId, claim: float) -> Source:
        if peer not in self._sources:
            size = download.wire_per_chunk
            self._sources[peer] = Source(size / claim, longest_wait(size, self._stall))
        return self._sources[peer]

    def _pick(self, chunks: ChunkSet, count: int) -> Iterator[int]:
        """Return up to ``count`` of ``chunks``, starting at a random place so that askers
        differ.

        BitTorrent asks for the rarest first. Here the forest has spread each chunk already, and
        what is late is late for many: different places are what keeps askers from queueing for
        the same chunk.
        """
        if chunks and count > 0:
            start = self._rng.randrange(chunks.lowest, chunks.end)
            yield from islice(chunks.from_place(start), count)

    def _ask(self, download: Download, peer: PeerId, chunk: int, now: float) -> None:
        source = self._sources[peer]
        source.owed += 1
        download.ask(chunk, peer, now, now + self._patience(source, download))

    def _patience(self, source: Source, download: Download) -> float:
        """Return the seconds to wait for ``source``, which has been asked.

        The requested chunk waits on this node's own line behind other requested chunks and
        behind what parents push, so the wait is at least the time that those take.
        """
        usual = max(self._stall, source.late) + source.owed * source.chunk_time
        line = (len(download.requests) + IN_FLIGHT) * download.chunk_time
        return min(longest_wait(download.wire_per_chunk, self._stall), max(usual, line))

    def arrived(
        self, download: Download, chunk: int, peer: PeerId, now: float
    ) -> Request | None:
        """Settle the request for a chunk that ``peer`` delivered, and return the request."""
        self._proven[peer] = None
        request = download.requests.get(chunk)
        source = self._sources.get(request.peer) if request is not None else None
        if request is not None and source is not None:
            source.release()
            if request.peer == peer:
                source.deliver(request, now)
        return request

    def expire(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Give up the requests whose deadline has passed, and expect less of their sources."""
        overdue = download.expire(now)
        for request in overdue.values():
            if source := self._sources.get(request.peer):
                source.owed = min(source.owed, download.asked_peers().count(request.peer))
                source.miss(request, now)
        return self.cancel(download, {chunk: one.peer for chunk, one in overdue.items()})

    def forget(self, download: Download) -> None:
        """Forget a version that is no longer fetched, and the chunks of it that sources owe."""
        for peer in download.asked_peers():
            if peer in self._sources:
                self._sources[peer].release()

    def lose(self, peer: PeerId) -> None:
        self._sources.pop(peer, None)
        self._proven.pop(peer, None)


def _taken(download: Download, peer: PeerId, chunks: ChunkSet) -> Iterator[ev.Effect]:
    return (ev.Send(peer, Taken(download.name, part)) for part in chunks.ranges())
