"""Policies by name only: those that are over, and those that others speak of before we know them."""

from __future__ import annotations

from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core.peers import bound
from p2p.shardcast.messages import Ask, Have, Skipped, Taken, Want

_MAX_NAMES: Final = 256
"""Policies remembered as over, or as asked about; names of 32 bytes."""
_MAX_EARLY: Final = 16
"""Unknown policies, and askers of each, that will be answered once we hear of them ourselves."""


class Rumours:
    """What to make of a name that stands for no policy here."""

    def __init__(self) -> None:
        self._over: dict[bytes, None] = {}
        self._wondered: dict[bytes, None] = {}
        self._early: dict[bytes, dict[PeerId, None]] = {}

    def close(self, name: bytes) -> None:
        """This policy is over: it is not fetched (again)."""
        self._over[name] = None
        bound(self._over, _MAX_NAMES)

    def is_over(self, name: bytes) -> bool:
        """Whether it is."""
        return name in self._over

    def take_askers(self, name: bytes) -> tuple[PeerId, ...]:
        """Who asked for a policy before we knew it."""
        return tuple(self._early.pop(name, ()))

    def hear(self, peer: PeerId, message: Ask | Have | Taken | Skipped | Want) -> bool:
        """``peer`` speaks of an unknown policy. True if it knows it, and should be asked."""
        name = message.policy
        if name in self._over:
            return False
        if isinstance(message, Ask):
            waiting = self._early.setdefault(name, {})
            waiting[peer] = None
            bound(waiting, _MAX_EARLY)
            bound(self._early, _MAX_EARLY)
        elif isinstance(message, Have) and name not in self._wondered:
            self._wondered[name] = None
            bound(self._wondered, _MAX_NAMES)
            return True
        return False
