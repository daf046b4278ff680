"""What goes to peers: chunks along stripes, requested chunks, and announcements of chunks.

Each peer has one `SendQueue`; one chunk is under way on it and the rest wait as names. A chunk
that comes along a stripe is queued for the children in that stripe at once, before it is on
disk. If a child is gone, its children are served in its place.

What a child has from elsewhere, or what is more than `MAX_CREDIT` waiting chunks, is
*withheld*, that is, not queued. The child hears of it (`Skipped`), fetches the chunk from any
holder if it lacks it, and passes it on to its own children: the stripe brings the duty to pass
on, even where it does not bring the bytes.

As a root, this node confirms every chunk to the origin and asks for more only while its
children keep up: what a relay cannot pass on, another root should get.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast import messages as msg
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.statements import MAX_ROSTERS, Statements
from p2p.shardcast.forest import Forest, build_forest
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI, MIB

CREDIT: Final = 2
"""Chunks that a root may owe beyond what its line holds. With one it idles for a round trip per
chunk; with more, slow roots hoard what fast ones could carry."""
MAX_CREDIT: Final = 64
"""Most unconfirmed chunks of a root, whatever rate it claims: a third of a second at 50 Mbit/s.
A root that relays nothing wastes this many chunks, once."""
RECENT: Final = 4
"""Chunks lately sent to a peer that may be lost with it: two in the sender's buffers and two in
the receiver's. They are given to others too: a chunk that comes twice costs less than a
wait."""


def _count(counts: BoundedDict[PeerId, int], peer: PeerId, more: int = 1) -> int:
    counts[peer] = counts.get(peer, 0) + more
    return counts[peer]


class SendQueue:
    """The bulk stream to one peer, as the core sees it."""

    def __init__(self) -> None:
        self._stripes: deque[msg.ChunkHeader] = deque()
        self._asked: deque[msg.ChunkHeader] = deque()
        self._current: msg.ChunkHeader | None = None
        self._recent: deque[msg.ChunkHeader] = deque(maxlen=RECENT)
        self._news: BoundedDict[bytes, None] = BoundedDict(2 * MAX_ROSTERS)
        self._started = 0.0
        """Time at which the chunk under way was pushed."""

    def __repr__(self) -> str:
        return f"SendQueue({self.backlog} chunks)"

    @property
    def owed(self) -> int:
        """Number of chunks that the peer asked for and that have not left."""
        return len(self._asked) + self._is_under_way(asked=True)

    @property
    def waits(self) -> bool:
        """True if a chunk that goes along a stripe is waiting."""
        return bool(self._stripes)

    def is_answering(self, since: float) -> bool:
        """Return True if a requested chunk is under way, and was started at ``since`` or
        later."""
        return self._is_under_way(asked=True) and self._started >= since

    @property
    def backlog(self) -> int:
        """Number of stripe chunks that are waiting or under way."""
        return len(self._stripes) + self._is_under_way(asked=False)

    def _is_under_way(self, *, asked: bool) -> bool:
        current = self._current
        return current is not None and (current.stripe == msg.NO_STRIPE) is asked

    @property
    def head(self) -> msg.ChunkHeader | None:
        """The next chunk to start or drop; None while a chunk is under way, or if none
        waits."""
        waiting = self._stripes or self._asked
        return waiting[0] if self._current is None and waiting else None

    def push(self, header: msg.ChunkHeader) -> None:
        """Queue a chunk behind others of its class. A chunk that comes along a stripe replaces
        the same chunk among the answers."""
        if header.stripe == msg.NO_STRIPE:
            self._asked.append(header)
            return
        self._stripes.append(header)
        answer = msg.ChunkHeader(header.policy, header.index)
        if answer in self._asked:
            self._asked.remove(answer)

    def start(self, now: float) -> None:
        """Start to send the head."""
        self._current, self._started = self.drop(), now

    def drop(self) -> msg.ChunkHeader:
        """Remove the head from the queue and return it."""
        return (self._stripes or self._asked).popleft()

    def finish(self) -> msg.ChunkHeader | None:
        """Record that the chunk under way has left, and return it."""
        header, self._current = self._current, None
        if header is not None:
            self._recent.append(header)
        return header

    def note_news(self, news: bytes) -> bool:
        """Return True the first time that ``news`` (a digest) is noted: it must precede its
        chunk."""
        if news in self._news:
            return False
        self._news[news] = None
        return True

    def has(self, policy: bytes, chunk: int) -> bool:
        """Return True if a chunk waits or is under way."""
        under_way = () if self._current is None else (self._current,)
        return any(
            (header.policy, header.index) == (policy, chunk)
            for header in (*under_way, *self._stripes, *self._asked)
        )

    def purge(self, policy: bytes) -> None:
        """Remove the waiting chunks of a policy."""
        self._stripes = deque(one for one in self._stripes if one.policy != policy)
        self._asked = deque(one for one in self._asked if one.policy != policy)

    def unconfirmed(self) -> Iterator[msg.ChunkHeader]:
        """Return the chunks that the peer may not have received or passed on, oldest first."""
        yield from self._recent
        if self._current is not None:
            yield self._current
        yield from self._stripes
        yield from self._asked


class Uplink:
    """Measures the uplink: bytes that left while chunks were under way, and the seconds that
    took."""

    def __init__(self) -> None:
        # Samples of which the best counts.
        self._samples: deque[float] = deque(maxlen=16)
        self._under_way: dict[PeerId, None] = {}
        """Peers to which a chunk is under way."""
        self._since = 0.0
        """Time up to which `_seconds` is counted, while chunks are under way."""
        self._bytes = 0
        self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that the uplink carries; 0 while it is unknown."""
        return max(self._samples, default=0.0)

    def note_begun(self, peer: PeerId, now: float) -> None:
        """Record that a chunk is on its way to ``peer``."""
        if not self._under_way:
            self._since = now
        self._under_way[peer] = None

    def note_left(self, peer: PeerId, size: int, now: float) -> None:
        """Record that the chunk on its way to ``peer`` has left."""
        if peer in self._under_way:
            self._bytes += size
            self._end(peer, now)

    def lose(self, peer: PeerId, now: float) -> None:
        """Forget `peer` and the chunk under way to it."""
        if peer in self._under_way:
            self._end(peer, now)

    def _end(self, peer: PeerId, now: float) -> None:
        del self._under_way[peer]
        self._seconds += now - self._since
        self._since = now
        if not self._under_way:
            # Bytes that may still be on this node when the last chunk of a burst is reported as
            # gone (`p2p.shardcast.bulk.Sender`): they are not counted.
            self._bytes = max(0, self._bytes - 16 * KI)
        # Bytes in one sample, of one burst or of several: 0.2 s at 40 Mbit/s, ten times what
        # may be unsent when a chunk is reported as gone, so that a sample is off by a few
        # percent.
        if self._bytes >= MIB and self._seconds > 0:
            self._samples.append(self._bytes / self._seconds)
            self._bytes, self._seconds = 0, 0.0


class Upload:
    """Send queues, forwarding along stripes, answers to what peers ask for, and announcements:
    have-lists for neighbours, parents and subscribers, and `Skipped` for children."""

    def __init__(
        self,
        local: PeerId,
        statements: Statements,
        downloads: Mapping[bytes, Download],
        peers: Peers,
    ) -> None:
        self._local = local
        self._statements = statements
        self._downloads = downloads
        self._peers = peers
        self._queues: dict[PeerId, SendQueue] = {}
        self._ready: dict[PeerId, None] = {}
        """Peers whose queue may have a chunk to start."""
        self.uplink = Uplink()

    def _forest(self, download: Download, epoch: int) -> Forest | None:
        """Return the forest along which chunks of a roster's ``epoch`` travel; None if it is
        unknown."""
        roster = self._statements.roster(download.manifest.publisher, epoch)
        return build_forest(roster, download.manifest.version) if roster is not None else None

    # Along the stripes

    def relay(
        self, download: Download, header: msg.ChunkHeader, sender: PeerId, now: float
    ) -> None:
        """Pass on a chunk that has arrived. If it came along no stripe, it goes along the
        stripe that should have brought it."""
        deferred = download.sharing.deferred.pop(header.index, None)
        if header.stripe == msg.NO_STRIPE and deferred is not None:
            sender, header = deferred
        self.forward(download, header, sender, now)

    def take_over(
        self, parent: PeerId, download: Download, skipped: msg.Skipped, now: float
    ) -> None:
        """Take over relaying the chunks that ``parent`` announces not to push to this node."""
        forest = self._forest(download, skipped.epoch)
        if forest is None or not forest.is_above(skipped.stripe, parent, self._local):
            return
        chunks = ChunkSet.of_ranges(skipped.ranges)
        if not self._may_ask(parent, download, len(chunks)):
            return
        for chunk in chunks:
            header = msg.ChunkHeader(skipped.policy, chunk, skipped.epoch, skipped.stripe)
            if chunk in download.verified:
                self.forward(download, header, parent, now)
            else:
                download.sharing.deferred[chunk] = parent, header
                download.note_withheld(chunk, parent)

    def forward(
        self, download: Download, header: msg.ChunkHeader, sender: PeerId, now: float
    ) -> None:
        """Queue a chunk that came along a stripe for this node's children in it."""
        forest = (
            self._forest(download, header.epoch) if header.stripe != msg.NO_STRIPE else None
        )
        if forest is None or not forest.is_above(header.stripe, sender, self._local):
            return
        children = forest.children(header.stripe, self._local, self._peers.is_gone)
        for child in children:
            if child != sender:
                self._offer(child, header, download, now)
        if sender == forest.roster.origin:
            download.sharing.received += 1
            download.sharing.children = children

    def _offer(
        self, child: PeerId, header: msg.ChunkHeader, download: Download, now: float
    ) -> None:
        """Queue a chunk for a child that needs it, if few wait. Otherwise leave the child to
        fetch and relay it."""
        needed = download.availability.needs(child, header.index)
        if needed and self._queue(child).backlog < MAX_CREDIT:
            self.push(child, header)
        else:
            self._withhold(child, header, download, now, needed=needed)

    def _withhold(
        self,
        child: PeerId,
        header: msg.ChunkHeader,
        download: Download,
        now: float,
        *,
        needed: bool,
    ) -> None:
        """Schedule a `Skipped` for a child if it lacks the chunk or has children itself."""
        forest = self._forest(download, header.epoch)
        if forest is not None and (needed or forest.relays(header.stripe, child)):
            sharing, key = download.sharing, (child, header.epoch, header.stripe)
            sharing.withheld[key] = sharing.withheld.get(key, EMPTY).including(header.index)
            sharing.tell_soon(now)

    def confirm(self) -> Iterator[ev.Effect]:
        """Confirm to origins the chunks that they gave this node; ask for more unless the
        children lag.

        While they keep up the origin alone decides how much may be on the way; once more than
        half of those that are there have `CREDIT` chunks waiting, there are to be no more than
        `CREDIT` chunks beyond what they kept up with. Half, since the slowest child must not
        slow the stripe (it is told to fetch elsewhere), and a majority of slow children means
        that this node's own uplink is full.
        """
        for download in self._downloads.values():
            credit = download.sharing
            if not credit.received:
                continue
            found = (self._queues.get(child) for child in credit.children)
            queues = [queue for queue in found if queue is not None]
            lags = 2 * sum(queue.backlog >= CREDIT for queue in queues) > len(queues)
            if not lags:
                credit.kept_up = credit.received
            news = credit.received, credit.kept_up + (CREDIT if lags else MAX_CREDIT)
            if news != credit.confirmed:
                credit.confirmed = news
                yield ev.Send(download.manifest.publisher, msg.Credit(download.name, *news))

    def connect(self, download: Download, *, ahead: int = 0) -> Iterator[ev.Connect]:
        """Return the connections to open to the peers that this node feeds in this version, or
        ``ahead`` versions later if the roster stays the same.

        They are dialled when the version is announced, before there is anything to send. If
        each relay waited for its first chunk, the hops of a stripe would dial one after
        another.
        """
        publisher, gone = download.manifest.publisher, self._peers.is_gone
        roster = self._statements.roster(publisher)
        if roster is None:
            return
        forest = build_forest(roster, PolicyVersion(download.manifest.version + ahead))
        fed = list(forest.roots) if publisher == self._local else []
        for stripe in range(len(forest.stripes) if publisher != self._local else 0):
            fed += forest.children(stripe, self._local, gone)
        yield from (ev.Connect(peer) for peer in dict.fromkeys(fed) if not gone(peer))

    # For the asking

    def answer(
        self, peer: PeerId, download: Download, *, wants_index: bool
    ) -> Iterator[ev.Effect]:
        """Send `peer` have-lists from now on, and the index if it is wanted. A peer that asked
        for more than it can need gets no answer, and each gets the index, of up to 2.5 MiB, 16
        times: once in each life of a node that restarts all day long."""
        if not self._may_ask(peer, download):
            return
        download.sharing.subscribers.renew(peer, None)
        index, indexes = download.index, download.sharing.indexes
        if wants_index and index is not None and _count(indexes, peer) <= 16:
            self._queue(peer).note_news(download.name)
            yield ev.Push(peer, msg.news_of(download.manifest, index))
        yield from (
            ev.Send(peer, msg.Have(download.name, part)) for part in download.verified.ranges()
        )

    def serve(self, peer: PeerId, download: Download, chunk: int) -> None:
        """Queue a requested chunk if this node has it, it does not wait for `peer` already, and
        few others do."""
        queue = self._queue(peer)
        if queue.has(download.name, chunk) or queue.owed >= msg.MAX_WANT:
            return
        if chunk not in download.verified:
            return
        if self._may_ask(peer, download):
            download.availability.note_wanted(peer, chunk)
            self.push(peer, msg.ChunkHeader(download.name, chunk))

    def _may_ask(self, peer: PeerId, download: Download, chunks: int = 1) -> bool:
        """Count requested chunks, a have-list, or chunks left to this node to relay. Return
        False if ``peer`` has asked for more than twice the version.

        An honest peer asks for each chunk once, and again if the first answer was lost with its
        connection. Without a limit a peer of a slow node could keep the whole uplink busy by
        asking for one chunk all day, and a core by leaving it all chunks of 4,096 ten times a
        second.
        """
        # 64 more, for have-lists asked for while a swarm is stuck
        return _count(download.sharing.answers, peer, chunks) <= 2 * download.count + 64

    # Announcements

    def note_new(self, download: Download, chunk: int, now: float) -> None:
        """Note a chunk that has arrived, to be announced."""
        sharing = download.sharing
        sharing.new = sharing.new.including(chunk)
        sharing.tell_soon(now)

    def tell(self, download: Download) -> Iterator[ev.Effect]:
        """Return the pending announcements: have-lists, and to children the chunks not pushed
        to them."""
        sharing = download.sharing
        sharing.tell_at = math.inf
        new, sharing.new = list(sharing.new.ranges()), EMPTY
        withheld, sharing.withheld = sharing.withheld, {}
        holders, everything = download.holders, download.all
        for peer in self.audience(download) if new else ():
            if holders.get(peer) != everything:
                for part in new:
                    yield ev.Send(peer, msg.Have(download.name, part))
        for (child, epoch, stripe), chunks in withheld.items():
            if not self._peers.is_gone(child):
                for part in chunks.ranges():
                    yield ev.Send(child, msg.Skipped(download.name, epoch, stripe, part))

    def audience(self, download: Download) -> list[PeerId]:
        """Return the connected peers that get have-lists: neighbours, subscribers and parents.
        The origin is left out, since it has everything."""
        origin = download.manifest.publisher
        roster = self._statements.roster(origin)
        peers = dict.fromkeys(roster.neighbours(self._local) if roster is not None else ())
        peers |= download.sharing.subscribers
        peers.update(dict.fromkeys(self.parents(download)))
        return [peer for peer in peers if peer != origin and not self._peers.is_gone(peer)]

    def parents(self, download: Download) -> tuple[PeerId, ...]:
        """Return the peers that push chunks to this node, without the origin. The origin hears
        neither `Have` nor `Taken`: this node confirms every chunk from it in any case."""
        roster = self._statements.roster(download.manifest.publisher)
        if roster is None:
            return ()
        forest = build_forest(roster, download.manifest.version)
        return forest.parents(self._local, self._peers.is_gone)

    # The queues

    def _queue(self, peer: PeerId) -> SendQueue:
        if peer not in self._queues:
            self._queues[peer] = SendQueue()
        return self._queues[peer]

    def push(self, peer: PeerId, header: msg.ChunkHeader) -> None:
        """Queue a chunk for ``peer``."""
        self._queue(peer).push(header)
        self._ready[peer] = None

    def has_room(self, root: PeerId) -> bool:
        """Return True if a root can be given another chunk of a hand-out."""
        queue = self._queues.get(root)
        return not self._peers.is_gone(root) and (queue is None or queue.backlog < CREDIT)

    def note_left(self, peer: PeerId, size: int, now: float) -> msg.ChunkHeader | None:
        """Record that the chunk of ``size`` bytes under way to ``peer`` has left, and return
        its header."""
        self.uplink.note_left(peer, size, now)
        queue = self._queues.get(peer)
        header = queue.finish() if queue is not None else None
        if header is not None:
            self._ready[peer] = None
        return header

    def start(self, now: float) -> Iterator[ev.Effect]:
        """Start the next chunk of every free queue, preceded by the news that explain it.

        While chunks along stripes wait, one that was asked for is under way at a time: who asks
        has others to ask, and a stripe has only this node. A peer that does not read what it
        asked for keeps others waiting for two seconds at most.
        """
        ready, self._ready = self._ready, {}
        queues = self._queues.values()
        # Seconds for which one peer's answer keeps those of others waiting while stripes wait:
        # as long as any peer is waited for.
        since = now - 2.0
        is_full = any(q.waits for q in queues) and any(q.is_answering(since) for q in queues)
        for peer in ready:
            queue = self._queues.get(peer)
            if queue is None:
                continue
            if is_full and queue.head is not None and queue.head.stripe == msg.NO_STRIPE:
                self._ready[peer] = None
                continue
            header = self._next_chunk(peer, queue, now)
            if header is not None:
                is_full = is_full or (
                    header.stripe == msg.NO_STRIPE and any(q.waits for q in queues)
                )
                yield from self._explain(peer, queue, header)
                yield ev.Push(peer, header)

    def _next_chunk(self, peer: PeerId, queue: SendQueue, now: float) -> msg.ChunkHeader | None:
        """Start the first chunk that ``peer`` still needs, and drop the chunks before it."""
        while (header := queue.head) is not None:
            download = self._downloads.get(header.policy)
            if (
                download is not None
                and header.index in download.verified
                and download.availability.needs(peer, header.index)
            ):
                queue.start(now)
                self.uplink.note_begun(peer, now)
                return header
            queue.drop()
            if download is not None and header.stripe != msg.NO_STRIPE:
                self._withhold(peer, header, download, now, needed=False)
        return None

    def _explain(
        self, peer: PeerId, queue: SendQueue, header: msg.ChunkHeader
    ) -> Iterator[ev.Effect]:
        download = self._downloads[header.policy]
        forest = (
            self._forest(download, header.epoch) if header.stripe != msg.NO_STRIPE else None
        )
        if forest is not None and queue.note_news(forest.roster.name):
            yield ev.Push(peer, msg.RosterNews(forest.roster.encode()))
        if queue.note_news(header.policy):
            yield ev.Push(peer, msg.news_of(download.manifest, download.index))

    def lose(self, peer: PeerId, now: float) -> None:
        """Serve the children of a lost peer in its place, with the chunks that it may not have
        forwarded.

        At the origin, its chunks are given to other roots instead (`Origin.lose`).
        """
        for version in self._downloads.values():
            version.sharing.subscribers.pop(peer, None)
            if version.manifest.publisher == peer:  # its next hand-out counts from the start
                version.sharing.received = version.sharing.kept_up = 0
                version.sharing.confirmed = 0, 0
        self.uplink.lose(peer, now)
        queue = self._queues.pop(peer, None)
        for header in queue.unconfirmed() if queue is not None else ():
            download = self._downloads.get(header.policy)
            forest = self._forest(download, header.epoch) if download is not None else None
            if (
                download is None
                or forest is None
                or download.manifest.publisher == self._local
                or not forest.is_above(header.stripe, self._local, peer)
            ):
                continue
            for child in forest.children(header.stripe, peer, self._peers.is_gone):
                if child != self._local:
                    self._offer(child, header, download, now)

    def forget(self, policy: bytes) -> None:
        """Forget a version that is no longer held."""
        for queue in self._queues.values():
            queue.purge(policy)
