"""`RoutingTable`: the buckets of the package kademlia, with a table of our own.

The only file that imports ``kademlia``, and imported only when a DHT is opened: the package
brings asyncio along. Nodes, buckets and their replacement caches are the package's. The table
is not, since the package's starts an asyncio task to ping the oldest node of a full bucket
(here `add` returns the contact to ping), and its `find_neighbors` takes the first k nodes in
bucket order, 30 % of them wrong (here `closest` gives the k nearest). Two things of its bucket
are replaced: the shared prefix is taken from the bucket's range, not from bit strings of all
nodes; and the replacement cache is as large as the bucket, not five times as large, which is
enough when all of its nodes die at once.

And one address prefix has few places: keys and stamps are cheap for
an attacker that means to surround us, addresses in many networks are not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from random import Random

from p2p.dht.core.validation import is_public, prefixes
from p2p.dht.messages import Contact
from p2p.dht.stamp import ID_BYTES
from p2p.errors import MissingDependency
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

try:
    from kademlia import node as kademlia_node, routing
except ImportError as error:
    needed = "the DHT needs the package kademlia: pip install kademlia"
    raise MissingDependency(needed) from error


class ContactNode(kademlia_node.Node):  # type: ignore[misc]
    """Contact in the form that the package needs, with the address prefixes that it counts
    against."""

    def __init__(self, contact: Contact, groups: tuple[str, ...] = ()) -> None:
        super().__init__(contact.id)
        self.contact = contact
        self.groups = groups


class KBucket(routing.KBucket):  # type: ignore[misc]
    """Bucket that is given the time as an argument. Its nodes are in the order in which they
    were last heard."""

    def __init__(self, low: int, high: int, ksize: int, looked_up: float) -> None:
        super().__init__(low, high, ksize, replacementNodeFactor=1)
        self.looked_up = looked_up
        """Time of the last lookup of an id in its range."""

    def split(self) -> tuple[KBucket, KBucket]:
        """Return two halves, each with its nodes and its replacement cache."""
        low, high = self.range
        middle = (low + high) // 2
        halves = (
            KBucket(low, middle, self.ksize, self.looked_up),
            KBucket(middle + 1, high, self.ksize, self.looked_up),
        )
        for place, node in self.nodes.items():
            halves[node.long_id > middle].nodes[place] = node
        for place, node in self.replacement_nodes.items():
            halves[node.long_id > middle].replacement_nodes[place] = node
        return halves

    def depth(self) -> int:
        """Return the number of leading bits that all ids of this bucket share; 0 for the whole
        id space."""
        low, high = self.range
        return int(8 * ID_BYTES - (high - low).bit_length())


class RoutingTable:
    """Contacts of this node, denser near its own id: O(k log n) of n nodes.

    A peer has one place: if it comes back with another stamp, it moves. It keeps its place
    until `remove`.
    """

    def __init__(self, own: Contact, ksize: int) -> None:
        self.node = ContactNode(own)
        self.ksize = ksize
        self.buckets = [KBucket(0, (1 << 8 * ID_BYTES) - 1, ksize, -math.inf)]
        self.among_public = False
        """True if this node has a public address."""
        self._by_peer: dict[PeerId, ContactNode] = {}
        self._by_number: dict[int, ContactNode] = {}
        self._group_sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_peer)

    def move(self, addrs: Sequence[Multiaddr]) -> None:
        """Note this node's own addresses. If one is public, peers without a public address are
        one group."""
        self.among_public = is_public(addrs)

    def _index(self, number: int) -> int:
        """Return the index of the bucket for ``number``. The buckets are in order and without
        gaps."""
        return bisect_left(self.buckets, number, key=lambda bucket: bucket.range[1])

    def _bucket(self, number: int) -> KBucket:
        return self.buckets[self._index(number)]

    def would_take(self, contact: Contact) -> bool:
        """Return True if a peer that has asked us something should be pinged. There must be a
        place for it, near our own id or in a bucket with few contacts.

        Elsewhere the contacts that our own lookups ask fill the table anyway. With a ping to
        each peer that there is a place for, a get soon after a swarm of 200 had met cost 103
        messages, not 76.
        """
        if self._is_own(contact) or not self._is_dialable(contact):
            return False
        bucket = self._bucket(contact.number)
        wanted = bucket.has_in_range(self.node) or len(bucket) < max(1, self.ksize // 4)
        return wanted and self._is_spread(self._node(contact), bucket)

    def add(self, contact: Contact) -> Contact | None:
        """Note that ``contact`` answered just now. If its bucket is full, return the contact to
        ping, which is the one not heard for longest. It loses its place if it does not
        answer."""
        known = self._by_peer.get(contact.peer)
        if known is not None and known.contact is contact:
            self._bucket(contact.number).nodes.move_to_end(known.id)
            return None
        if self._is_own(contact):
            return None
        node, bucket = self._node(contact), self._bucket(contact.number)
        is_dialable = self._is_dialable(contact)
        if known is not None and known.contact.id == contact.id:
            # Other addresses than before: if their prefix has all its places, the node loses
            # its own.
            self._take_out(bucket, known)
            if is_dialable and self._is_spread(node, bucket):
                self._put_in(bucket, node)
            else:
                self._promote(bucket)
            return None
        if known is not None:
            self.remove(known.contact)
        if not is_dialable:
            return None
        # Kademlia's b is 5: branches away from us are split to this depth too, which saves a
        # hop or two.
        while len(bucket) >= self.ksize and (
            bucket.has_in_range(self.node) or bucket.depth() % 5
        ):
            index = self._index(contact.number)
            self.buckets[index : index + 1] = halves = bucket.split()
            for half in halves:
                self._promote(half)
            bucket = self._bucket(contact.number)
        if not self._is_spread(node, bucket):
            return None
        if len(bucket) < self.ksize:
            self._put_in(bucket, node)
            return None
        bucket.add_node(node)  # into the replacement cache
        oldest: ContactNode = bucket.head()
        return oldest.contact

    def remove(self, contact: Contact) -> None:
        """Remove a node that does not answer. The newest replacement takes its place."""
        bucket = self._bucket(contact.number)
        bucket.replacement_nodes.pop(contact.id, None)
        known = bucket.nodes.get(contact.id)
        if known is not None:
            self._take_out(bucket, known)
            self._promote(bucket)

    def _is_own(self, contact: Contact) -> bool:
        own = self.node
        return bool(contact.number == own.long_id or contact.peer == own.contact.peer)

    def _is_dialable(self, contact: Contact) -> bool:
        """Return True if the contact has addresses, and is short. Four IPv6 addresses take 139
        bytes. An answer has twenty contacts, and contacts of 1 KiB with four long names would
        make it ten times as long as an honest one."""
        return bool(contact.addrs) and len(contact.blob) <= 256

    def _node(self, contact: Contact) -> ContactNode:
        return ContactNode(contact, prefixes(contact.addrs, among_public=self.among_public))

    def _is_spread(self, node: ContactNode, bucket: KBucket) -> bool:
        """Return True if no prefix of ``node`` has reached its limit."""
        for group in node.groups:
            # Maximum number of contacts of one address prefix in the table. A table has some
            # 200 contacts at 10,000 nodes.
            if self._group_sizes[group] >= 10:
                return False
            # Maximum number of contacts of one address prefix in one bucket: a tenth of it, as
            # in the filter of go-libp2p-kad-dht.
            if sum(group in other.groups for other in bucket.nodes.values()) >= 2:
                return False
        return True

    def _put_in(self, bucket: KBucket, node: ContactNode) -> None:
        bucket.replacement_nodes.pop(node.id, None)
        bucket.nodes[node.id] = node
        self._by_peer[node.contact.peer] = node
        self._by_number[node.long_id] = node
        for group in node.groups:
            self._group_sizes[group] += 1

    def _take_out(self, bucket: KBucket, node: ContactNode) -> None:
        del bucket.nodes[node.id]
        del self._by_peer[node.contact.peer]
        del self._by_number[node.long_id]
        for group in node.groups:
            self._group_sizes[group] -= 1
            if not self._group_sizes[group]:
                del self._group_sizes[group]

    def _promote(self, bucket: KBucket) -> None:
        """Give free places to replacements, the newest first, within the limits for peers and
        prefixes."""
        for node in list(reversed(bucket.replacement_nodes.values())):
            if len(bucket) >= self.ksize:
                return
            if node.contact.peer not in self._by_peer and self._is_spread(node, bucket):
                self._put_in(bucket, node)

    def contact_of(self, peer: PeerId) -> Contact | None:
        """Return the contact of ``peer`` in the table, or None if it has no place."""
        node = self._by_peer.get(peer)
        return None if node is None else node.contact

    def closest(
        self, target: bytes, count: int, exclude: PeerId | None = None
    ) -> list[Contact]:
        """Return the ``count`` nearest contacts to ``target``, nearest first."""
        place = int.from_bytes(target, "big")
        distances = sorted([number ^ place for number in self._by_number])[: count + 1]
        near = [self._by_number[distance ^ place].contact for distance in distances]
        return [contact for contact in near if contact.peer != exclude][:count]

    def touch(self, target: int, now: float) -> None:
        """Note that ``target`` was looked up, which refreshes its bucket."""
        self._bucket(target).looked_up = now

    def stale_targets(self, before: float, rng: Random) -> list[int]:
        """Return a random id in each bucket without a lookup since ``before``."""
        stale = [bucket for bucket in self.buckets if bucket.looked_up < before]
        return [rng.randint(*bucket.range) for bucket in stale]
