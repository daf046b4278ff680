"""How many bytes of chunks went between this node and each peer: for people and their maps."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

MAX_FLOWS: Final = 64
"""Peers remembered in each direction: more than a node feeds, or is fed by. The one that moved
nothing for longest goes first."""


class Flows:
    """Bytes by peer since this node started; nothing is decided by them."""

    def __init__(self) -> None:
        self._came: BoundedDict[PeerId, int] = BoundedDict(MAX_FLOWS)
        self._sent: BoundedDict[PeerId, int] = BoundedDict(MAX_FLOWS)

    def count_came(self, peer: PeerId, size: int) -> None:
        """A chunk came from ``peer``."""
        self._came.renew(peer, self._came.get(peer, 0) + size)

    def count_sent(self, peer: PeerId, size: int) -> None:
        """A chunk left for ``peer``."""
        self._sent.renew(peer, self._sent.get(peer, 0) + size)

    def health(self) -> dict[str, dict[str, int]]:
        """As plain values."""
        return {
            "from": {str(peer): size for peer, size in self._came.items()},
            "to": {str(peer): size for peer, size in self._sent.items()},
        }
