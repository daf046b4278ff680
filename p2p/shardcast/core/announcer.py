"""Announcements of chunks to peers, collected in few messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import build_forest
from p2p.shardcast.messages import ChunkHeader, Have, Skipped

MAX_SUBSCRIBERS: Final = 16
"""Most peers outside the neighbourhood that hear of new chunks because they asked. The oldest
is replaced."""


@dataclass(slots=True)
class _Notices:
    """Pending announcements about one version, and the peers beyond the usual that get them."""

    subscribers: dict[PeerId, None] = field(default_factory=dict)
    new: ChunkSet = EMPTY
    withheld: dict[PeerId, dict[tuple[int, int], ChunkSet]] = field(default_factory=dict)
    """Maps each child to the chunks that it was not pushed, by (roster epoch, stripe)."""


class Announcer:
    """Collects announcements: have-lists for neighbours, parents and subscribers, `Skipped` for
    children."""

    def __init__(self, local: PeerId, statements: Statements, peers: Peers) -> None:
        self._local = local
        self._statements = statements
        self._peers = peers
        self._versions: dict[bytes, _Notices] = {}
        self._due: dict[bytes, float] = {}
        """Maps each version with pending announcements to the time at which they are sent."""

    @property
    def next_deadline(self) -> float:
        """Time at which the next announcement is due; infinite if none is pending."""
        return min(self._due.values()) if self._due else math.inf

    def note_new(self, policy: bytes, chunk: int, now: float) -> None:
        """Note a chunk that has arrived, to be announced."""
        notices = self._notices(policy)
        notices.new = notices.new.including(chunk)
        # Seconds for which chunks are collected before they are announced: a fifth of the
        # shortest time after which a neighbour acts on them. Example: at 100 chunks a second a
        # neighbour hears of ten chunks in one message, instead of ten messages.
        self._due.setdefault(policy, now + 0.1)

    def note_withheld(self, child: PeerId, header: ChunkHeader, now: float) -> None:
        """Note that a chunk is not pushed to `child`, which must be told."""
        chunks = self._notices(header.policy).withheld.setdefault(child, {})
        stripe = header.epoch, header.stripe
        chunks[stripe] = chunks.get(stripe, EMPTY).including(header.index)
        self._due.setdefault(header.policy, now + 0.1)

    def subscribe(self, policy: bytes, peer: PeerId) -> None:
        """Send ``peer`` the announcements of this version from now on."""
        subscribers = self._notices(policy).subscribers
        subscribers.pop(peer, None)
        subscribers[peer] = None
        if len(subscribers) > MAX_SUBSCRIBERS:
            del subscribers[next(iter(subscribers))]

    def _notices(self, policy: bytes) -> _Notices:
        return self._versions.setdefault(policy, _Notices())

    def tell(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Return the pending announcements if they are due: have-lists, and to children the
        chunks not pushed to them. Infinite ``now`` makes them due."""
        if self._due.get(download.name, math.inf) > now:
            return
        self._due.pop(download.name, None)
        notices = self._notices(download.name)
        new, withheld = notices.new, notices.withheld
        notices.new, notices.withheld = EMPTY, {}
        parts, holders, everything = list(new.ranges()), download.holders, download.all
        for peer in self.audience(download) if parts else ():
            if holders.get(peer) != everything:
                for part in parts:
                    yield ev.Send(peer, Have(download.name, part))
        for child, stripes in withheld.items():
            if self._peers.is_gone(child):
                continue
            for (epoch, stripe), chunks in stripes.items():
                for part in chunks.ranges():
                    yield ev.Send(child, Skipped(download.name, epoch, stripe, part))

    def audience(self, download: Download) -> list[PeerId]:
        """Return the connected peers that get have-lists: neighbours, subscribers and parents.
        The origin is left out, since it has everything."""
        origin = download.manifest.publisher
        roster = self._statements.roster(origin)
        peers = dict.fromkeys(roster.neighbours(self._local) if roster is not None else ())
        notices = self._versions.get(download.name)
        peers.update(notices.subscribers if notices is not None else {})
        peers.update(dict.fromkeys(self.parents(download)))
        return [peer for peer in peers if peer != origin and not self._peers.is_gone(peer)]

    def parents(self, download: Download) -> tuple[PeerId, ...]:
        """Return the peers that push chunks to this node, without the origin. The origin hears
        neither `Have` nor `Taken`: this node confirms every chunk from it in any case.

        It is not told of haves and takens: what it gives has to be confirmed whatever comes.
        """
        roster = self._statements.roster(download.manifest.publisher)
        if roster is None:
            return ()
        forest = build_forest(roster, download.manifest.version)
        return forest.parents(self._local, self._peers.is_gone)

    def lose(self, peer: PeerId) -> None:
        for notices in self._versions.values():
            notices.subscribers.pop(peer, None)

    def forget(self, policy: bytes) -> None:
        """Forget a version that this node no longer holds."""
        self._versions.pop(policy, None)
        self._due.pop(policy, None)
