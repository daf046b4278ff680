"""The routing table: the package kademlia's, corrected, and without its clock and its event loop.

The only file that imports ``kademlia``, and imported only when a DHT is opened (the package brings
asyncio along and reads the clock). What is overridden, and why:

- Buckets read `time.monotonic` on every touch: here time is an argument.
- A full bucket starts an asyncio task to ping its oldest node: here `add` returns whom to ping.
- `find_neighbors` takes the first k nodes in bucket order, 30 % of them wrong: here the k nearest.
- `get_bucket_for` misplaces an id on a border, and a bucket's upper end lies one beyond the id space.
- The shared prefix is taken from bit strings of all nodes: here from the bucket's range.
- Those who wait for a place are five times as many as have one: here as many, which is enough for a
  bucket whose nodes all die at once.

And one address prefix has few places (`PER_BUCKET`, `PER_TABLE`): keys and stamps are cheap to one who
means to surround us, addresses in many networks are not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from p2p.dht.core.diversity import is_public, prefixes
from p2p.dht.stamp import ID_BYTES
from p2p.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from p2p.dht.messages import Contact
    from p2p.identity import PeerId
    from p2p.multiaddr import Multiaddr

try:
    from kademlia.node import Node
    from kademlia.routing import KBucket, RoutingTable
except ImportError as error:
    raise MissingDependency("the DHT needs the package kademlia: pip install kademlia") from error

_ID_BITS: Final = 8 * ID_BYTES
_SPLIT_DEPTH: Final = 5
"""Kademlia's b: branches away from us are split to this depth too, which saves a hop or two."""


PER_BUCKET: Final = 2
"""Contacts of one address prefix in one bucket: a tenth of it, as in go-libp2p-kad-dht's filter."""
PER_TABLE: Final = 10
"""Contacts of one address prefix in all: half a bucket of some 200 contacts at 10,000 nodes."""
MAX_TABLED: Final = 256
"""Bytes of a contact in the table: four IPv6 addresses take 139. We hand out twenty at a time, and contacts
of 1 KiB, four long names, would make each answer ten times as long as an honest one."""


class ContactNode(Node):  # type: ignore[misc]
    """A contact as the package sees it, and the address prefixes that it counts against."""

    def __init__(self, contact: Contact, groups: tuple[str, ...] = ()) -> None:
        super().__init__(contact.id)
        self.contact = contact
        self.groups = groups


class ContactBucket(KBucket):  # type: ignore[misc]
    """A bucket whose time is told to it. Nodes are in order of when they were last heard."""

    def __init__(self, low: int, high: int, ksize: int, looked_up: float) -> None:
        super().__init__(low, high, ksize, replacementNodeFactor=1)
        self.looked_up = looked_up

    def touch_last_updated(self) -> None:
        """The package's clock: not read. `ContactTable.touch` keeps the time."""

    def split(self) -> tuple[ContactBucket, ContactBucket]:
        """Two halves, each with its nodes and those who wait for a place among them."""
        low, high = self.range
        middle = (low + high) // 2
        halves = (
            ContactBucket(low, middle, self.ksize, self.looked_up),
            ContactBucket(middle + 1, high, self.ksize, self.looked_up),
        )
        for place, node in self.nodes.items():
            halves[node.long_id > middle].nodes[place] = node
        for place, node in self.replacement_nodes.items():
            halves[node.long_id > middle].replacement_nodes[place] = node
        return halves

    def depth(self) -> int:
        """How many leading bits all ids of this bucket share."""
        low, high = self.range
        return int(_ID_BITS - (high - low).bit_length())


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Whom we know, denser near ourselves: O(k log n) of n nodes.

    One place per peer: who comes back with another stamp moves. Who has a place keeps it until `remove`.
    """

    buckets: list[ContactBucket]

    def __init__(self, own: Contact, ksize: int) -> None:
        self._by_peer: dict[PeerId, ContactNode] = {}
        self._by_number: dict[int, ContactNode] = {}
        self._crowds: dict[str, int] = {}
        self.among_public = False
        """Whether we are on the public internet ourselves."""
        super().__init__(None, ksize, ContactNode(own))

    def flush(self) -> None:
        """Forget everybody."""
        self._by_peer = {}
        self._by_number = {}
        self._crowds = {}
        self.buckets = [ContactBucket(0, (1 << _ID_BITS) - 1, self.ksize, -math.inf)]

    def __len__(self) -> int:
        return len(self._by_peer)

    def live_at(self, addrs: Sequence[Multiaddr]) -> None:
        """Note where we are: on the public internet, those without a public address are one crowd."""
        self.among_public = is_public(addrs)

    def split_bucket(self, index: int) -> None:
        """Replace a bucket by its halves; who waits in a half that has room now gets a place."""
        super().split_bucket(index)
        for bucket in self.buckets[index : index + 2]:
            self._promote(bucket)

    def get_bucket_for(self, node: ContactNode) -> int:
        """The index of the bucket whose range holds ``node``."""
        return self._index(node.long_id)

    def _index(self, number: int) -> int:
        low, high = 0, len(self.buckets) - 1
        while low < high:
            middle = (low + high) // 2
            if number <= self.buckets[middle].range[1]:
                high = middle
            else:
                low = middle + 1
        return low

    def _bucket(self, number: int) -> ContactBucket:
        return self.buckets[self._index(number)]

    def would_take(self, contact: Contact) -> bool:
        """Whether a visitor is worth a question: there is a place for it, near us or where we know few.

        Elsewhere those whom our own lookups ask anyway fill the table. With a question to each visitor that
        has a place, a reading soon after a swarm of 200 has met cost 103 messages, not 76.
        """
        if self._is_own(contact) or not contact.addrs or len(contact.blob) > MAX_TABLED:
            return False
        bucket = self._bucket(contact.number)
        wanted = bucket.has_in_range(self.node) or len(bucket) < max(1, self.ksize // 4)
        return wanted and self._is_spread(self._node(contact), bucket)

    def add(self, contact: Contact) -> Contact | None:
        """Note that ``contact`` was heard just now. If its bucket is full, return who should be pinged:
        the node unheard for longest, which makes room if it stays silent.
        """
        known = self._by_peer.get(contact.peer)
        if known is not None and known.contact is contact:
            self._bucket(contact.number).nodes.move_to_end(known.id)
            return None
        if self._is_own(contact):
            return None
        if known is not None and known.contact.id == contact.id:
            self._change(known, contact)
            return None
        if known is not None:
            self.remove(known.contact)
        return self._enter(contact)

    def _change(self, known: ContactNode, contact: Contact) -> None:
        """A node says other addresses than before. Where its new ones are too many, it loses its place."""
        bucket = self._bucket(contact.number)
        self._take_out(bucket, known)
        node = self._node(contact)
        if contact.addrs and len(contact.blob) <= MAX_TABLED and self._is_spread(node, bucket):
            self._put_in(bucket, node)
        else:
            self._promote(bucket)

    def _enter(self, contact: Contact) -> Contact | None:
        if not contact.addrs or len(contact.blob) > MAX_TABLED:
            return None
        node = self._node(contact)
        bucket = self._bucket(contact.number)
        while len(bucket) >= self.ksize and self._may_split(bucket):
            self.split_bucket(self._index(contact.number))
            bucket = self._bucket(contact.number)
        if not self._is_spread(node, bucket):
            return None
        if len(bucket) < self.ksize:
            self._put_in(bucket, node)
            return None
        bucket.add_node(node)  # it waits for a place
        oldest: ContactNode = bucket.head()
        return oldest.contact

    def remove(self, contact: Contact) -> None:
        """Forget a node that does not answer; the newest of those that wait for a place takes its."""
        bucket = self._bucket(contact.number)
        bucket.replacement_nodes.pop(contact.id, None)
        known = bucket.nodes.get(contact.id)
        if known is not None:
            self._take_out(bucket, known)
            self._promote(bucket)

    def _is_own(self, contact: Contact) -> bool:
        return bool(contact.number == self.node.long_id or contact.peer == self.node.contact.peer)

    def _node(self, contact: Contact) -> ContactNode:
        return ContactNode(contact, prefixes(contact.addrs, among_public=self.among_public))

    def _may_split(self, bucket: ContactBucket) -> bool:
        return bool(bucket.has_in_range(self.node)) or bucket.depth() % _SPLIT_DEPTH != 0

    def _is_spread(self, node: ContactNode, bucket: ContactBucket) -> bool:
        """Whether no prefix of ``node`` has all the places that one prefix may have."""
        for group in node.groups:
            if self._crowds.get(group, 0) >= PER_TABLE:
                return False
            if sum(group in other.groups for other in bucket.nodes.values()) >= PER_BUCKET:
                return False
        return True

    def _put_in(self, bucket: ContactBucket, node: ContactNode) -> None:
        bucket.replacement_nodes.pop(node.id, None)
        bucket.nodes[node.id] = node
        self._by_peer[node.contact.peer] = node
        self._by_number[node.long_id] = node
        for group in node.groups:
            self._crowds[group] = self._crowds.get(group, 0) + 1

    def _take_out(self, bucket: ContactBucket, node: ContactNode) -> None:
        del bucket.nodes[node.id]
        del self._by_peer[node.contact.peer]
        del self._by_number[node.long_id]
        for group in node.groups:
            left = self._crowds.pop(group) - 1
            if left:
                self._crowds[group] = left

    def _promote(self, bucket: ContactBucket) -> None:
        """Give free places to those who wait, the newest first, one place per peer and few per prefix."""
        for node in list(reversed(bucket.replacement_nodes.values())):
            if len(bucket) >= self.ksize:
                return
            if node.contact.peer not in self._by_peer and self._is_spread(node, bucket):
                self._put_in(bucket, node)

    def contact_of(self, peer: PeerId) -> Contact | None:
        """What we know of ``peer``."""
        node = self._by_peer.get(peer)
        return None if node is None else node.contact

    def closest(self, target: int, count: int, exclude: PeerId | None = None) -> list[Contact]:
        """The ``count`` nearest contacts to ``target``, nearest first."""
        distances = sorted([number ^ target for number in self._by_number])[: count + 1]
        near = [self._by_number[distance ^ target].contact for distance in distances]
        return [contact for contact in near if contact.peer != exclude][:count]

    def find_neighbors(
        self, node: ContactNode, k: int | None = None, exclude: ContactNode | None = None
    ) -> list[ContactNode]:
        """The package's name for `closest`."""
        peer = None if exclude is None else exclude.contact.peer
        near = self.closest(node.long_id, (k or self.ksize) + 1, peer)
        return [ContactNode(contact) for contact in near if contact.number != node.long_id][: k or self.ksize]

    def touch(self, target: int, now: float) -> None:
        """Note that ``target`` was looked up, which refreshes its bucket."""
        self.buckets[self._index(target)].looked_up = now

    def stale_targets(self, before: float, rng: Random) -> list[int]:
        """One random id in each bucket where nothing was looked up since ``before``."""
        return [rng.randint(*bucket.range) for bucket in self.buckets if bucket.looked_up < before]
