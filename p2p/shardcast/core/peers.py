"""Who is connected, who is gone, and with whom this node never deals again."""

from __future__ import annotations

from typing import Any, Final

from p2p.identity import PeerId

MAX_REMEMBERED: Final = 4096
"""Peers known to be gone, connected or lying: a roster's worth. The oldest is forgotten first."""


def bound(memory: dict[Any, Any], most: int) -> None:
    """Forget the oldest entry beyond ``most``."""
    if len(memory) > most:
        del memory[next(iter(memory))]


class Peers:
    """What a core knows of others' presence, from its driver and from what they send."""

    def __init__(self) -> None:
        self._up: dict[PeerId, None] = {}
        self._lost: dict[PeerId, None] = {}
        self._liars: dict[PeerId, None] = {}
        self._greeted: dict[PeerId, int] = {}
        """Which version was the news when a peer's `Hello` was answered."""

    @property
    def up(self) -> tuple[PeerId, ...]:
        """Those with a connection."""
        return tuple(self._up)

    def connected(self, peer: PeerId) -> None:
        """There is a connection."""
        self._lost.pop(peer, None)
        self._up[peer] = None
        bound(self._up, MAX_REMEMBERED)

    def heard(self, peer: PeerId) -> bool:
        """Something came from ``peer``, so it is connected, though what we pushed to it may have failed.

        False if it lied before: then it is not heard.
        """
        if peer in self._liars:
            return False
        if peer in self._lost:
            self.connected(peer)
        return True

    def greet(self, peer: PeerId, newest: int) -> bool:
        """Whether to tell ``peer`` of version ``newest`` because it said `Hello`: once per connection.

        A `Hello` has 8 bytes, the answer up to 180 KiB: a peer that says it all day would have us send
        20,000 times what it does.
        """
        if self._greeted.get(peer) == newest:
            return False
        self._greeted[peer] = newest
        bound(self._greeted, MAX_REMEMBERED)
        return True

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone."""
        self._up.pop(peer, None)
        self._greeted.pop(peer, None)
        self._lost[peer] = None
        bound(self._lost, MAX_REMEMBERED)

    def convict(self, peer: PeerId) -> None:
        """Never deal with ``peer`` again."""
        self._liars[peer] = None
        bound(self._liars, MAX_REMEMBERED)

    def is_liar(self, peer: PeerId) -> bool:
        """Whether ``peer`` is one that this node never deals with again."""
        return peer in self._liars

    def is_gone(self, peer: PeerId) -> bool:
        """Whether it is of no use to send ``peer`` anything."""
        return peer in self._lost or peer in self._liars
