"""How much of one version a peer gets for asking: twice what it can need."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.core.peers import MAX_REMEMBERED

MAX_INDEXES: Final = 16
"""Times that one peer gets a version's index, 2.5 MiB at most, for asking: once per life of a
node that restarts all day long."""
SPARE_ANSWERS: Final = 64
"""Answers beyond twice the chunks: have-lists asked for while a swarm is stuck."""


class Allowance:
    """What each peer had of one version for asking.

    An honest peer asks for each chunk once, and again if the first answer was lost with its
    connection: twice the version is more than it can need. Without a limit a peer of a slow
    node could keep the whole uplink busy by asking for one chunk all day.
    """

    __slots__ = ("_answers", "_indexes", "_most")

    def __init__(self, count: int) -> None:
        self._most = 2 * count + SPARE_ANSWERS
        self._answers: BoundedDict[PeerId, int] = BoundedDict(MAX_REMEMBERED)
        self._indexes: BoundedDict[PeerId, int] = BoundedDict(MAX_REMEMBERED)

    def take_answer(self, peer: PeerId) -> bool:
        """Count a chunk or a have-list that ``peer`` asks for. False beyond twice the
        version."""
        return _count(self._answers, peer) <= self._most

    def take_index(self, peer: PeerId) -> bool:
        """Count an index that ``peer`` asks for. False after `MAX_INDEXES` of them."""
        return _count(self._indexes, peer) <= MAX_INDEXES


def _count(counts: dict[PeerId, int], peer: PeerId) -> int:
    counts[peer] = counts.get(peer, 0) + 1
    return counts[peer]
