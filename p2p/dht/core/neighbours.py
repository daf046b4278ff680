"""The contacts that this node knows: the routing table and their history.

Which peers enter the table? Those that have answered a request of ours: one of a lookup, or the
PING with which we verify a peer that has asked us something (`on_request`). What a peer sends
unasked changes nothing.

Which leave it? A peer keeps its place while it answers. A connected peer that does not answer
loses it at once. The silence of a peer without a connection may only say that our own dials are
held up, so it loses its place when the host says that no address answered, or at the third
failure in a row.

A peer that came to us by itself, an *inbound* one, is not believed about third parties for a
while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2p.bounded import BoundedDict
from p2p.dht.messages import Contact
from p2p.errors import BadMessage
from p2p.identity import PeerId

if TYPE_CHECKING:
    from p2p.dht.core.table import RoutingTable


class Neighbours:
    """Routing table and history of its contacts. All tables are bounded and drop the oldest
    entry."""

    def __init__(self, own: Contact, table: RoutingTable, difficulty: int) -> None:
        self.own = own
        self.table = table
        self._difficulty = difficulty
        # Contacts remembered as dead: a lookup meets a few, a third of a swarm lost at once
        # some hundred.
        self._dead: BoundedDict[bytes, float] = BoundedDict(1024)
        self._timeouts: dict[PeerId, int] = {}
        # Inbound peers remembered: more than a table of 10,000 nodes has places, some 200.
        # Forgetting one early only makes it believed ten minutes too soon.
        self._inbound: BoundedDict[PeerId, float] = BoundedDict(1024)
        # Contacts that have left the table last: candidates for a join when a partition may
        # have healed.
        self._lost: BoundedDict[PeerId, None] = BoundedDict(20)
        # Peers remembered as connected, should the host never say that they are gone.
        self.up: BoundedDict[PeerId, None] = BoundedDict(8192)
        # Bootstrap peers remembered: a configuration names a handful.
        self._seeds: BoundedDict[PeerId, None] = BoundedDict(64)

    def check(self, contacts: Iterable[Contact]) -> None:
        """Raise `BadMessage` if a contact lacks a sufficient stamp. A peer must check the stamp
        before it names the contact."""
        for contact in contacts:
            if contact.work < self._difficulty:
                raise BadMessage(f"{contact!r} has a work stamp of {contact.work} bits")

    def move(self, own: Contact) -> None:
        """Replace this node's own contact after a change of its addresses."""
        self.own = own
        self.table.move(own.addrs)

    # What peers did.

    def _has(self, contact: Contact) -> bool:
        """Return True if the peer is in the table with this stamp."""
        known = self.table.contact_of(contact.peer)
        return known is not None and known.id == contact.id

    def on_reply(self, contact: Contact) -> Contact | None:
        """Note a reply of ``contact``, and return the contact to ping if its bucket is full.

        A peer without addresses does not enter the table, because no node could dial it.
        """
        self._mark_alive(contact)
        if self._lost:
            self._lost.pop(contact.peer, None)
        return self.table.add(contact)

    def on_request(self, contact: Contact) -> bool:
        """Note a request of ``contact``, and return True if it should be pinged to see if it
        answers.

        A contact in the table needs no ping. Its request shows that it is alive, and its newest
        addresses are stored.
        """
        if self._has(contact):
            self._mark_alive(contact)
            self.table.add(contact)
            return False
        return self.table.would_take(contact)

    def failed(self, contact: Contact, now: float) -> None:
        """Remove ``contact`` from the table, because it certainly did not answer, or lied."""
        if self._has(contact):
            self._lost.renew(contact.peer, None)
            self._timeouts.pop(contact.peer, None)
        self.table.remove(contact)
        self._mark_dead(contact, now)

    def timed_out(self, contact: Contact, now: float) -> None:
        """Count a timeout of ``contact``, to which there is no connection. It may not even have
        got the request, so it leaves the table only after three in a row."""
        if self._dead.get(contact.id, -math.inf) > now:
            return  # another request of the same minute
        if self._has(contact):
            timeouts = self._timeouts[contact.peer] = self._timeouts.get(contact.peer, 0) + 1
            # Number of failures in a row, a minute or more apart, after which a peer without a
            # connection leaves the table.
            if timeouts >= 3:
                self.failed(contact, now)
                return
        self._mark_dead(contact, now)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """Remove ``peer`` from the table, because no dial of the host reached it."""
        known = self.table.contact_of(peer)
        if known is not None:
            self.failed(known, now)

    def _mark_alive(self, contact: Contact) -> None:
        if self._dead:
            self._dead.pop(contact.id, None)
        if self._timeouts:
            self._timeouts.pop(contact.peer, None)

    def _mark_dead(self, contact: Contact, now: float) -> None:
        # Seconds for which a contact that did not answer is not asked again: others go on
        # naming it until they notice too.
        self._dead.renew(contact.id, now + 60.0)

    # Which contacts to ask, and which to believe.

    def eligible(self, contacts: Iterable[Contact], now: float) -> list[Contact]:
        """Return the contacts worth asking, without this node and recently dead ones.

        For a peer in the table, the table's own contact is returned instead of one that another
        peer names, or none if their stamps differ: only a peer's own word counts about its
        stamp and addresses.
        """
        dead = self._dead
        worth: list[Contact] = []
        for contact in contacts:
            if contact.peer == self.own.peer:
                continue
            if dead and dead.get(contact.id, -math.inf) > now:
                continue
            known = self.table.contact_of(contact.peer)
            if known is None or known.id == contact.id:
                worth.append(known or contact)
        return worth

    def is_met(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is in the table or connected. Asking it then is no dial on a
        third party's word."""
        return peer in self.up or self.table.contact_of(peer) is not None

    def note_inbound(self, peer: PeerId, now: float) -> None:
        """Note that ``peer``, which is about to be pinged, came to us by itself."""
        known = peer in self._inbound or peer in self._seeds
        if not known and self.table.contact_of(peer) is None:
            self._inbound[peer] = now

    def is_recent_inbound(self, peer: PeerId, now: float) -> bool:
        """Return True if ``peer`` first came to us by itself less than ten minutes ago."""
        # Seconds for which an inbound peer's claims about third parties are ignored, unless it
        # is a seed or a lookup led us to it. A stranger that connects and names eight victims
        # makes us dial none of them.
        return self._inbound.get(peer, -math.inf) > now - 600.0

    # Connections, seeds.

    def remember_seeds(self, peers: Iterable[PeerId]) -> None:
        """Remember peers to ask again when this node is alone. The operator chose them, so they
        are believed at once."""
        for peer in peers:
            self._inbound.pop(peer, None)
            if peer != self.own.peer:
                self._seeds.renew(peer, None)

    def rejoin_candidates(self) -> list[PeerId]:
        """Return the seeds and lost peers that are not in the table. Through them the other
        side of a healed partition is found."""
        candidates = dict.fromkeys((*self._seeds, *self._lost))
        return [peer for peer in candidates if self.table.contact_of(peer) is None]
