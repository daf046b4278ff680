"""The routing table: the package kademlia's, corrected, and without its clock and its event loop.

The only file that imports ``kademlia``, and imported only when a DHT is opened (the package brings
asyncio along and reads the clock). What is overridden, and why:

- Buckets read `time.monotonic` on every touch: here time is an argument.
- A full bucket starts an asyncio task to ping its oldest node: here `add` returns whom to ping.
- `find_neighbors` takes the first k nodes in bucket order, 30 % of them wrong: here the k nearest.
- `get_bucket_for` misplaces an id on a border, and a bucket's upper end lies one beyond the id space.
- The shared prefix is taken from bit strings of all nodes: here from the bucket's range.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

from p2p.dht.stamp import ID_BYTES
from p2p.errors import MissingDependency

if TYPE_CHECKING:
    from random import Random

    from p2p.dht.messages import Contact
    from p2p.identity import PeerId

try:
    from kademlia.node import Node
    from kademlia.routing import KBucket, RoutingTable
except ImportError as error:
    raise MissingDependency("the DHT needs the package kademlia: pip install kademlia") from error

_ID_BITS: Final = 8 * ID_BYTES
_SPLIT_DEPTH: Final = 5
"""Kademlia's b: branches away from us are split to this depth too, which saves a hop or two."""


class ContactNode(Node):  # type: ignore[misc]
    """A contact as the package sees it."""

    def __init__(self, contact: Contact) -> None:
        super().__init__(contact.id)
        self.contact = contact


class ContactBucket(KBucket):  # type: ignore[misc]
    """A bucket whose time is told to it. Nodes are in order of when they were last heard."""

    def __init__(self, low: int, high: int, ksize: int, looked_up: float) -> None:
        super().__init__(low, high, ksize)
        self.looked_up = looked_up

    def touch_last_updated(self) -> None:
        """The package's clock: not read. `ContactTable.touch` keeps the time."""

    def split(self) -> tuple[ContactBucket, ContactBucket]:
        """Two halves; each keeps nodes first and waiting ones for what room is left."""
        low, high = self.range
        middle = (low + high) // 2
        halves = (
            ContactBucket(low, middle, self.ksize, self.looked_up),
            ContactBucket(middle + 1, high, self.ksize, self.looked_up),
        )
        for node in (*self.nodes.values(), *self.replacement_nodes.values()):
            halves[node.long_id > middle].add_node(node)
        return halves

    def depth(self) -> int:
        """How many leading bits all ids of this bucket share."""
        low, high = self.range
        return int(_ID_BITS - (high - low).bit_length())


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Whom we know, denser near ourselves: O(k log n) of n nodes.

    One place per peer: who comes back with another stamp moves.
    """

    buckets: list[ContactBucket]

    def __init__(self, own: Contact, ksize: int) -> None:
        self._by_peer: dict[PeerId, ContactNode] = {}
        super().__init__(None, ksize, ContactNode(own))

    def flush(self) -> None:
        """Forget everybody."""
        self._by_peer = {}
        self.buckets = [ContactBucket(0, (1 << _ID_BITS) - 1, self.ksize, -math.inf)]

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def split_bucket(self, index: int) -> None:
        """Replace a bucket by its halves. Who waited in it may have got a place: index everybody."""
        super().split_bucket(index)
        for bucket in self.buckets[index : index + 2]:
            for node in bucket.nodes.values():
                self._by_peer.setdefault(node.contact.peer, node)

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

    def add(self, contact: Contact) -> Contact | None:
        """Note that ``contact`` was heard just now. If its bucket is full, return who should be pinged:
        the node unheard for longest, which makes room if it stays silent.
        """
        if contact.number == self.node.long_id or contact.peer == self.node.contact.peer:
            return None
        known = self._by_peer.get(contact.peer)
        if known is not None and known.long_id != contact.number:
            self.remove(known.contact)
        node = known if known is not None and known.contact is contact else ContactNode(contact)
        bucket = self.buckets[self._index(contact.number)]
        while not bucket.add_node(node):
            if not bucket.has_in_range(self.node) and bucket.depth() % _SPLIT_DEPTH == 0:
                oldest: ContactNode = bucket.head()
                return oldest.contact
            self.split_bucket(self._index(contact.number))
            bucket = self.buckets[self._index(contact.number)]
        self._by_peer[contact.peer] = node
        self._index_promoted(bucket)
        return None

    def remove(self, contact: Contact) -> None:
        """Forget a node that does not answer; the newest of those that wait for a place takes its."""
        bucket = self.buckets[self._index(contact.number)]
        bucket.remove_node(ContactNode(contact))
        known = self._by_peer.get(contact.peer)
        if known is not None and known.long_id == contact.number:
            del self._by_peer[contact.peer]
        self._index_promoted(bucket)

    def _index_promoted(self, bucket: ContactBucket) -> None:
        """A node that came out of the waiting list is the newest of its bucket; index it."""
        if bucket.nodes:
            newest = next(reversed(bucket.nodes.values()))
            self._by_peer.setdefault(newest.contact.peer, newest)

    def contact_of(self, peer: PeerId) -> Contact | None:
        """What we know of ``peer``."""
        node = self._by_peer.get(peer)
        return None if node is None else node.contact

    def closest(self, target: int, count: int, exclude: PeerId | None = None) -> list[Contact]:
        """The ``count`` nearest contacts to ``target``, nearest first."""
        nodes = {node.long_id ^ target: node for bucket in self.buckets for node in bucket.nodes.values()}
        near = [nodes[distance].contact for distance in heapq.nsmallest(count + 1, nodes)]
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
