"""The origin's side: which of this node's own versions is handed out, and which comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.handout import HandOut
from p2p.shardcast.core.line import Lines
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import build_forest
from p2p.shardcast.messages import INLINE_INDEX, NO_STRIPE, Blame, ChunkHeader, Credit, news_of

_OVERTIME: Final = 4
"""Shortest waits without a chunk given away after which a hand-out no longer delays the next (2
s at the usual ``stall``): its roots are all dead or stuck, and a newer version is worth more to
the peers that still listen."""


class Origin:
    """One version at a time: the next starts when the one before has left, those in between
    never.

    So a run that publishes faster than its links carry still delivers. Example: 40 versions of
    4 MiB in ten seconds over lines that carry one a second give each receiver eight to ten
    whole versions, the last among them, instead of forty parts.
    """

    def __init__(
        self,
        statements: Statements,
        is_gone: Callable[[PeerId], bool],
        lines: Lines,
        stall: float,
    ) -> None:
        self._statements = statements
        self._lines = lines
        self._is_gone = is_gone
        self._overtime = _OVERTIME * stall
        self._handouts: dict[bytes, HandOut] = {}
        self._next: Download | None = None
        self._resumed = False

    def publish(self, download: Download, *, resumed: bool) -> None:
        """``download`` is next, whatever was; ``resumed`` if an earlier life began to hand it
        out."""
        self._next, self._resumed = download, resumed

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to start and nothing to give."""
        return self._next is None and not self._handouts

    def start(self, now: float) -> list[ev.Effect]:
        """Announce and hand out what is next, if it is its turn."""
        download = self._next
        if download is None or any(
            self._delays(handout, now) for handout in self._handouts.values()
        ):
            return []
        self._next = None
        announcement = ev.Gossip(news_of(download.manifest, download.index, INLINE_INDEX))
        roster = self._statements.roster(download.manifest.trainer)
        if roster is None:
            return [announcement]
        forest = build_forest(roster, download.manifest.version)
        handout = HandOut(
            download.count,
            forest,
            now,
            download.patience,
            lines=self._lines,
            chunk_bytes=download.wire_per_chunk,
            resumed=self._resumed,
        )
        for peer in forest.roots:
            if self._is_gone(peer):
                handout.lose(peer)
        self._handouts[download.name] = handout
        return [announcement]

    def _delays(self, handout: HandOut, now: float) -> bool:
        return not handout.exhausted and now < handout.progress + self._overtime

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> Iterator[tuple[PeerId, ChunkHeader]]:
        """What roots have credit for. ``has_room`` is asked anew before each chunk."""
        for name, handout in self._handouts.items():
            while (given := handout.give(has_room, now)) is not None:
                peer, stripe, chunk = given
                yield peer, ChunkHeader(name, chunk, handout.epoch, stripe)

    def note_left(self, peer: PeerId, header: ChunkHeader, now: float) -> None:
        """A chunk has left this node for ``peer``."""
        handout = self._handouts.get(header.policy)
        if handout is not None and header.stripe != NO_STRIPE:
            handout.note_left(peer, now)

    def give_again(self, policy: bytes, chunk: int, by: PeerId, now: float) -> bool:
        """Whether a chunk that ``by`` asks for is given again along the forest, not to it
        alone."""
        handout = self._handouts.get(policy)
        return handout is not None and handout.give_again(chunk, by, now)

    def hear(self, peer: PeerId, message: Credit | Blame, now: float) -> bool:
        """What roots and their children say about a hand-out. False if it cannot be true."""
        handout = self._handouts.get(message.policy)
        if handout is None:
            return True
        if isinstance(message, Credit):
            return handout.confirm(peer, message.received, message.granted, now)
        handout.blame(message.peer, peer)
        return True

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone: what it may not have forwarded is given to other roots."""
        for handout in self._handouts.values():
            handout.lose(peer)

    def forget(self, policy: bytes) -> None:
        """A version is no longer held."""
        self._handouts.pop(policy, None)

    def expire(self, now: float) -> None:
        """Give again what roots have not confirmed in time."""
        for handout in self._handouts.values():
            handout.expire(now)

    @property
    def next_deadline(self) -> float:
        """When `expire` or `start` next has something to do."""
        if self.is_idle:
            return math.inf
        handouts = self._handouts.values()
        due = [handout.next_deadline for handout in handouts]
        if self._next is not None:
            turns = [h.progress + self._overtime for h in handouts if not h.exhausted]
            due.append(max(turns, default=math.inf))  # `start` waits for every one of them
        return min(due, default=math.inf)
