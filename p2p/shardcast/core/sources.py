"""Which holder to ask for which chunk: the one that would bring it first, the origin last.

Theory of operation
-------------------
Each peer that was ever asked has a `Source`: how long it takes for a chunk, lately, and how
many it owes. Chunks are dealt out one by one, each to the source that would bring it first.
What is asked for in all is limited by what this node's own line has lately carried: more would
only queue there, be given up as late, and come twice.

Every request has a deadline. A source that lets one pass is expected to take twice as long from
then on, and the chunk is asked of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from random import Random
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.average import UsualTime
from p2p.shardcast.core.download import Arrival, Download, Request
from p2p.shardcast.core.pace import SLOW_LINK
from p2p.shardcast.core.peers import MAX_REMEMBERED

WINDOW: Final = 4
"""Chunks asked of one holder at a time: enough that it never idles for a round trip, few enough
to lose little when it dies. BitTorrent keeps five requests of 16 KiB (Cohen 2003); these chunks
are two to 256 times as large."""
_TRIAL: Final = 1
"""Chunks asked of a holder that has brought none yet: one that claims much and drips costs each
asker one chunk's wait instead of four."""
_AHEAD: Final = 2
"""Shortest waits' worth of chunks, at the rate at which they come, that may be asked for in all
(a second's worth at the usual ``stall``). Example: a line that has lately carried 20 chunks a
second has 20 requests out; one that carries two has `WINDOW`."""
_PUSHED: Final = 24
"""Chunks that may be ahead of a requested one on this node's line without having been asked
for: eight parents have two under way and one waiting each."""
_UNANSWERED: Final = 4
"""Shortest waits, at least, after which what the origin was asked for is asked of others that
hold it (2 s at the usual ``stall``). With `Download.patience` alone peers left an origin that
had just been started again, and gave along stripes what it was asked for: 24 of them were whole
19 s after it was back, not 7."""
_LATE: Final = 4
"""A source's usual chunk times after which its chunk is late."""
_QUICKEST: Final = 0.001
"""Seconds per chunk below which no line is taken for faster: 64 KiB chunks at half a gigabit a
second."""
_SLOWEST: Final = 60.0
"""Seconds per chunk beyond which a source's estimate does not grow: it is tried once a minute
then, however often it has failed."""


_STRIKES: Final = 2
"""Times in a row that a source may let its deadlines pass. After that it is taken to hold
nothing until it brings a chunk, or is tried with a single one, after 2, 4, 8 ... 60 s:
otherwise one that boasts of every chunk and sends none is asked for each of them, with half a
second's wait or more for each. Two of eight such peers made 16 MB take 778 s. One strike would
put honest peers aside whose line was busy for a moment."""


class Source:
    """How fast one peer answers, and what it owes."""

    __slots__ = ("_silent_until", "_strikes", "_time", "last", "owed")

    def __init__(self, chunk_time: float) -> None:
        self.owed = 0
        """Chunks that it was asked for and has not brought."""
        self.last = 0.0
        """When it last brought one; 0 if never."""
        self._time = UsualTime(chunk_time)
        self._strikes = 0
        self._silent_until = -math.inf

    def is_silent(self, now: float) -> bool:
        """Whether it has let so many deadlines pass that it is not asked any more."""
        return self._strikes >= _STRIKES and now < self._silent_until

    def note_brought(self) -> None:
        """It brought a chunk, asked for or not."""
        self._strikes = 0

    def note_strike(self, now: float, stall: float) -> None:
        """It let one or more deadlines pass at a time."""
        self._strikes += 1
        self._silent_until = now + min(_SLOWEST, stall * 2.0**self._strikes)

    @property
    def chunk_time(self) -> float:
        """Seconds that it takes for a chunk, lately."""
        return self._time.value

    @property
    def late(self) -> float:
        """Seconds for a chunk from which it is late."""
        return self._time.late

    @property
    def room(self) -> int:
        """Chunks that it may be asked for now."""
        is_doubtful = not self.last or self._strikes >= _STRIKES
        return (_TRIAL if is_doubtful else WINDOW) - self.owed

    def ask(self) -> None:
        """It is asked for a chunk."""
        self.owed += 1

    def release(self) -> None:
        """It need not bring a chunk any more."""
        self.owed = max(0, self.owed - 1)

    def deliver(self, request: Request, now: float) -> None:
        """It brought what it was asked for.

        The time counts from its last chunk if it was asked before that: it answers in order.
        """
        self._time.observe(now - max(request.asked, self.last))
        self.last = now

    def miss(self, request: Request, now: float) -> None:
        """It let a deadline pass: expect it to take twice as long, or what it has taken so
        far."""
        waited = now - max(request.asked, self.last)
        self._time.reset(min(_SLOWEST, max(2 * self._time.value, waited)))

    def cap(self, owed: int) -> None:
        """No more than ``owed`` requests to it are under way."""
        self.owed = min(self.owed, owed)


class Sources:
    """Every peer that was ever asked for a chunk."""

    def __init__(self, rng: Random, stall: float) -> None:
        self._rng = rng
        self._stall = stall
        self._sources: dict[PeerId, Source] = {}
        self._proven: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        """Peers that have brought a chunk."""

    def plan(
        self, download: Download, now: float, rate: Callable[[PeerId], float]
    ) -> dict[PeerId, list[int]]:
        """Ask for what is late; returns the chunks to want, by holder.

        ``rate`` is what a peer claims to upload in bytes per second; 0 if it cannot be asked.
        """
        late = download.late(now)
        if not (late or download.overdue) or download.index is None:
            return {}
        room = self._room(download)
        if room <= 0:
            return {}  # a third of all calls while a node is busy
        plan: dict[PeerId, list[int]] = {}
        origin = download.manifest.trainer
        holders = download.holders
        claims, silent = self._claims(download, now, rate)
        held = self._believable(download, claims)
        late |= (download.overdue & download.missing) - held
        boasted = EMPTY
        for peer in (*claims, *silent):
            boasted |= holders[peer]
        for peer, chunk in islice(self._deal(download, claims, late), room):
            plan.setdefault(peer, []).append(chunk)
            self._ask(download, peer, chunk, now)
        orphans = (download.missing & late) - held
        if not download.may_ask_origin:
            orphans &= download.failed | download.overdue | boasted
        if orphans and not (claim := rate(origin)):
            # There is no other: a silent one may only have been slow.
            left = max(0, room - sum(map(len, plan.values())))
            for peer, chunk in islice(self._deal(download, silent, orphans), left):
                plan.setdefault(peer, []).append(chunk)
                self._ask(download, peer, chunk, now)
        elif orphans:
            # It is owed a window at once, and may answer along a stripe.
            most = WINDOW - self._source(download, origin, claim).owed
            for chunk in self._pick(orphans, min(most, room - sum(map(len, plan.values())))):
                plan.setdefault(origin, []).append(chunk)
                self._ask(download, origin, chunk, now)
        return plan

    def leave_origin(
        self, download: Download, now: float, rate: Callable[[PeerId], float]
    ) -> ChunkSet:
        """Give up what the origin was asked for a while ago, and others hold by now; returns
        it.

        An origin may answer along a stripe, and a parent may leave that chunk to its children
        to fetch. They waited for the origin, for up to ten seconds where chunks had come slowly
        at first: of 100 that pulled 4 MB at once most had 122 of 123 chunks after 5.5 s, and
        all had all after 11.4 instead of 6.6. Once for each chunk, so that one that lies about
        what it holds cannot keep it from us.
        """
        patience = max(download.patience, _UNANSWERED * self._stall)
        asked = download.asked_of_origin(now - patience)
        if not asked:
            return asked
        elsewhere = asked & self._believable(download, self._claims(download, now, rate)[0])
        download.leave_origin(elsewhere)
        source = self._sources.get(download.manifest.trainer)
        if source is not None:
            source.cap(source.owed - len(elsewhere))
        return elsewhere

    def _claims(
        self, download: Download, now: float, rate: Callable[[PeerId], float]
    ) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
        """What the holders but the origin claim to upload: of those that answer, and of those
        that do not."""
        origin = download.manifest.trainer
        claims = {
            peer: claim for peer in download.holders if peer != origin and (claim := rate(peer))
        }
        silent = {peer: claims.pop(peer) for peer in list(claims) if self._is_silent(peer, now)}
        return claims, silent

    def _room(self, download: Download) -> int:
        """Requests that may be added to those under way."""
        ahead = math.ceil(_AHEAD * self._stall / max(download.chunk_time, _QUICKEST))
        return max(WINDOW, ahead) - download.outstanding

    def _deal(
        self, download: Download, claims: dict[PeerId, float], late: ChunkSet
    ) -> Iterator[tuple[PeerId, int]]:
        """Each chunk to the holder that would bring it first, while any has room and chunks."""
        order, own = list(claims), download.chunk_time
        self._rng.shuffle(order)
        open_to = {peer: self._source(download, peer, claims[peer]) for peer in order}
        while open_to:
            # No source is faster than this node's own line; beyond its rate several at once are
            # better than one.
            peer = min(
                open_to, key=lambda p: (open_to[p].owed + 1) * max(open_to[p].chunk_time, own)
            )
            room = open_to[peer].room
            chunk = next(self._pick(download.holders[peer] & late, room), None)
            if chunk is None:
                del open_to[peer]
                continue
            late = late.excluding(chunk)
            yield peer, chunk

    def _believable(self, download: Download, claims: Iterable[PeerId]) -> ChunkSet:
        """What there is no need to ask the origin for: it is with a peer that has brought
        something before, or with two.

        One that never has is asked for a single chunk as a trial, and the origin for the others
        that no other peer has. Example: a root boasts of 20 chunks and sends none. Its children
        ask it for one each and the origin for four each at a time, instead of one chunk after
        the other until they have lost patience with it twice. A node to which nothing is pushed
        knows no peer yet, and believes them all.
        """
        holders = download.holders
        once = twice = proven = EMPTY
        for peer in claims:
            twice |= once & holders[peer]
            once |= holders[peer]
            if peer in self._proven or download.pull_only:
                proven |= holders[peer]
        return twice | proven

    def _is_silent(self, peer: PeerId, now: float) -> bool:
        source = self._sources.get(peer)
        return source is not None and source.is_silent(now)

    def _source(self, download: Download, peer: PeerId, claim: float) -> Source:
        source = self._sources.get(peer)
        if source is None:
            source = self._sources[peer] = Source(download.wire_per_chunk / claim)
        return source

    def _pick(self, chunks: ChunkSet, count: int) -> Iterator[int]:
        """Up to ``count`` of ``chunks``, from a random place on, so that askers differ.

        BitTorrent asks for the rarest first. Here the forest has spread each chunk already, and
        what is late is late for many: different places are what keeps askers from queueing for
        the same chunk.
        """
        if chunks and count > 0:
            start = self._rng.randrange(chunks.lowest, chunks.end)
            yield from islice(chunks.from_place(start), count)

    def _ask(self, download: Download, peer: PeerId, chunk: int, now: float) -> None:
        source = self._sources[peer]
        source.ask()
        download.ask(chunk, peer, now, now + self._patience(source, download))

    def _patience(self, source: Source, download: Download) -> float:
        """Seconds to wait for ``source``, which has been asked.

        Example: a source that takes 0.2 s a chunk and owes three is given 0.8 + 0.6 s. However
        slow it is, other peers may have got the chunk meanwhile, so after 2 s, or 8 chunk times
        of a slow link, another is tried. But what is asked for waits on this node's own line
        behind what else was asked for, and behind what parents push: never less than that
        takes.
        """
        usual = max(self._stall, source.late) + source.owed * source.chunk_time
        slow_link = download.wire_per_chunk / SLOW_LINK
        usual = min(usual, max(_LATE * self._stall, 2 * _LATE * slow_link))
        return max(usual, (download.outstanding + _PUSHED) * download.chunk_time)

    def arrived(self, download: Download, chunk: int, peer: PeerId, now: float) -> Arrival:
        """``peer`` brought a chunk: settle that with the peer which was asked for it."""
        self._proven[peer] = None
        bringer = self._sources.get(peer)
        if bringer is not None:
            bringer.note_brought()
        request = download.request_for(chunk)
        source = self._sources.get(request.peer) if request is not None else None
        if request is None or source is None:
            return Arrival(chunk, peer, request, False)
        source.release()
        if request.peer == peer:
            source.deliver(request, now)
            download.extend_requests(peer, now + self._patience(source, download))
        return Arrival(chunk, peer, request, request.peer == peer)

    def expire(self, download: Download, now: float) -> dict[int, PeerId]:
        """Give up requests past their deadline, and expect less of those sources; returns
        them."""
        overdue = download.expire(now)
        for peer in dict.fromkeys(request.peer for request in overdue.values()):
            if (late := self._sources.get(peer)) is not None:
                late.note_strike(now, self._stall)
        for request in overdue.values():
            source = self._sources.get(request.peer)
            if source is not None:
                source.cap(download.asked_peers().count(request.peer))
                source.miss(request, now)
        return {chunk: request.peer for chunk, request in overdue.items()}

    def forget(self, download: Download) -> None:
        """A version is no longer fetched: its chunks are not owed."""
        for peer in download.asked_peers():
            source = self._sources.get(peer)
            if source is not None:
                source.release()

    def lose(self, peer: PeerId) -> None:
        """Forget a source."""
        self._sources.pop(peer, None)
        self._proven.pop(peer, None)
