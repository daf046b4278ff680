"""Pulls: how a node asks other peers for what the forest did not bring.

Neighbours tell each other, and their parents, what they have. A chunk that others have had for
longer than it usually takes to get here is asked for, from any holder but the origin; the
origin is asked when nothing has come for long and no other peer has it. A node outside the
roster lives by pulling alone. Before a chunk is pulled, the parents hear that it is *taken*;
when it comes from another peer, the one that was asked hears so too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.announcer import Announcer
from p2p.shardcast.core.download import Arrival, Download
from p2p.shardcast.core.pace import SLOW_LINK
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.sources import Sources
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.messages import Ask, Taken, Want

_INQUIRIES: Final = 4
"""Peers asked at a time what they have of a version: one of them will know, and four are soon
told. Asking all of up to 64 neighbours would bring as many have-lists of up to 4 KiB each."""


class Repair:
    """Asks what others have, pulls what is late, and says when it is no longer needed."""

    def __init__(
        self,
        local: PeerId,
        statements: Statements,
        peers: Peers,
        announcer: Announcer,
        rng: Random,
        stall: float,
    ) -> None:
        self._local = local
        self._statements = statements
        self._peers = peers
        self._announcer = announcer
        self._rng = rng
        self._sources = Sources(rng, stall)

    def inquire(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Ask some others what they have; if there is none, or none helped, turn to the
        origin."""
        origin = download.manifest.trainer
        roster = self._statements.roster(origin)
        fed = roster.peers if roster is not None and download.pull_only else ()
        others = dict.fromkeys(
            [*self._announcer.audience(download), *self._peers.connected, *fed]
        )
        us = origin, self._local
        candidates = [p for p in others if p not in us and not self._peers.is_gone(p)]
        chosen = self._rng.sample(candidates, min(_INQUIRIES, len(candidates)))
        wants_index = download.index is None
        if download.note_inquiry(now, found=bool(chosen)) and wants_index:
            chosen.append(origin)
        yield from (ev.Send(peer, Ask(download.name, wants_index)) for peer in chosen)

    def pull(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Ask for what is late, and tell the parents that it is taken."""
        if download.is_whole:
            return
        rate = partial(self._rate, download)
        plan = self._sources.plan(download, now, rate)
        wanted = {peer: ChunkSet.of(chunks) for peer, chunks in plan.items()}
        yield from (
            ev.Send(peer, Want(download.name, tuple(chunks))) for peer, chunks in plan.items()
        )
        if not wanted or download.pull_only:
            return
        taken = EMPTY
        for peer, chunks in wanted.items():
            if peer != download.manifest.trainer:  # which may answer along a stripe
                taken |= chunks
        for peer in self._announcer.parents(download):
            yield from _taken(download, peer, taken - wanted.get(peer, EMPTY))

    def arrived(self, download: Download, chunk: int, peer: PeerId, now: float) -> Arrival:
        """``peer`` brought a chunk."""
        return self._sources.arrived(download, chunk, peer, now)

    def expire(self, download: Download, now: float) -> Iterator[ev.Effect]:
        """Give up requests that are past their deadline."""
        return self.cancel(download, self._sources.expire(download, now))

    def cancel(self, download: Download, chunks: dict[int, PeerId]) -> Iterator[ev.Effect]:
        """Tell the peers that were asked for these chunks that they are no longer awaited."""
        asked: dict[PeerId, ChunkSet] = {}
        for chunk, peer in chunks.items():
            asked[peer] = asked.get(peer, EMPTY).including(chunk)
        for peer, taken in asked.items():
            if self._can_tell(download, peer):
                yield from _taken(download, peer, taken)

    def decline(self, download: Download) -> Iterator[ev.Effect]:
        """Tell parents, and peers that were asked for chunks, that none is needed here."""
        for peer in dict.fromkeys(
            [*self._announcer.parents(download), *download.asked_peers()]
        ):
            if self._can_tell(download, peer):
                yield ev.Send(peer, Taken(download.name, ((0, download.count),)))

    def _can_tell(self, download: Download, peer: PeerId) -> bool:
        return peer != download.manifest.trainer and not self._peers.is_gone(peer)

    def _rate(self, download: Download, peer: PeerId) -> float:
        """What to expect of ``peer``'s uplink, in bytes per second; 0 if it is gone.

        Of a peer outside the roster nothing is known. One that claims nothing is given an
        eighth of a slow link: it may have had no time to measure.
        """
        if self._peers.is_gone(peer):
            return 0.0
        roster = self._statements.roster(download.manifest.trainer)
        if roster is None or peer not in roster.positions:
            return SLOW_LINK
        return max(roster.upload(peer), SLOW_LINK / 8)

    def forget(self, download: Download) -> None:
        """A version is no longer fetched."""
        self._sources.forget(download)

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone."""
        self._sources.lose(peer)


def _taken(download: Download, peer: PeerId, chunks: ChunkSet) -> Iterator[ev.Effect]:
    return (ev.Send(peer, Taken(download.name, part)) for part in chunks.ranges())
