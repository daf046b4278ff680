"""Which places in the draw order each node has filled: once each, in order, none left out.

A worker that may skip places sells best of n; one that may fill a place twice sells replays.
Submissions of one node travel at the same time, so a few may overtake each other; further ahead
is a gap.

Where another validator judged a node before, the first place that comes here is a claim:
nothing shows how many were filled there. A worker that could name any place would sell the best
of all that it drew. So what comes first names where the node stands, and no more: from there on
up to `LOT` places, as many as this validator draws, are taken unseen, and only those behind
them are judged. Which is the first of those no worker can know when it chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.assignment import REORDER_WINDOW

MAX_MISPLACED: Final = 16
"""Submissions out of place that one node gets verdicts for under one policy. Honest nodes send
none, and each costs a signature."""
LOT: Final = 16
"""Places that are taken unseen at most where a node comes from another validator's hands, once
for each policy: what an honest node loses then, and what a worker cannot choose among."""
PASSING: Final = 4096
"""Nodes without accepted work, by policy, whose places are remembered: 2 MB. The one met first
is forgotten first, and begins again; so does every new name."""


class PlaceState(Enum):
    """What the place of a submission says about it."""

    FRESH = "fresh"
    REPLAYED = "replayed"
    GAP = "gap"
    UNSEEN = "unseen"
    """It is taken and blames no worker: it lies in the lot of a node that another validator
    judged before."""


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
    begins: int = 0
    """Places below are taken unseen."""
    opening: int = 0
    """The last succession in which the node began anew; 0 for none."""

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
    it was answered under that version: those without accepted work in `PASSING`.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[PolicyVersion, PeerId], _Seen] = {}
        """Of nodes that have a name to lose."""
        self._passing: BoundedDict[tuple[PolicyVersion, PeerId], _Seen] = BoundedDict(PASSING)
        """Of all others."""
        self._floor = PolicyVersion(0)

    def _find(self, node: PeerId, version: PolicyVersion) -> _Seen | None:
        key = (version, node)
        return self._seen.get(key) or self._passing.get(key)

    def _of(self, node: PeerId, version: PolicyVersion) -> _Seen:
        """The same, begun if it was not."""
        found = self._find(node, version)
        if found is None:
            found = self._passing[version, node] = _Seen()
        return found

    def settle_in(self, node: PeerId, version: PolicyVersion) -> None:
        """Work of the node was accepted: what is known of its places is forgotten with the
        policy only."""
        seen = self._passing.pop((version, node), None)
        if seen is not None:
            self._seen[version, node] = seen

    def judge(self, node: PeerId, version: PolicyVersion, index: int) -> PlaceState:
        """What filling this place now would be."""
        seen = self._find(node, version) or _Seen()
        free = PlaceState.UNSEEN if index < seen.begins else PlaceState.FRESH
        if index in seen.unsure:
            return free
        if index < seen.lowest_missing or index in seen.beyond:
            return PlaceState.REPLAYED
        if index > seen.lowest_missing + REORDER_WINDOW:
            return PlaceState.GAP
        return free

    def succeed(
        self, node: PeerId, version: PolicyVersion, index: int, opening: int, lot: int
    ) -> None:
        """Begin with ``index``, if the node is not known under ``version`` or leaves places out
        here: another validator has judged them. Those of the window may be on their way, and
        need not be.

        ``lot`` places from ``index`` on are taken unseen, but where the window says that no
        more than it was left out. Once for each ``opening`` (from 1) of a succession.
        """
        known = self._find(node, version)
        if known is None:
            if index == 0:
                return
        elif known.opening == opening or self.judge(node, version, index) is not PlaceState.GAP:
            return
        begins = 0 if index <= REORDER_WINDOW else index + lot
        self._begin_anew(node, version, index, opening, begins)

    def _begin_anew(
        self, node: PeerId, version: PolicyVersion, index: int, opening: int, begins: int = 0
    ) -> None:
        known = self._find(node, version) or _Seen()
        below = range(max(known.lowest_missing, index - REORDER_WINDOW), index)
        home = self._seen if (version, node) in self._seen else self._passing
        home[version, node] = _Seen(
            lowest_missing=index,
            misplaced=known.misplaced,
            unsure={place: None for place in below if place not in known.beyond},
            begins=begins,
            opening=opening,
        )

    def fill(self, node: PeerId, version: PolicyVersion, index: int, content: bytes) -> None:
        """Record that the place is taken by ``content``, whatever the verdict on it will be.

        A submission that is out of place takes none, but is counted.
        """
        if self.judge(node, version, index) not in (PlaceState.FRESH, PlaceState.UNSEEN):
            self.misplace(node, version)
            return
        seen = self._of(node, version)
        if index in seen.unsure:
            del seen.unsure[index]
            return
        seen.beyond[index] = content
        seen.advance(seen.lowest_missing)

    def misplace(self, node: PeerId, version: PolicyVersion) -> None:
        """Count a submission that was out of place."""
        self._of(node, version).misplaced += 1

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
        seen = self._find(node, version)
        return seen is not None and seen.misplaced >= MAX_MISPLACED

    def forget_below(self, version: PolicyVersion) -> int:
        """Forget versions below ``version``; returns how many places were left out in them."""
        left_out = 0
        if version <= self._floor:  # asked for every head
            return left_out
        self._floor = version
        for key in [key for key in (*self._seen, *self._passing) if key[0] < version]:
            seen = self._seen.pop(key, None) or self._passing.pop(key)
            if seen.beyond:
                left_out += max(seen.beyond) + 1 - seen.lowest_missing - len(seen.beyond)
        return left_out
