"""Which chunks of one version the other peers hold, and which they said they need no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.core.peers import MAX_REMEMBERED

MAX_HOLDERS: Final = 64
"""Peers whose have-lists are kept per version: 8 neighbours, 16 subscribers, and those
asked."""


class Availability:
    """Have-lists and taken-lists of one version, by peer.

    A peer *holds* a chunk when it said so or sent it, and has *taken* one when it asked another
    peer for it. Neither needs to be pushed to it; only the former can be asked of it.
    """

    __slots__ = ("_holders", "_takers")

    def __init__(self) -> None:
        self._holders: dict[PeerId, ChunkSet] = {}
        self._takers: dict[PeerId, ChunkSet] = {}

    @property
    def holders(self) -> Mapping[PeerId, ChunkSet]:
        """What each peer is known to hold, in the order in which they were first heard of."""
        return self._holders

    def note_held(self, peer: PeerId, chunks: ChunkSet) -> ChunkSet:
        """``peer`` holds these; returns those for which that is news.

        Beyond `MAX_HOLDERS` no further source is needed. Such a peer still needs no pushing.
        """
        if peer not in self._holders and len(self._holders) >= MAX_HOLDERS:
            self.note_taken(peer, chunks)
            return EMPTY
        known = self._holders.get(peer, EMPTY)
        self._holders[peer] = known | chunks
        return chunks - known

    def note_taken(self, peer: PeerId, chunks: ChunkSet) -> None:
        """``peer`` gets these elsewhere."""
        if peer in self._takers or len(self._takers) < MAX_REMEMBERED:
            self._takers[peer] = self._takers.get(peer, EMPTY) | chunks

    def note_wanted(self, peer: PeerId, chunk: int) -> None:
        """``peer`` asks this node for a chunk, so it does not get it elsewhere after all."""
        self._takers[peer] = self._takers.get(peer, EMPTY).excluding(chunk)

    def note_undelivered(self, peer: PeerId, chunk: int) -> None:
        """``peer`` was asked for a chunk and did not bring it.

        It is not taken for a holder of that chunk until it says so again: a chunk that only a
        silent peer has would else be asked of it for ever, and never of the origin.
        """
        self._holders[peer] = self._holders.get(peer, EMPTY).excluding(chunk)

    def needs(self, peer: PeerId, chunk: int) -> bool:
        """Whether ``peer`` may still need this chunk, as far as this node knows."""
        return chunk not in self._holders.get(peer, EMPTY) and chunk not in self._takers.get(
            peer, EMPTY
        )

    def is_rare(self, chunk: int) -> bool:
        """Whether at most half of the known holders hold it.

        Half, so that one that boasts of all chunks does not keep an origin from giving them
        once more, and those given last before its death, which few hold, are given, too.
        """
        return 2 * sum(chunk in held for held in self._holders.values()) <= len(self._holders)

    def rare(self, count: int) -> ChunkSet:
        """Which of the first ``count`` chunks are rare.

        Found for all at once: 64 holders asked about each of 64 Ki chunks take 14 s, this 2 ms.
        """
        most = len(self._holders) // 2 + 1
        held_by = [ChunkSet.below(count), *[EMPTY] * most]
        """What so many holders have at least."""
        for held in self._holders.values():
            for number in range(most, 0, -1):
                held_by[number] |= held_by[number - 1] & held
        return held_by[0] - held_by[most]

    def lose(self, peer: PeerId) -> None:
        """Forget ``peer``."""
        self._holders.pop(peer, None)
        self._takers.pop(peer, None)
