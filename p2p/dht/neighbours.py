"""Whom this node knows: the routing table, and what experience says about the peers in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from p2p.dht.messages import Contact
from p2p.errors import BadMessage
from p2p.identity import PeerId

if TYPE_CHECKING:
    from p2p.dht.table import ContactTable

MAX_DEAD: Final = 1024
"""Contacts remembered as dead: a lookup meets a few, a third of a swarm lost at once some hundred."""
DEAD_FOR: Final = 60.0
"""Seconds during which a contact that did not answer is not asked on hearsay. Others still name it until
they have noticed, too."""
MAX_LOST: Final = 20
"""Contacts that have left the table last: whom to ask when a partition may have healed."""
MAX_SEEDS: Final = 64
"""Bootstrap peers that are remembered."""
MAX_WARM: Final = 8192
"""Peers remembered as connected, should the host never say that they are gone."""


class Neighbours:
    """Contacts with their history. All lists are bounded; the oldest entry goes first."""

    def __init__(self, own: Contact, table: ContactTable, difficulty: int) -> None:
        self.own = own
        self.table = table
        self._difficulty = difficulty
        self._dead: dict[bytes, float] = {}
        self._lost: dict[PeerId, None] = {}
        self._warm: dict[PeerId, None] = {}
        self._seeds: dict[PeerId, None] = {}

    def check(self, contacts: Iterable[Contact]) -> None:
        """Raise `BadMessage` if one of them has no stamp: whoever names a contact has to have checked it."""
        for contact in contacts:
            if contact.work < self._difficulty:
                raise BadMessage(f"{contact!r} has a work stamp of {contact.work} bits")

    def heard(self, contact: Contact) -> Contact | None:
        """A message came from ``contact``. Returns whom to ping because its bucket is full.

        A peer without addresses only asks: nobody could dial it, so it does not enter the table.
        """
        if self._dead:
            self._dead.pop(contact.id, None)
        if self._lost:
            self._lost.pop(contact.peer, None)
        return self.table.add(contact) if contact.addrs else None

    def silent(self, contact: Contact, now: float) -> None:
        """``contact`` does not answer, or lies."""
        if self.table.contact_of(contact.peer) is not None:
            _remember(self._lost, contact.peer, MAX_LOST)
        self.table.remove(contact)
        self._dead.pop(contact.id, None)
        self._dead[contact.id] = now + DEAD_FOR
        if len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]

    def usable(self, contacts: Iterable[Contact], now: float) -> list[Contact]:
        """Those worth asking: not ourselves, not lately dead."""
        dead = self._dead
        return [
            contact
            for contact in contacts
            if contact.peer != self.own.peer and (not dead or dead.get(contact.id, -math.inf) <= now)
        ]

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """The nearest contacts of the table."""
        return self.table.closest(int.from_bytes(target, "big"), count)

    def connected(self, peer: PeerId) -> None:
        """There is a connection to ``peer``."""
        if peer not in self._warm:
            _remember(self._warm, peer, MAX_WARM)

    def disconnected(self, peer: PeerId) -> None:
        """There is none any more."""
        self._warm.pop(peer, None)

    def is_warm(self, peer: PeerId) -> bool:
        """Whether a message to ``peer`` needs no dial."""
        return peer in self._warm

    def remember_seeds(self, peers: Iterable[PeerId]) -> None:
        """Come back to these when alone."""
        for peer in peers:
            if peer != self.own.peer:
                _remember(self._seeds, peer, MAX_SEEDS)

    def forgotten(self) -> list[PeerId]:
        """Seeds and lost peers that are not in the table: whom to ask whether the swarm is larger."""
        candidates = dict.fromkeys((*self._seeds, *self._lost))
        return [peer for peer in candidates if self.table.contact_of(peer) is None]


def _remember(peers: dict[PeerId, None], peer: PeerId, limit: int) -> None:
    peers.pop(peer, None)
    peers[peer] = None
    if len(peers) > limit:
        del peers[next(iter(peers))]
