"""How an origin gives a version away: every chunk once, each to a root that has credit.

Theory of operation
-------------------
BitTorrent's name for it is super-seeding: the origin gives each chunk to one peer, and gives
the next one to the peer that got rid of the last. Here the peers are the roots of the forest,
and a root says itself how much it may be given: its *credit* grows as its children take what it
was given before. So fast subtrees take more chunks and no bandwidth has to be estimated.

What a root got and did not confirm in time, or was holding when it died, is given again to
another root. An origin that restarts does not know what its earlier life gave away: it takes
everything for given, and gives again what a peer finds nowhere else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core.average import UsualTime
from p2p.shardcast.core.line import MAX_CREDIT, Line, Lines
from p2p.shardcast.forest import Forest

_AT_RISK: Final = 4
"""Chunks lately given to a root that dies which are given again, confirmed or not: a root
confirms what it has received and may not have forwarded. As many may lie in the buffers between
two hosts."""
_ACCUSERS: Final = 2
"""Peers that must blame a root before it is fed no more: with one, any peer could slander any
root. In a roster of two there is only one peer that can."""
_LATE: Final = 4
"""Mean confirmation times after which a chunk is late and goes to another root. Example: chunks
confirmed after 0.3 s in the mean are given again after 1.2 s. A chunk that has not even left
waits behind others in the origin's own queue, and is given four times as long."""


class _Root:
    """One root of the forest: what it was given, what it confirmed, who blames it."""

    __slots__ = (
        "_blamed",
        "_given",
        "_granted",
        "_left",
        "_line",
        "_rate",
        "confirmed",
        "stripe",
        "trusted",
    )

    def __init__(self, stripe: int, line: Line, rate: float) -> None:
        """Its children can take ``rate`` chunks a second."""
        self.stripe = stripe
        self._line = line
        self._rate = rate
        self._granted = MAX_CREDIT
        self.confirmed = 0
        self.trusted = True
        """Whether it may be given more: not while a chunk of its own is late."""
        self._given: list[_Given] = []
        self._left = 0
        self._blamed: dict[PeerId, None] = {}

    @property
    def given(self) -> int:
        """Chunks that it was given in all."""
        return len(self._given)

    @property
    def pending(self) -> int:
        """Chunks given and not yet confirmed."""
        return len(self._given) - self.confirmed

    @property
    def has_credit(self) -> bool:
        """Whether it may be given a chunk more, by its own word and by what its line holds."""
        return (
            self.trusted
            and self.given < self._granted
            and self.pending < self._line.credit(self._rate)
        )

    @property
    def oldest(self) -> _Given:
        """The first of those."""
        return self._given[self.confirmed]

    def give(self, chunk: int, now: float) -> None:
        """A chunk is queued for it."""
        self._given.append(_Given(chunk, now))

    def note_left(self, now: float) -> None:
        """The first chunk that had not left has left."""
        if self._left < len(self._given):
            self._given[self._left].leave(now)
            self._left += 1

    def confirm(self, received: int, granted: int, now: float) -> float | None:
        """It has ``received`` chunks in all; returns how long the last took, if that is
        news."""
        took = None
        if received > self.confirmed:
            took = now - self._given[received - 1].since
            self.confirmed = received
            self._line.note_round_trip(took)
        self._granted = min(granted, received + MAX_CREDIT)
        self.trusted = self.trusted or not self.pending
        return took

    def distrust(self) -> list[int]:
        """Give it nothing more until it has confirmed what it owes; returns that."""
        self.trusted = False
        return self.chunks_from(self.confirmed)

    def chunks_from(self, start: int) -> list[int]:
        """What it was given, from the ``start``-th on."""
        return [given.chunk for given in self._given[start:]]

    def blame(self, by: PeerId) -> int:
        """One more peer says that it lied; returns how many do."""
        self._blamed[by] = None
        return len(self._blamed)


@dataclass(slots=True)
class _Given:
    chunk: int
    since: float
    """When it left the origin; until then, when it was queued."""
    has_left: bool = False

    def leave(self, now: float) -> None:
        """It has left: from now on it may be late."""
        self.since, self.has_left = now, True


class HandOut:
    """One version on its way out of its origin."""

    def __init__(
        self,
        count: int,
        forest: Forest,
        now: float,
        stall: float,
        *,
        lines: Lines | None = None,
        chunk_bytes: float = math.inf,
        resumed: bool = False,
    ) -> None:
        self.forest = forest
        self.progress = now
        """When a chunk was last given away."""
        self._count = count
        self._resumed = resumed
        self._next = count if resumed else 0
        """The first chunk that was never given."""
        self._again: deque[int] = deque()
        lines = lines or Lines()
        self._roots = {
            peer: _Root(stripe, lines.to(peer), forest.rate(stripe) / chunk_bytes)
            for stripe, peer in enumerate(forest.roots)
        }
        self._stall = stall
        self._confirm_time = UsualTime()
        self._missed: dict[int, PeerId] = {}
        """Chunks that one peer has asked the origin itself for, and which."""
        self._given_again: dict[int, float] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the roster in use."""
        return self.forest.roster.epoch

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to give, or no root to give it to."""
        return (self._next == self._count and not self._again) or not self._roots

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> tuple[PeerId, int, int] | None:
        """The next (root, stripe, chunk); None while no root has credit or nothing is left.

        The root with the fewest unconfirmed chunks comes first, then the one that had the
        fewest in all, then the one of the lowest stripe.
        """
        if self.exhausted:
            return None
        ready = [
            (root.pending, root.given, root.stripe, peer)
            for peer, root in self._roots.items()
            if root.has_credit and has_room(peer)
        ]
        if not ready:
            return None
        peer = min(ready)[-1]
        if self._again:
            chunk = self._again.popleft()
            self._given_again[chunk] = now
        else:
            chunk, self._next = self._next, self._next + 1
        root = self._roots[peer]
        root.give(chunk, now)
        self.progress = now
        return peer, root.stripe, chunk

    def note_left(self, peer: PeerId, now: float) -> None:
        """A chunk has left for a root: from now on it may be late."""
        root = self._roots.get(peer)
        if root is not None:
            root.note_left(now)

    def confirm(self, peer: PeerId, received: int, granted: int, now: float) -> bool:
        """A root confirms and asks for more. False if it claims more than it was given."""
        root = self._roots.get(peer)
        if root is None:
            return True
        if received > root.given:
            return self._resumed  # it counts what our earlier life gave it
        took = root.confirm(received, granted, now)
        if took is not None:
            self._confirm_time.observe(took)
        return True

    def lose(self, peer: PeerId) -> None:
        """A root is gone: what it may not have forwarded goes to others."""
        root = self._roots.pop(peer, None)
        if root is not None:
            start = min(root.confirmed, max(0, root.given - _AT_RISK))
            lost = root.chunks_from(start)
            self._again.extend(chunk for chunk in lost if chunk not in self._again)

    def blame(self, peer: PeerId, by: PeerId) -> None:
        """``by`` says that a root lied to it. Two such peers, or the only possible one: it is
        out."""
        root = self._roots.get(peer)
        if root is None or by == peer or by not in self.forest.roster.positions:
            return
        if root.blame(by) >= min(_ACCUSERS, len(self.forest.roster.peers) - 1):
            self.lose(peer)

    def give_again(self, chunk: int, by: PeerId, now: float) -> bool:
        """A peer of the roster asks the origin itself for a chunk that a root should have
        brought.

        True if the chunk is given again along another stripe, once, which serves every peer
        that misses it. A single request is answered directly: mostly the chunk is on its way.
        After a restart it is not.
        """
        if by not in self.forest.roster.positions:
            return False
        if chunk < self._next and chunk not in self._given_again and len(self._roots) > 1:
            if self._missed.setdefault(chunk, by) == by and not self._resumed:
                return False
            self._given_again[chunk] = now
            if chunk not in self._again:
                self._again.append(chunk)
            return True
        if chunk in self._again:
            self._given_again.setdefault(chunk, now)  # no root may be left that can take it
        return now < self._given_again.get(chunk, -math.inf) + _LATE * self._stall

    def expire(self, now: float) -> None:
        """Give again what a root has not confirmed in time, and that root nothing until it
        has."""
        for root in self._roots.values():
            if root.trusted and root.pending and self._due(root) <= now:
                self._again.extend(root.distrust())

    def _due(self, root: _Root) -> float:
        patience = max(self._stall, self._confirm_time.late)
        oldest = root.oldest
        return oldest.since + (patience if oldest.has_left else _LATE * patience)

    @property
    def next_deadline(self) -> float:
        """When `expire` next has something to do."""
        waiting = [
            self._due(root) for root in self._roots.values() if root.trusted and root.pending
        ]
        return min(waiting, default=math.inf)
