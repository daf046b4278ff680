"""Connected, gone and banned peers, and the bytes to and from each."""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId

MAX_REMEMBERED: Final = 4096
"""Most peers remembered as gone, connected or banned: the size of a roster. The oldest is
forgotten first."""


class Peers:
    """Tracks which peers are connected, gone or banned, from the driver's events and from
    messages."""

    def __init__(self) -> None:
        self._connected: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._lost: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._banned: BoundedDict[PeerId, None] = BoundedDict(MAX_REMEMBERED)
        self._greeted: BoundedDict[PeerId, tuple[bytes, int]] = BoundedDict(MAX_REMEMBERED)
        """Maps each peer to what it was last told for its `Hello`: the digest of the newest
        manifest and the number of convicted publishers."""

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Peers that are connected."""
        return tuple(self._connected)

    def note_connected(self, peer: PeerId) -> None:
        self._lost.pop(peer, None)
        self._connected[peer] = None

    def admit(self, peer: PeerId) -> bool:
        """Return True if messages of `peer` are accepted, which means that it is not banned.

        A peer that sends is connected, even if its bulk stream broke a moment ago.
        """
        if peer in self._banned:
            return False
        if peer in self._lost:
            self.note_connected(peer)
        return True

    def greet(self, peer: PeerId, newest: bytes, convicted: int) -> bool:
        """Return True if `peer` should be sent the manifest ``newest`` (a digest) and the
        ``convicted`` publishers in answer to its `Hello`. Each is sent once per connection.

        A `Hello` has 50 bytes and the answer up to 180 KiB. Without this limit a peer that
        repeats it all day would make this node send 3,600 times as much as the peer sends.
        """
        if self._greeted.get(peer) == (newest, convicted):
            return False
        self._greeted[peer] = newest, convicted
        return True

    def lose(self, peer: PeerId) -> None:
        self._connected.pop(peer, None)
        self._greeted.pop(peer, None)
        self._lost[peer] = None

    def ban(self, peer: PeerId) -> None:
        """Refuse all further dealings with ``peer``."""
        self._banned[peer] = None

    def is_banned(self, peer: PeerId) -> bool:
        """Return True if this node never deals with ``peer`` again."""
        return peer in self._banned

    def is_gone(self, peer: PeerId) -> bool:
        """Return True if sending to ``peer`` is pointless."""
        return peer in self._lost or peer in self._banned
