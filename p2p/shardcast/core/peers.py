"""Which peers are connected, gone or banned, and how many bytes went to and came from each."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

MAX_REMEMBERED: Final = 4096
"""Peers known to be gone, connected or banned: a roster's worth. The oldest is forgotten
first."""


class Peers:
    """Presence of peers, by the driver and by their messages."""

    def __init__(self) -> None:
        self._connected: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._lost: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._banned: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._greeted: BoundedDict[PeerId, tuple[bytes, int]] = BoundedDict(MAX_REMEMBERED)
        """Which manifest was the newest, and how many publishers were convicted, when a peer's
        `Hello` was answered."""

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers with a connection."""
        return tuple(self._connected)

    def note_connected(self, peer: PeerId) -> None:
        """There is a connection."""
        self._lost.pop(peer, None)
        self._connected[peer] = None

    def admit(self, peer: PeerId) -> bool:
        """Return True if a message of `peer` is taken: it is not banned.

        A peer that sends is connected, though its bulk stream may have broken a moment ago.
        """
        if peer in self._banned:
            return False
        if peer in self._lost:
            self.note_connected(peer)
        return True

    def greet(self, peer: PeerId, newest: bytes, convicted: int) -> bool:
        """Return True if `peer` should hear of the manifest ``newest`` (its digest) and of
        ``convicted`` publishers for its `Hello`: once per connection.

        A `Hello` has 50 bytes, the answer up to 180 KiB: a peer that repeats it all day would
        make this node send 3,600 times what it sends itself.
        """
        if self._greeted.get(peer) == (newest, convicted):
            return False
        self._greeted[peer] = newest, convicted
        return True

    def lose(self, peer: PeerId) -> None:
        """``peer`` is gone."""
        self._connected.pop(peer, None)
        self._greeted.pop(peer, None)
        self._lost[peer] = None

    def ban(self, peer: PeerId) -> None:
        """Never deal with ``peer`` again."""
        self._banned[peer] = None

    def is_banned(self, peer: PeerId) -> bool:
        """Return True if this node never deals with ``peer`` again."""
        return peer in self._banned

    def is_gone(self, peer: PeerId) -> bool:
        """Return True if it is of no use to send ``peer`` anything."""
        return peer in self._lost or peer in self._banned


class Flows:
    """Bytes by peer since this node started; nothing is decided by them."""

    def __init__(self) -> None:
        # Peers remembered in each direction: more than a node feeds, or is fed by. The one that
        # moved nothing for longest goes first.
        self._came: BoundedDict[PeerId, int] = BoundedDict(64)
        self._sent: BoundedDict[PeerId, int] = BoundedDict(64)

    def count_came(self, peer: PeerId, size: int) -> None:
        """A chunk came from ``peer``."""
        self._came.renew(peer, self._came.get(peer, 0) + size)

    def count_sent(self, peer: PeerId, size: int) -> None:
        """A chunk left for ``peer``."""
        self._sent.renew(peer, self._sent.get(peer, 0) + size)

    def health(self) -> dict[str, dict[str, int]]:
        """Health as plain values."""
        return {
            "from": {str(peer): size for peer, size in self._came.items()},
            "to": {str(peer): size for peer, size in self._sent.items()},
        }
