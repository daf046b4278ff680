"""Which roots lose their stripe, since their children say that they relay nothing.

A root confirms whatever it likes, so its children have a say too. A peer *reports* a root when
it asks the origin itself for a chunk which that root had long ago, or when the root sent it a
wrong chunk. A root that `QUORUM` peers report is *demoted*: the next roster makes it a leaf,
and another interior peer takes its stripe.

Each peer has one report a version, so n liars cost n/2 honest roots their stripe for some
versions, and nothing more: a demotion is no proof of malice. (Signed frames would not help: a
liar could sign the right digest in front of wrong bytes.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from p2p.identity import PeerId

QUORUM: Final = 2
"""Peers that must report a root before it is demoted: with one, any peer could slander any
root. A roster of two has one peer that can."""


class Demotions:
    """The reports of one version's hand-out, and the roots that lost their stripe by them."""

    def __init__(self) -> None:
        self._reports: dict[PeerId, int] = {}
        self._reporters: dict[PeerId, None] = {}
        self._demoted: dict[PeerId, None] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._demoted

    def reports(self, root: PeerId) -> int:
        """How many peers report ``root``."""
        return self._reports.get(root, 0)

    def report(self, root: PeerId, by: PeerId, roster: Iterable[PeerId]) -> bool:
        """``by``, one of those on ``roster``, reports ``root``. True if that demotes it."""
        peers = tuple(roster)
        if by == root or by not in peers or by in self._reporters:
            return False
        self._reporters[by] = None
        self._reports[root] = count = self.reports(root) + 1
        if count < min(QUORUM, len(peers) - 1):
            return False
        self._demoted[root] = None
        return True
