"""One policy version on its way to this node: what is here, asked for, and held by others.

A `Download` decides what is late; `p2p.shardcast.core.sources` decides whom to ask for it, and
`p2p.shardcast.core.repair` asks. It ends as the record of a version that is whole, from which
this node serves others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.availability import Availability
from p2p.shardcast.core.chunks import ChunkEvent, ChunkState, ChunkStates
from p2p.shardcast.core.lateness import LateChunks
from p2p.shardcast.core.pace import ChunkPace
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import Encoding, Manifest, PolicyVersion

_MOST_INQUIRIES: Final = 5
"""Inquiries in vain after which a patch, or an old version, counts as gone. Each waits twice as
long as the one before, so during an hour without its origin a node asks some 225 times."""


@dataclass(slots=True)
class Request:
    """A chunk that was asked of a peer."""

    peer: PeerId
    asked: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk that came, settled with its source: what `Download.accept` and `reject` need.

    Only `Sources.arrived` makes one, so a chunk cannot change its state before the peer that
    was asked for it has been credited or cleared.
    """

    chunk: int
    peer: PeerId
    request: Request | None
    """The request for it, whichever peer it was made to."""
    is_answer: bool
    """Whether ``peer`` is the one that was asked."""


class Download:
    """The state of one version at one node, from its first announcement on."""

    def __init__(
        self, manifest: Manifest, now: float, stall: float, encoding: Encoding | None = None
    ) -> None:
        """``encoding`` is what is fetched of the version; the anchor unless it is said."""
        self.manifest = manifest
        self.encoding = encoding if encoding is not None else manifest.anchor
        self.count = self.encoding.chunks
        self.index: Index | None = None
        """None until it is known: no chunk can be judged before."""
        self.stored = False
        """Whether it is whole, durable and assembled."""
        self.pull_only = False
        """No peer will push it to this node: it pulls what any holder has."""
        self.failed = EMPTY
        """Chunks that a peer was asked for and did not bring."""
        self.may_ask_origin = False
        """Whether to ask the origin for what no other peer is known to have."""
        self._wanted: ChunkSet | None = None
        """The chunks that this node fetches; None: all."""
        self._states = ChunkStates(self.count)
        self._availability = Availability()
        self._lateness = LateChunks(now, stall)
        self._pace = ChunkPace(self.wire_per_chunk, now, stall)
        self._requests: dict[int, Request] = {}
        self._inquiries = 0
        """How often other peers were asked what they have since the last chunk came."""
        self.inquire_at = now + self.patience
        """When to ask other peers what they have, if nothing comes before."""

    @classmethod
    def held(
        cls,
        manifest: Manifest,
        index: Index,
        verified: ChunkSet,
        now: float,
        stall: float,
        *,
        stored: bool,
    ) -> Download:
        """A version of which the disk holds ``verified``; its hand-out is over."""
        download = cls(manifest, now, stall, manifest.encoding_of(index))
        download.index = index
        download.stored = stored
        download._states = ChunkStates(download.count, verified)
        download.pull_only = not stored and not download.is_whole
        return download

    def __repr__(self) -> str:
        return (
            f"Download(v{self.manifest.version}, {len(self.verified)} of {self.count} chunks)"
        )

    # What it is

    @property
    def name(self) -> bytes:
        """The digest by which messages name what is fetched."""
        return self.manifest.name_of(self.encoding)

    @property
    def is_patch(self) -> bool:
        """Whether it is no policy, but what makes one of another."""
        return not self.encoding.is_anchor

    @property
    def base(self) -> PolicyVersion:
        """The version that a patch is for."""
        return self.encoding.base

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to come, about."""
        return int(self._states.left * self.wire_per_chunk)

    @property
    def is_in_vain(self) -> bool:
        """Whether other peers and the origin were asked again and again, nothing came, and none
        of them has anything of what is missing."""
        needed = self.wanted - self.verified
        return (
            self._inquiries >= _MOST_INQUIRIES
            and not self._requests
            and not any(chunks & needed for chunks in self.holders.values())
        )

    @property
    def all(self) -> ChunkSet:
        """Every chunk that exists."""
        return self._states.all

    @property
    def wanted(self) -> ChunkSet:
        """Every chunk that this node fetches."""
        return self.all if self._wanted is None else self._wanted

    @property
    def verified(self) -> ChunkSet:
        """Chunks that are here."""
        return self._states.verified

    @property
    def missing(self) -> ChunkSet:
        """Chunks to fetch that are neither here nor asked for."""
        missing = self._states.missing
        return missing if self._wanted is None else missing & self._wanted

    @property
    def is_whole(self) -> bool:
        """Whether every chunk is verified."""
        return not self._states.left

    @property
    def is_done(self) -> bool:
        """Whether nothing more of it is fetched."""
        return self.is_whole or (self._wanted is not None and not self._wanted - self.verified)

    @property
    def share(self) -> float:
        """The share of the chunks to fetch that is here."""
        if self._wanted is None:
            return len(self.verified) / self.count
        return len(self.verified & self._wanted) / max(1, len(self._wanted))

    @property
    def wire_per_chunk(self) -> float:
        """Bytes of a chunk on the wire, in the mean."""
        return self.encoding.wire / self.count

    def restrict(self, wanted: ChunkSet) -> None:
        """Fetch no other chunks than these."""
        self._wanted = wanted

    # Waiting

    @property
    def chunk_time(self) -> float:
        """Seconds between two chunks that come, lately."""
        return self._pace.chunk_time

    @property
    def patience(self) -> float:
        """Seconds that a chunk may lag behind others' possession of it before it is pulled."""
        return self._pace.patience(self._states.left)

    @property
    def _silence(self) -> float:
        return self._pace.silence(self._states.left)

    def note_inquiry(self, now: float, *, found: bool) -> bool:
        """Other peers are asked what they have; ``found`` if there was any peer to ask.

        Returns whether to turn to the origin now: there was none, or the last inquiry did not
        help.
        """
        self._inquiries += 1
        self.inquire_at = now + self._silence * 2 ** min(self._inquiries - 1, _MOST_INQUIRIES)
        is_stuck = not found or self._inquiries > 1
        self.may_ask_origin = self.may_ask_origin or is_stuck
        return is_stuck

    @property
    def was_inquired(self) -> bool:
        """Whether other peers were asked what they have since the last chunk came."""
        return self._inquiries > 0

    @property
    def next_deadline(self) -> float:
        """When this version next needs a `Tick`."""
        if self.is_done:
            return math.inf
        due = self.inquire_at
        if self._requests:
            due = min(due, min([request.deadline for request in self._requests.values()]))
        return min(due, self._lateness.due(self.patience))

    def mark_late(self, now: float) -> None:
        """What others have had for longer than `patience` becomes urgent."""
        self._lateness.mark_late(now, self.patience)

    def late(self, now: float) -> ChunkSet:
        """The missing chunks to pull now."""
        if self.pull_only or now >= self._pace.pushed_at + self._silence:
            return self.missing
        return self._lateness.urgent & self.missing

    @property
    def overdue(self) -> ChunkSet:
        """Chunks that were passed over long ago: if no other peer has them, the origin is
        asked."""
        return self._lateness.overdue

    @property
    def has_urgent(self) -> bool:
        """Whether some chunk is urgent, asked for or not."""
        return bool(self._lateness.urgent)

    # What other peers hold

    @property
    def availability(self) -> Availability:
        """What each peer said that it holds, and that it needs no more."""
        return self._availability

    @property
    def holders(self) -> Mapping[PeerId, ChunkSet]:
        """What each peer is known to hold."""
        return self._availability.holders

    def exist(self, chunks: ChunkSet) -> bool:
        """Whether there are such chunks."""
        return chunks.end <= self.count

    def note_held(self, peer: PeerId, chunks: ChunkSet, now: float) -> None:
        """``peer`` holds these chunks, all of which exist."""
        news = self._availability.note_held(peer, chunks)
        if peer == self.manifest.trainer:
            # It has all of them from the start, which says nothing of the forest: a crowd that
            # asked it for the index would take each chunk for late when a neighbour has it.
            return
        for chunk in news - self.verified - self._lateness.urgent:
            self._lateness.note_seen(chunk, peer, now)

    def note_withheld(self, chunk: int, parent: PeerId) -> None:
        """``parent`` holds a chunk and will not push it: it is asked for it like any holder."""
        self._availability.note_held(parent, ChunkSet(1 << chunk))
        self._lateness.note_withheld(chunk)

    def lose(self, peer: PeerId) -> None:
        """Forget ``peer``; what it was to bring is urgent now."""
        self._availability.lose(peer)
        for chunk in [c for c, request in self._requests.items() if request.peer == peer]:
            self._give_up(chunk, ChunkEvent.PEER_LOST)
        self._lateness.lose(peer, self._states.requested)

    # Requests

    @property
    def outstanding(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def request_for(self, chunk: int) -> Request | None:
        """The request under way for a chunk."""
        return self._requests.get(chunk)

    def asked_peers(self) -> list[PeerId]:
        """The peer of each request under way."""
        return [request.peer for request in self._requests.values()]

    def ask(self, chunk: int, peer: PeerId, now: float, deadline: float) -> None:
        """A chunk is asked of ``peer``, and awaited until ``deadline``."""
        self._states.advance(chunk, ChunkEvent.ASK)
        self._requests[chunk] = Request(peer, now, deadline)

    def extend_requests(self, peer: PeerId, deadline: float) -> None:
        """``peer`` has just brought something: await the rest of it until ``deadline`` at
        least."""
        for request in self._requests.values():
            if request.peer == peer:
                request.deadline = max(request.deadline, deadline)

    def expire(self, now: float) -> dict[int, Request]:
        """Give up requests that are past their deadline; returns them."""
        overdue = {
            c: request for c, request in self._requests.items() if request.deadline <= now
        }
        for chunk, request in overdue.items():
            self._give_up(chunk, ChunkEvent.STALLED)
            self._availability.note_undelivered(request.peer, chunk)
        return overdue

    def _give_up(self, chunk: int, event: ChunkEvent) -> None:
        self._advance(chunk, event)
        self._lateness.note_urgent(chunk)
        self.failed = self.failed.including(chunk)

    def accept(self, arrival: Arrival, now: float, *, pushed: bool) -> None:
        """A chunk with the right digest came for the first time; ``pushed`` along a stripe."""
        self._advance(arrival.chunk, ChunkEvent.DIGEST_OK)
        seen = self._lateness.note_arrival(arrival.chunk, now)
        if pushed:
            self._lateness.note_pushed(arrival.chunk, self.missing, now)
            self._pace.note_lag(now - seen.when if seen is not None else 0.0)
        self._pace.note_arrival(now, pushed=pushed)
        self._inquiries = 0
        self.inquire_at = now + self._silence
        self._availability.note_held(arrival.peer, ChunkSet(1 << arrival.chunk))

    def reject(self, arrival: Arrival) -> None:
        """A chunk with a wrong digest came."""
        self._advance(arrival.chunk, ChunkEvent.DIGEST_BAD)

    def _advance(self, chunk: int, event: ChunkEvent) -> None:
        if self._states.advance(chunk, event) is not ChunkState.REQUESTED:
            self._requests.pop(chunk, None)
