"""The contacts that this node knows: the routing table and their history.

Which peers enter the table? Those that have answered a request of ours: one of a lookup, or the
PING with which we verify a peer that has asked us something (`on_request`). What a peer sends
unasked changes nothing.

Which leave it? A peer keeps its place while it answers. A connected peer that does not answer
loses it at once. The silence of a peer without a connection may only say that our own dials are
held up, so it loses its place when the host says that no address answered, or at the third
failure in a row (`MAX_TIMEOUTS`).

A peer that came to us by itself, an *inbound* one, is not believed about third parties for a
while (`INBOUND_FOR`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from p2p.bounded import BoundedDict
from p2p.dht.messages import Contact
from p2p.errors import BadMessage
from p2p.identity import PeerId

if TYPE_CHECKING:
    from p2p.dht.core.table import RoutingTable

MAX_TIMEOUTS: Final = 3
"""Requests in a row, a minute or more apart, that a peer without a connection may leave
unanswered."""
PING_INTERVAL: Final = 60.0
"""Seconds between two pings to one peer that other peers cause. Without it, a stranger that
sends a thousand messages a second makes us ping the oldest contact of a bucket until that
contact's quotas make it silent."""
INBOUND_FOR: Final = 600.0
"""Seconds for which an inbound peer is not believed about third parties, unless it is a seed or
a lookup led us to it. A stranger that connects and names eight victims makes us dial none of
them."""


class Neighbours:
    """The routing table and the history of its contacts. All tables are bounded and evict the
    oldest entry."""

    def __init__(self, own: Contact, table: RoutingTable, difficulty: int) -> None:
        self.own = own
        self.table = table
        self._difficulty = difficulty
        # Contacts remembered as dead: a lookup meets a few, a third of a swarm lost at once
        # some hundred.
        self._dead: BoundedDict[bytes, float] = BoundedDict(1024)
        self._timeouts: dict[PeerId, int] = {}
        # Peers remembered as pinged: 64 at once (`requester.MAX_VERIFYING`), a second each, for
        # a minute.
        self._pinged: BoundedDict[PeerId, float] = BoundedDict(4096)
        # Inbound peers remembered: more than a table of 10,000 nodes has places, some 200.
        # Forgetting one early only makes it believed ten minutes too soon.
        self._inbound: BoundedDict[PeerId, float] = BoundedDict(1024)
        # Contacts that have left the table last: candidates for a join when a partition may
        # have healed.
        self._lost: BoundedDict[PeerId, None] = BoundedDict(20)
        # Peers remembered as connected, should the host never say that they are gone.
        self._connected: BoundedDict[PeerId, None] = BoundedDict(8192)
        # Bootstrap peers remembered: four times as many as one join asks
        # (`requester.MAX_SEEDS_ASKED`).
        self._seeds: BoundedDict[PeerId, None] = BoundedDict(64)

    def check(self, contacts: Iterable[Contact]) -> None:
        """Raise `BadMessage` if a contact lacks its stamp: a peer has to check it before it
        names the contact."""
        for contact in contacts:
            if contact.work < self._difficulty:
                raise BadMessage(f"{contact!r} has a work stamp of {contact.work} bits")

    def move(self, own: Contact) -> None:
        """This node has other addresses than before."""
        self.own = own
        self.table.move(own.addrs)

    # What peers did.

    def on_reply(self, contact: Contact) -> Contact | None:
        """``contact`` has answered us. Returns the contact to ping if its bucket is full.

        A peer without addresses only asks: no node could dial it, so it does not enter the
        table.
        """
        self._mark_alive(contact)
        if self._lost:
            self._lost.pop(contact.peer, None)
        return self.table.add(contact)

    def on_request(self, contact: Contact, now: float) -> bool:
        """``contact`` has asked us something. Whether to ping it, to see if it answers.

        One that has a place in the table is alive by that: no ping is needed, and its newest
        addresses are taken.
        """
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            self._mark_alive(contact)
            self.table.add(contact)
            return False
        return self.table.would_take(contact) and self.claim_ping(contact.peer, now)

    def claim_ping(self, peer: PeerId, now: float) -> bool:
        """Return True if `PING_INTERVAL` allows for a ping to ``peer``; if so, it counts as
        pinged now."""
        if self._pinged.get(peer, -math.inf) > now - PING_INTERVAL:
            return False
        self._pinged.renew(peer, now)
        return True

    def failed(self, contact: Contact, now: float) -> None:
        """``contact`` has certainly not answered, or has lied: it leaves the table."""
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            self._lost.renew(contact.peer, None)
            self._timeouts.pop(contact.peer, None)
        self.table.remove(contact)
        self._mark_dead(contact, now)

    def timed_out(self, contact: Contact, now: float) -> None:
        """``contact`` has not answered, and may not even have been asked: we have no connection
        with it."""
        if self._dead.get(contact.id, -math.inf) > now:
            return  # another request of the same minute
        known = self.table.contact_of(contact.peer)
        if known is not None and known.id == contact.id:
            timeouts = self._timeouts[contact.peer] = self._timeouts.get(contact.peer, 0) + 1
            if timeouts >= MAX_TIMEOUTS:
                self.failed(contact, now)
                return
        self._mark_dead(contact, now)

    def unreachable(self, peer: PeerId, now: float) -> None:
        """The host has dialled ``peer`` in vain."""
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
        """Return the contacts worth asking, without ourselves and lately dead ones.

        Of a peer in the table only its own word counts, which stamp it has and which addresses:
        in place of a contact that another peer names, the table's own is returned, or none if
        the stamps differ.
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

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """The contacts of the table nearest to ``target``."""
        return self.table.closest(int.from_bytes(target, "big"), count)

    def is_met(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is in the table or connected, so that asking it is no dial on
        a third party's word."""
        return peer in self._connected or self.table.contact_of(peer) is not None

    def note_inbound(self, peer: PeerId, now: float) -> None:
        """``peer`` came to us by itself, and is about to answer our ping."""
        known = peer in self._inbound or peer in self._seeds
        if not known and self.table.contact_of(peer) is None:
            self._inbound[peer] = now

    def is_recent_inbound(self, peer: PeerId, now: float) -> bool:
        """Return True if ``peer`` first came to us by itself less than `INBOUND_FOR` ago."""
        return self._inbound.get(peer, -math.inf) > now - INBOUND_FOR

    # Connections, seeds.

    def connected(self, peer: PeerId) -> None:
        """There is a connection to ``peer``."""
        if peer not in self._connected:
            self._connected[peer] = None

    def disconnected(self, peer: PeerId) -> None:
        """The connection to ``peer`` is gone."""
        self._connected.pop(peer, None)

    def is_connected(self, peer: PeerId) -> bool:
        """Return True if a message to ``peer`` needs no dial."""
        return peer in self._connected

    def remember_seeds(self, peers: Iterable[PeerId]) -> None:
        """Ask these again when alone. They are our operator's choice, so they are believed at
        once."""
        for peer in peers:
            self._inbound.pop(peer, None)
            if peer != self.own.peer:
                self._seeds.renew(peer, None)

    def rejoin_candidates(self) -> list[PeerId]:
        """Seeds and lost peers that are not in the table, through which a healed partition is
        found."""
        candidates = dict.fromkeys((*self._seeds, *self._lost))
        return [peer for peer in candidates if self.table.contact_of(peer) is None]
