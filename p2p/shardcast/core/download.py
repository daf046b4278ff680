"""State of one version on its way to this node: present, requested, late, held by others.

A `Download` decides what is late; `p2p.shardcast.core.repair` decides whom to ask for it. It
ends as the record of a version that is whole, from which this node serves others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.pace import IN_FLIGHT, ChunkPace, Patience
from p2p.shardcast.core.peers import MAX_REMEMBERED
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import Encoding, Manifest
from p2p.shardcast.messages import ChunkHeader

MAX_HOLDERS: Final = 64
"""Peers whose have-lists are kept per version: 8 neighbours, 16 subscribers, and those
asked."""


class Availability:
    """The chunks of one version that each peer holds, or has taken from other peers.

    A peer *holds* a chunk when it said so or sent it, and has *taken* one when it asked another
    peer for it. Neither needs to be pushed to it; only the former can be asked of it.
    """

    __slots__ = ("_takers", "holders")

    def __init__(self) -> None:
        self.holders: dict[PeerId, ChunkSet] = {}
        """Maps each peer to the chunks that it is known to hold, in the order of first
        contact."""
        self._takers: dict[PeerId, ChunkSet] = {}

    def note_held(self, peer: PeerId, chunks: ChunkSet) -> ChunkSet:
        """Record that ``peer`` holds ``chunks``; return those that were not known before.

        Beyond `MAX_HOLDERS` no further source is needed. Such a peer still needs no pushing.
        """
        if peer not in self.holders and len(self.holders) >= MAX_HOLDERS:
            self.note_taken(peer, chunks)
            return EMPTY
        known = self.holders.get(peer, EMPTY)
        self.holders[peer] = known | chunks
        return chunks - known

    def note_taken(self, peer: PeerId, chunks: ChunkSet) -> None:
        """Record that ``peer`` gets these chunks from another peer."""
        if peer in self._takers or len(self._takers) < MAX_REMEMBERED:
            self._takers[peer] = self._takers.get(peer, EMPTY) | chunks

    def note_wanted(self, peer: PeerId, chunk: int) -> None:
        """Record that ``peer`` asked this node for a chunk, so it does not get that chunk
        elsewhere."""
        self._takers[peer] = self._takers.get(peer, EMPTY).excluding(chunk)

    def note_undelivered(self, peer: PeerId, chunk: int) -> None:
        """Record that ``peer`` did not deliver a chunk that it was asked for.

        The peer no longer counts as a holder of the chunk until it announces the chunk again.
        Otherwise a chunk that only a silent peer claims would be asked of that peer for ever,
        and never of the origin.
        """
        self.holders[peer] = self.holders.get(peer, EMPTY).excluding(chunk)

    def needs(self, peer: PeerId, chunk: int) -> bool:
        """Return True if ``peer`` may still need this chunk, as far as this node knows."""
        return chunk not in self.holders.get(peer, EMPTY) and chunk not in self._takers.get(
            peer, EMPTY
        )

    def is_rare(self, chunk: int) -> bool:
        """Return True if at most half of the known holders hold the chunk.

        The limit is a half so that a peer that claims all chunks does not keep an origin from
        giving them again, and so that the chunks given last before an origin's crash, which few
        hold, count as rare.
        """
        return 2 * sum(chunk in held for held in self.holders.values()) <= len(self.holders)

    def rare(self, count: int) -> ChunkSet:
        """Return the rare chunks among the first ``count``.

        All chunks are examined at once: asking 64 holders about each of 64 Ki chunks takes 14
        s, this takes 2 ms.
        """
        most = len(self.holders) // 2 + 1
        held_by = [ChunkSet.below(count), *[EMPTY] * most]
        """Entry i has the chunks that at least i holders have."""
        for held in self.holders.values():
            for number in range(most, 0, -1):
                held_by[number] |= held_by[number - 1] & held
        return held_by[0] - held_by[most]

    def lose(self, peer: PeerId) -> None:
        """Forget ``peer``."""
        self.holders.pop(peer, None)
        self._takers.pop(peer, None)


class LateChunks:
    """The missing chunks of one version: seen at others, withheld by a parent, or urgent.

    A chunk that a neighbour has is *seen*: the forest will probably push it soon. It becomes
    urgent when it has been seen for `ChunkPace.patience`, when the peer that was first to have
    it is lost, when a request for it failed, or at once when a parent says that it will not
    push it.

    An origin gives chunks away in order. So when chunk 40 comes along a stripe and 12 is
    missing, 12 was given away before: it is *passed over*, and *overdue* when it stays away for
    longer than such chunks usually do. If no neighbour has it either, the origin is asked: a
    root that keeps what it is given can hide that from all but those who count.
    """

    def __init__(self, now: float, stall: float) -> None:
        self._started, self._stall = now, stall
        self._turn = 0.0
        """Mean seconds between two chunks that the origin gives away."""
        self.overdue = EMPTY
        """Chunks passed over long enough ago that the origin should be asked."""
        self._passed: dict[int, float] = {}
        self._behind = Patience(ceiling=4 * stall)
        """Estimates how late passed-over chunks usually come: roots of unequal strength deliver
        out of order."""
        self._frontier = 0
        """One beyond the highest chunk that was pushed."""
        self.urgent = EMPTY
        """Chunks to pull now, unless they are already requested."""
        # When and at which peer a missing chunk was first seen. In the order of time, since a
        # chunk is entered once and leaves for good.
        self._seen: dict[int, tuple[float, PeerId]] = {}

    def note_seen(self, chunk: int, peer: PeerId, now: float) -> None:
        """Record that ``peer`` holds a chunk that this node lacks."""
        self._seen.setdefault(chunk, (now, peer))

    def note_withheld(self, chunk: int) -> None:
        """Mark a chunk as urgent that a parent holds and will not push."""
        self._seen.pop(chunk, None)
        self.note_urgent(chunk)

    def note_pushed(self, chunk: int, missing: ChunkSet, now: float) -> None:
        """Record a chunk that came along a stripe. Missing chunks below it were given away
        earlier, so they are passed over."""
        if chunk >= self._frontier:
            below = ChunkSet.below(chunk) - ChunkSet.below(self._frontier)
            for passed in missing & below:
                self._passed[passed] = now
            self._frontier = chunk + 1
            self._turn = (now - self._started) / self._frontier

    def note_urgent(self, chunk: int) -> None:
        """Mark a chunk as urgent."""
        self.urgent = self.urgent.including(chunk)

    def note_arrival(self, chunk: int, now: float) -> float:
        """Record that a chunk has arrived; return when it was first seen, or ``now``."""
        passed = self._passed.pop(chunk, None)
        if passed is not None:
            self._behind.observe(now - passed)
        self.overdue = self.overdue.excluding(chunk)
        self.urgent = self.urgent.excluding(chunk)
        return self._seen.pop(chunk, (now,))[0]

    def lose(self, peer: PeerId, requested: ChunkSet) -> None:
        """Make the chunks urgent that `peer` was first to have, unless they are requested
        elsewhere."""
        for chunk, (_, first) in self._seen.items():
            if first == peer and chunk not in requested:
                self.note_urgent(chunk)

    def mark_late(self, now: float, patience: float) -> None:
        """Mark the chunks as late that others have had for ``patience`` seconds."""
        while self._seen:
            chunk, (when, _) = next(iter(self._seen.items()))
            if when + patience > now:
                break
            del self._seen[chunk]
            self.note_urgent(chunk)
        wait = self._overdue_after
        for chunk in list(takewhile(lambda one: self._passed[one] + wait <= now, self._passed)):
            del self._passed[chunk]
            self.overdue = self.overdue.including(chunk)

    @property
    def _overdue_after(self) -> float:
        return self._behind.wait(max(self._stall, 3 * IN_FLIGHT * self._turn))

    def due(self, patience: float) -> float:
        """Return the time at which `mark_late` next has something to do; infinite if never."""
        due: float = next(iter(self._seen.values()), (math.inf,))[0] + patience
        if self._passed:
            due = min(due, next(iter(self._passed.values())) + self._overdue_after)
        return due


@dataclass(slots=True)
class Request:
    """A chunk requested from a peer."""

    peer: PeerId
    asked: float
    deadline: float


def _bounded() -> BoundedDict[PeerId, int]:
    return BoundedDict(MAX_REMEMBERED)


@dataclass(slots=True)
class Sharing:
    """What this node owes other peers of one version. `Upload` writes it."""

    subscribers: BoundedDict[PeerId, None] = field(default_factory=lambda: BoundedDict(16))
    """Peers beyond the usual that get have-lists, because they asked. The oldest is
    replaced."""
    new: ChunkSet = EMPTY
    """Chunks to announce."""
    withheld: dict[tuple[PeerId, int, int], ChunkSet] = field(default_factory=dict)
    """Chunks that a child was not pushed and is to be told of, by child, roster epoch and
    stripe."""
    tell_at: float = math.inf
    """Time at which both are sent."""
    deferred: dict[int, tuple[PeerId, ChunkHeader]] = field(default_factory=dict)
    """Chunks to pass on when they arrive, each with the parent whose place this node takes and
    the header to use."""
    answers: BoundedDict[PeerId, int] = field(default_factory=_bounded)
    """Number of chunks and have-lists that each peer has asked for, and of chunks that it has
    left to this node."""
    indexes: BoundedDict[PeerId, int] = field(default_factory=_bounded)
    children: tuple[PeerId, ...] = ()
    """Peers to which the last chunk that the origin gave this node as a root was relayed."""
    received: int = 0
    """Number of chunks that the origin gave this node as a root."""
    kept_up: int = 0
    """Number of chunks received when the children last kept up."""
    confirmed: tuple[int, int] = (0, 0)

    def tell_soon(self, now: float) -> None:
        """Collect what is to be announced for a fifth of the shortest time after which a
        neighbour acts on it. At 100 chunks a second it hears of ten in one message."""
        self.tell_at = min(self.tell_at, now + 0.1)


class Download:
    """The state of one version at one node, from its first announcement on."""

    _most_inquiries: Final = 5
    """Number of fruitless inquiries after which a patch, or an old version, counts as gone.
    Each waits twice as long as the one before, so a node asks some 225 times during an hour
    without its origin."""

    def __init__(
        self, manifest: Manifest, now: float, stall: float, encoding: Encoding | None = None
    ) -> None:
        """Start with no chunks. ``encoding`` is the encoding to fetch, by default the
        anchor."""
        self.manifest = manifest
        self.encoding = encoding if encoding is not None else manifest.anchor
        self.count = self.encoding.chunks
        self.index: Index | None = None
        """Index of the version; None until it is known."""
        self.stored = False
        """True if the version is complete, durable and assembled."""
        self.pull_only = False
        """True if no peer pushes the version to this node, which pulls from any holder
        instead."""
        self.failed = EMPTY
        """Chunks that some peer was asked for and did not deliver."""
        self.may_ask_origin = False
        """True if this node asks the origin for chunks that no other peer is known to have."""
        self.name = manifest.name_of(self.encoding)
        """Digest by which messages name the fetched encoding."""
        self.is_patch = not self.encoding.is_anchor
        """True if the encoding is a patch or an adapter, which turns another policy into this
        one."""
        self.wire_per_chunk = self.encoding.wire / self.count
        """Mean bytes of a chunk on the wire."""
        self.all = ChunkSet.below(self.count)
        """All chunks of the version."""
        self.wanted = self.all
        """Chunks that this node fetches."""
        self.verified = EMPTY
        """Chunks that have arrived and have the right digest."""
        self._requested = EMPTY
        self.availability = Availability()
        """Chunks that each peer claims to hold or no longer needs."""
        self.holders: Mapping[PeerId, ChunkSet] = self.availability.holders
        """Maps each peer to the chunks that it is known to hold."""
        self.sharing = Sharing()
        self.pushed: dict[tuple[int, int], int] = {}
        """Number of chunks that came along each (roster epoch, stripe)."""
        self.first_at = math.inf
        """Time at which the first chunk came."""
        self.lateness = LateChunks(now, stall)
        self._pace = ChunkPace(self.wire_per_chunk, now, stall)
        self.requests: dict[int, Request] = {}
        """Maps each requested chunk to its request."""
        self.inquiries = 0
        """Inquiries among other peers since the last chunk came."""
        self.inquire_at = now + self.patience
        """Time at which to ask other peers what they have, unless something comes before."""

    def resume(self, index: Index, verified: ChunkSet, *, stored: bool) -> None:
        """Take the chunks that the disk holds of a version, which is not being handed out."""
        self.index, self.stored, self.verified = index, stored, verified
        self.pull_only = not stored and not self.is_whole

    def __repr__(self) -> str:
        return (
            f"Download(v{self.manifest.version}, {len(self.verified)} of {self.count} chunks)"
        )

    # What it is

    @property
    def _left(self) -> int:
        return self.count - len(self.verified)

    @property
    def left_bytes(self) -> int:
        """Bytes still to come, estimated from the mean chunk."""
        return int(self._left * self.wire_per_chunk)

    @property
    def size(self) -> int:
        """Raw bytes of the wanted chunks, or of all files while the index is unknown."""
        if self.index is None:
            return self.manifest.size
        return sum(self.index.spans[span].size for span in self.wanted)

    @property
    def is_in_vain(self) -> bool:
        """True if peers and the origin were asked repeatedly, nothing came, and no peer has a
        missing chunk."""
        needed = self.wanted - self.verified
        return (
            self.inquiries >= self._most_inquiries
            and not self.requests
            and not any(chunks & needed for chunks in self.holders.values())
        )

    @property
    def missing(self) -> ChunkSet:
        """Wanted chunks that have neither arrived nor been requested."""
        return self.wanted - self.verified - self._requested

    @property
    def is_whole(self) -> bool:
        """True if every chunk is verified."""
        return self.verified == self.all

    @property
    def is_done(self) -> bool:
        """True if all wanted chunks have arrived."""
        return self.is_whole or (
            self.wanted is not self.all and not self.wanted - self.verified
        )

    @property
    def share(self) -> float:
        """Fraction of the wanted chunks that have arrived, from 0 to 1."""
        return len(self.verified & self.wanted) / max(1, len(self.wanted))

    # Waiting

    @property
    def chunk_time(self) -> float:
        """Recent mean seconds between two chunks that arrive."""
        return self._pace.chunk_time

    @property
    def patience(self) -> float:
        """Seconds that other peers may hold a chunk before this node pulls it."""
        return self._pace.patience(self._left)

    @property
    def _silence(self) -> float:
        return self._pace.silence(self._left)

    def note_inquiry(self, now: float, *, found: bool) -> bool:
        """Record that other peers are asked what they have; ``found`` says whether there were
        any.

        Return True if the origin should be asked now: no peer was found, or the last inquiry
        did not help.
        """
        self.inquiries += 1
        self.inquire_at = now + self._silence * 2 ** min(
            self.inquiries - 1, self._most_inquiries
        )
        is_stuck = not found or self.inquiries > 1
        self.may_ask_origin = self.may_ask_origin or is_stuck
        return is_stuck

    @property
    def next_deadline(self) -> float:
        """Time at which this version next needs a `Tick`."""
        if self.is_done:
            return self.sharing.tell_at
        due = min(self.sharing.tell_at, self.inquire_at)
        if self.requests:
            due = min(due, min([request.deadline for request in self.requests.values()]))
        return min(due, self.lateness.due(self.patience))

    def mark_late(self, now: float) -> None:
        """Make chunks urgent that others have had for longer than `patience`."""
        self.lateness.mark_late(now, self.patience)

    def late(self, now: float) -> ChunkSet:
        """Return the missing chunks to pull now."""
        if self.pull_only or now >= self._pace.pushed_at + self._silence:
            return self.missing
        return self.lateness.urgent & self.missing

    # What other peers hold

    def note_held(self, peer: PeerId, chunks: ChunkSet, now: float) -> bool:
        """Record that ``peer`` holds these chunks. Return True if that is news. The caller has
        checked that they exist."""
        news = self.availability.note_held(peer, chunks)
        if peer != self.manifest.publisher:
            # The origin has all of them from the start, which says nothing of the forest: a
            # crowd that asked it for the index would take each chunk for late when a neighbour
            # has it.
            for chunk in news - self.verified - self.lateness.urgent:
                self.lateness.note_seen(chunk, peer, now)
        return bool(news)

    def note_withheld(self, chunk: int, parent: PeerId) -> None:
        """Record that ``parent`` holds a chunk and will not push it. It can be asked for the
        chunk like any holder."""
        self.availability.note_held(parent, ChunkSet(1 << chunk))
        self.lateness.note_withheld(chunk)

    def lose(self, peer: PeerId) -> None:
        """Forget `peer`. The chunks that were requested from it become urgent."""
        self.availability.lose(peer)
        for chunk in [c for c, request in self.requests.items() if request.peer == peer]:
            self._give_up(chunk)
        self.lateness.lose(peer, self._requested)

    # Requests

    def asked_peers(self) -> list[PeerId]:
        """Return the peer of each request under way."""
        return [request.peer for request in self.requests.values()]

    def ask(self, chunk: int, peer: PeerId, now: float, deadline: float) -> None:
        """Record a request to ``peer`` for a chunk, which expires at ``deadline``."""
        self._requested = self._requested.including(chunk)
        self.requests[chunk] = Request(peer, now, deadline)

    def expire(self, now: float) -> dict[int, Request]:
        """Give up the requests whose deadline has passed, and return them."""
        overdue = {
            c: request for c, request in self.requests.items() if request.deadline <= now
        }
        for chunk, request in overdue.items():
            self._give_up(chunk)
            self.availability.note_undelivered(request.peer, chunk)
        return overdue

    def _give_up(self, chunk: int) -> None:
        self.reject(chunk)
        self.lateness.note_urgent(chunk)
        self.failed = self.failed.including(chunk)

    def accept(self, chunk: int, peer: PeerId, now: float, *, pushed: bool) -> None:
        """Take the first copy of a chunk with the right digest. ``pushed`` is True if it came
        along a stripe."""
        self.reject(chunk)
        self.verified = self.verified.including(chunk)
        self.first_at = min(self.first_at, now)
        seen = self.lateness.note_arrival(chunk, now)
        if pushed:
            self.lateness.note_pushed(chunk, self.missing, now)
            self._pace.note_lag(now - seen)
        self._pace.note_arrival(now, pushed=pushed)
        self.inquiries = 0
        self.inquire_at = now + self._silence
        self.availability.note_held(peer, ChunkSet(1 << chunk))

    def reject(self, chunk: int) -> None:
        """End the request for a chunk, if there is one."""
        if self.requests.pop(chunk, None) is not None:
            self._requested = self._requested.excluding(chunk)
