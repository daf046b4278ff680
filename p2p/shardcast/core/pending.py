"""Versions that this node knows by name only: over, or spoken of before their manifest came."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.messages import Ask, Have, Skipped, Taken, Want

_MAX_NAMES: Final = 256
"""Versions remembered as over, or as asked about: names of 32 bytes, 8 KiB each table. They are
many more than a swarm still speaks of (two are fetched at a time, three are kept)."""
_MAX_EARLY: Final = 16
"""Unknown versions, and peers that ask for each, that are answered once their manifest comes.
An announcement crosses the gossip mesh within a second, so few questions overtake it."""


class PendingNames:
    """What to make of a version's name for which there is no `Download`."""

    def __init__(self) -> None:
        self._over: BoundedDict[bytes, None] = BoundedDict(_MAX_NAMES)
        self._asked_about: BoundedDict[bytes, None] = BoundedDict(_MAX_NAMES)
        self._early: BoundedDict[bytes, BoundedDict[PeerId, None]] = BoundedDict(_MAX_EARLY)

    def close(self, name: bytes) -> None:
        """This version is over: it is not fetched (again)."""
        self._over[name] = None

    def is_over(self, name: bytes) -> bool:
        """Whether it is."""
        return name in self._over

    def take_early(self, name: bytes) -> tuple[PeerId, ...]:
        """The peers that asked for a version before its manifest came here."""
        return tuple(self._early.pop(name, ()))

    def hear(self, peer: PeerId, message: Ask | Have | Taken | Skipped | Want) -> bool:
        """``peer`` speaks of an unknown version. True if it has the manifest: ask it for
        that."""
        name = message.policy
        if name in self._over:
            return False
        if isinstance(message, Ask):
            if name not in self._early:
                self._early[name] = BoundedDict(_MAX_EARLY)
            self._early[name][peer] = None
        elif isinstance(message, Have) and name not in self._asked_about:
            self._asked_about[name] = None
            return True
        return False
