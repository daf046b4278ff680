"""Whom this node knows: the routing table, and what experience says about the peers in it.

Who enters the table has answered a question of ours: one that a lookup asked, or the ping with which we
verify a visitor that has asked us something (`is_worth_a_ping`). What a peer says unasked gets it nothing.
Who has a place keeps it while it answers. A peer that we are connected with and that stays silent loses
it at once; of one that we are not connected with, a late answer may only say that our own dials are held
up, so it loses its place when the host says that no address answered, or at the third such failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from p2p.dht.messages import Contact
from p2p.errors import BadMessage
from p2p.identity import PeerId

if TYPE_CHECKING:
    from p2p.dht.core.table import ContactTable

MAX_DEAD: Final = 1024
"""Contacts remembered as dead: a lookup meets a few, a third of a swarm lost at once some hundred."""
DEAD_FOR: Final = 60.0
"""Seconds during which a contact that did not answer is not asked on hearsay. Others still name it until
they have noticed, too."""
MAX_DOUBTS: Final = 3
"""Questions in a row, a minute or more apart, that a peer without a connection may leave unanswered."""
PING_INTERVAL: Final = 60.0
"""Seconds between two pings that others cause us to send to one peer: without it a stranger who sends a
thousand messages a second makes us ping the oldest of a bucket until its meter, not it, is silent."""
MAX_PINGED: Final = 4096
"""Peers remembered as pinged: 64 at once (`requester.MAX_VERIFYING`), a second each, for a minute."""
VISITOR_FOR: Final = 600.0
"""Seconds after its first visit during which a peer that came to us, and that neither a seed nor a lookup has
led us to, is not believed about others: a stranger who connects and names eight victims has us dial none."""
MAX_VISITORS: Final = 1024
"""Visitors remembered: more than a table of 10,000 nodes has places."""
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
        self._doubts: dict[PeerId, int] = {}
        self._pinged: dict[PeerId, float] = {}
        self._visitors: dict[PeerId, float] = {}
        self._lost: dict[PeerId, None] = {}
        self._warm: dict[PeerId, None] = {}
        self._seeds: dict[PeerId, None] = {}

    def check(self, contacts: Iterable[Contact]) -> None:
        """Raise `BadMessage` if one of them has no stamp: whoever names a contact has to have checked it."""
        for contact in contacts:
            if contact.work < self._difficulty:
                raise BadMessage(f"{contact!r} has a work stamp of {contact.work} bits")

    def move(self, own: Contact) -> None:
        """We have other addresses than before."""
        self.own = own
        self.table.live_at(own.addrs)

    def heard(self, contact: Contact) -> Contact | None:
        """``contact`` has answered us. Returns whom to ping because its bucket is full.

        A peer without addresses only asks: nobody could dial it, so it does not enter the table.
        """
        self._forgive(contact)
        if self._lost:
            self._lost.pop(contact.peer, None)
        return self.table.add(contact)

    def visited(self, contact: Contact, now: float) -> bool:
        """``contact`` has asked us something. Whether to ping it, to see if it answers.

        One that has a place is alive by that: no ping is needed, and its newest addresses are taken.
        """
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            self._forgive(contact)
            self.table.add(contact)
            return False
        return self.table.would_take(contact) and self.is_worth_a_ping(contact.peer, now)

    def is_worth_a_ping(self, peer: PeerId, now: float) -> bool:
        """Whether we have not pinged ``peer`` just now; if so, it is noted that we do."""
        if self._pinged.get(peer, -math.inf) > now - PING_INTERVAL:
            return False
        self._pinged.pop(peer, None)
        self._pinged[peer] = now
        if len(self._pinged) > MAX_PINGED:
            del self._pinged[next(iter(self._pinged))]
        return True

    def note_visitor(self, peer: PeerId, now: float) -> None:
        """``peer`` has come to us, and is about to answer our ping."""
        if peer in self._visitors or peer in self._seeds or self.table.contact_of(peer) is not None:
            return
        self._visitors[peer] = now
        if len(self._visitors) > MAX_VISITORS:
            del self._visitors[next(iter(self._visitors))]

    def is_visitor(self, peer: PeerId, now: float) -> bool:
        """Whether ``peer`` came to us of its own accord, and lately."""
        return self._visitors.get(peer, -math.inf) > now - VISITOR_FOR

    def _forgive(self, contact: Contact) -> None:
        if self._dead:
            self._dead.pop(contact.id, None)
        if self._doubts:
            self._doubts.pop(contact.peer, None)

    def silent(self, contact: Contact, now: float) -> None:
        """``contact`` does not answer, or lies."""
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            _remember(self._lost, contact.peer, MAX_LOST)
            self._doubts.pop(contact.peer, None)
        self.table.remove(contact)
        self._leave_alone(contact, now)

    def doubted(self, contact: Contact, now: float) -> None:
        """``contact`` has not answered, and may not even have been asked: we have no connection with it."""
        if self._dead.get(contact.id, -math.inf) > now:
            return  # another question of the same minute
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            doubts = self._doubts[contact.peer] = self._doubts.get(contact.peer, 0) + 1
            if doubts >= MAX_DOUBTS:
                self.silent(contact, now)
                return
        self._leave_alone(contact, now)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """The host has dialled ``peer`` in vain."""
        known = self.table.contact_of(peer)
        if known is not None:
            self.silent(known, now)

    def _leave_alone(self, contact: Contact, now: float) -> None:
        self._dead.pop(contact.id, None)
        self._dead[contact.id] = now + DEAD_FOR
        if len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]

    def usable(self, contacts: Iterable[Contact], now: float) -> list[Contact]:
        """Those worth asking: not ourselves, not lately dead.

        Of a peer in the table only its own word counts, which place it has and which addresses.
        """
        dead = self._dead
        worth: list[Contact] = []
        for contact in contacts:
            if contact.peer == self.own.peer or (dead and dead.get(contact.id, -math.inf) > now):
                continue
            known = self.table.contact_of(contact.peer)
            if known is None or known.id == contact.id:
                worth.append(known or contact)
        return worth

    def is_met(self, peer: PeerId) -> bool:
        """Whether ``peer`` has a place in the table, or a connection: asking it is no dial on hearsay."""
        return peer in self._warm or self.table.contact_of(peer) is not None

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
        """Come back to these when alone. They are our operator's choice, and no visitors."""
        for peer in peers:
            self._visitors.pop(peer, None)
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
