"""How an origin gives a policy away: every chunk once, to whichever root has credit.

A root's credit comes back as it gets rid of what it was given, so fast subtrees take more chunks and
nobody has to estimate a bandwidth. What a root got and did not confirm in time, or was holding when it
died, becomes fresh again for another root. An origin that restarts does not know what its earlier life
gave away: it holds everything for given, and gives again what somebody finds nowhere else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.forest import Forest

CREDIT: Final = 2
"""Chunks that a root may owe. With one, it idles for a round trip per chunk (1.5 to 1.6 times the bound
in measurements, against 1.2); with more, the slow hoard what the fast could carry."""
_AT_RISK: Final = 4
"""Chunks lately given to a root that dies: given again, confirmed or not, since a root confirms what it
has received and may not have forwarded."""
_VOICES: Final = 2
"""Peers that must accuse a root: one alone could slander whomever it likes."""
_LATE: Final = 4
_SMOOTHING: Final = 0.25


@dataclass(slots=True)
class _Gift:
    chunk: int
    since: float
    """When it left us; until then, when it was queued."""
    left: bool = False


@dataclass(slots=True)
class _Root:
    stripe: int
    granted: int = CREDIT
    received: int = 0
    given: list[_Gift] = field(default_factory=list)
    trusted: bool = True
    blamed: dict[PeerId, None] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Chunks given and not yet confirmed."""
        return len(self.given) - self.received


class HandOut:
    """One policy on its way out of its origin."""

    def __init__(self, count: int, forest: Forest, now: float, stall: float, *, again: bool = False) -> None:
        self.forest = forest
        self.progress = now
        """When a chunk was last given away."""
        self._count = count
        self._resumed = again
        self._next = count if again else 0
        self._again: deque[int] = deque()
        self._roots = {peer: _Root(stripe) for stripe, peer in enumerate(forest.roots)}
        self._stall = stall
        self._chunk_time = 0.0
        self._missed: dict[int, PeerId] = {}
        self._regiven: dict[int, float] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the roster in use."""
        return self.forest.roster.epoch

    @property
    def exhausted(self) -> bool:
        """Whether nothing fresh is left to give, or nobody to give it to."""
        return (self._next == self._count and not self._again) or not self._roots

    def give(self, has_room: Callable[[PeerId], bool], now: float) -> tuple[PeerId, int, int] | None:
        """The next (root, stripe, chunk), or None while nobody has credit or nothing is left."""
        if self.exhausted:
            return None
        ready = [
            (root.pending, len(root.given), root.stripe, peer)
            for peer, root in self._roots.items()
            if root.trusted and len(root.given) < root.granted and has_room(peer)
        ]
        if not ready:
            return None
        peer = min(ready)[-1]
        if self._again:
            chunk = self._again.popleft()
            self._regiven[chunk] = now
        else:
            chunk, self._next = self._next, self._next + 1
        self._roots[peer].given.append(_Gift(chunk, now))
        self.progress = now
        return peer, self._roots[peer].stripe, chunk

    def sent(self, peer: PeerId, now: float) -> None:
        """A chunk has left for a root: from now on it may be late."""
        root = self._roots.get(peer)
        gift = next((gift for gift in root.given if not gift.left), None) if root is not None else None
        if gift is not None:
            gift.since, gift.left = now, True

    def credit(self, peer: PeerId, received: int, granted: int, now: float) -> bool:
        """A root confirms and asks for more. False if it claims more than it was given."""
        root = self._roots.get(peer)
        if root is None:
            return True
        if received > len(root.given):
            return self._resumed  # it counts what our earlier life gave it
        if received > root.received:
            took = now - root.given[received - 1].since
            self._chunk_time += _SMOOTHING * (took - self._chunk_time)
            root.received = received
        root.granted = max(root.granted, min(granted, received + CREDIT))
        root.trusted = root.trusted or not root.pending
        return True

    def lose(self, peer: PeerId) -> None:
        """A root is gone: what it may not have forwarded goes to others."""
        root = self._roots.pop(peer, None)
        if root is not None:
            start = min(root.received, max(0, len(root.given) - _AT_RISK))
            self._again.extend(g.chunk for g in root.given[start:] if g.chunk not in self._again)

    def blame(self, root: PeerId, by: PeerId) -> None:
        """``by`` says that a root lied to it. Two such voices, or the only possible one: it is out."""
        accused = self._roots.get(root)
        if accused is None or by == root or by not in self.forest.roster.positions:
            return
        accused.blamed[by] = None
        if len(accused.blamed) >= min(_VOICES, len(self.forest.roster.peers) - 1):
            self.lose(root)

    def complain(self, chunk: int, by: PeerId, now: float) -> bool:
        """A peer of the roster asks the origin itself for a chunk that some root should have brought.

        True if the chunk is given again along another stripe, once, which serves everybody who misses it. A
        single voice is served by itself: mostly the chunk is on its way. After a restart it is not.
        """
        if by not in self.forest.roster.positions:
            return False
        if chunk < self._next and chunk not in self._regiven and len(self._roots) > 1:
            if self._missed.setdefault(chunk, by) == by and not self._resumed:
                return False
            self._regiven[chunk] = now
            if chunk not in self._again:
                self._again.append(chunk)
            return True
        if chunk in self._again:
            self._regiven.setdefault(chunk, now)  # no root may be left that can take it
        return now < self._regiven.get(chunk, -math.inf) + _LATE * self._stall

    def expire(self, now: float) -> None:
        """Give again what a root has not confirmed in time, and that root nothing more until it has."""
        for root in self._roots.values():
            if root.trusted and root.pending and self._due(root) <= now:
                root.trusted = False
                self._again.extend(gift.chunk for gift in root.given[root.received :])

    def _due(self, root: _Root) -> float:
        oldest = root.given[root.received]
        patience = max(self._stall, _LATE * self._chunk_time)
        return oldest.since + (patience if oldest.left else _LATE * patience)

    @property
    def next_deadline(self) -> float:
        """When `expire` next has something to do."""
        waiting = [self._due(root) for root in self._roots.values() if root.trusted and root.pending]
        return min(waiting, default=math.inf)
