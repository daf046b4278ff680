"""Which places in the draw order each node has filled: once each, in order, none left out.

A worker that may skip places sells best of n; one that may fill a place twice sells replays.
Submissions of one node travel at the same time, so a few may overtake each other; further ahead
is a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.assignment import REORDER_WINDOW

MAX_MISPLACED: Final = 16
"""Submissions out of place that one node gets verdicts for under one policy. Honest nodes send
none, and a verdict stays in the ledger for ever."""


class PlaceState(Enum):
    """What the place of a submission says about it."""

    FRESH = "fresh"
    REPLAYED = "replayed"
    GAP = "gap"


@dataclass(slots=True)
class _Seen:
    lowest_missing: int = 0
    beyond: dict[int, bytes] = field(default_factory=dict)
    """Content of the places from ``lowest_missing`` on that are filled, none beyond the
    window."""
    misplaced: int = 0
    unsure: dict[int, None] = field(default_factory=dict)
    """Places below ``lowest_missing`` that may never have been filled: at most a window of
    them."""

    def advance(self, lowest: int) -> None:
        """Places below ``lowest`` are filled, and so is what follows them without a gap."""
        self.lowest_missing = lowest
        for index in [index for index in self.beyond if index < lowest]:
            del self.beyond[index]
        while self.lowest_missing in self.beyond:
            del self.beyond[self.lowest_missing]
            self.lowest_missing += 1


class DrawSequences:
    """The places filled by every node, for the policy versions that are still accepted.

    Bounded: versions below the staleness bound are forgotten, a node's version holds at most
    `REORDER_WINDOW` places and as many unsure ones, and a node is here because a submission of
    it was judged under that version.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[PolicyVersion, PeerId], _Seen] = {}

    def judge(self, node: PeerId, version: PolicyVersion, index: int) -> PlaceState:
        """What filling this place now would be."""
        seen = self._seen.get((version, node)) or _Seen()
        if index in seen.unsure:
            return PlaceState.FRESH
        if index < seen.lowest_missing or index in seen.beyond:
            return PlaceState.REPLAYED
        if index > seen.lowest_missing + REORDER_WINDOW:
            return PlaceState.GAP
        return PlaceState.FRESH

    def succeed(self, node: PeerId, version: PolicyVersion, index: int) -> None:
        """Begin with ``index`` for a node that is not known under ``version``: another
        validator has judged its places before. Those of the window may be on their way here,
        and need not be.
        """
        if (version, node) not in self._seen and index > 0:
            below = range(max(0, index - REORDER_WINDOW), index)
            self._seen[version, node] = _Seen(lowest_missing=index, unsure=dict.fromkeys(below))

    def fill(self, node: PeerId, version: PolicyVersion, index: int, content: bytes) -> None:
        """Record that the place is taken by ``content``, whatever the verdict on it will be.

        A submission that is out of place takes none, but is counted.
        """
        if self.judge(node, version, index) is not PlaceState.FRESH:
            self.misplace(node, version)
            return
        seen = self._seen.setdefault((version, node), _Seen())
        if index in seen.unsure:
            del seen.unsure[index]
            return
        seen.beyond[index] = content
        seen.advance(seen.lowest_missing)

    def misplace(self, node: PeerId, version: PolicyVersion) -> None:
        """Count a submission that was out of place."""
        self._seen.setdefault((version, node), _Seen()).misplaced += 1

    def recall(self, node: PeerId, version: PolicyVersion, index: int, content: bytes) -> None:
        """Record, after a restart, a place that was taken; `settle` follows.

        Not all that were taken are remembered. But it was in the window then, so all before
        that were.
        """
        seen = self._seen.setdefault((version, node), _Seen())
        seen.beyond[index] = content
        seen.advance(max(seen.lowest_missing, index - REORDER_WINDOW))

    def settle(self) -> None:
        """Leave no gaps that may be none: a place that is not remembered may be filled, and
        need not be."""
        for seen in self._seen.values():
            if seen.beyond:
                top = max(seen.beyond)
                seen.unsure = {
                    i: None for i in range(seen.lowest_missing, top) if i not in seen.beyond
                }
                seen.advance(top + 1)

    def has_strayed(self, node: PeerId, version: PolicyVersion) -> bool:
        """Whether the node has sent `MAX_MISPLACED` submissions out of place: it gets no more
        verdicts."""
        seen = self._seen.get((version, node))
        return seen is not None and seen.misplaced >= MAX_MISPLACED

    def forget_below(self, version: PolicyVersion) -> int:
        """Forget versions below ``version``; returns how many places were left out in them."""
        left_out = 0
        for key in [key for key in self._seen if key[0] < version]:
            seen = self._seen.pop(key)
            if seen.beyond:
                left_out += max(seen.beyond) + 1 - seen.lowest_missing - len(seen.beyond)
        return left_out
