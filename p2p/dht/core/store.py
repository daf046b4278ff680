"""`RecordStore`: the records that one node holds for others, and which it refuses to hold.

A full key
----------
Places under a key are few, and they must not go to the publishers that come first: 64 names,
half a minute of work for their stamps, would hold a key for as long as they renew their
records. So of all publishers that come to a full key, a node keeps the 64 that a keyed hash,
with a secret of its own, ranks lowest. That is a fair sample, another one on each of the 24
nodes that hold a name, and the same for an attacker as for a member. 64 squatters take half of
the places from 64 members and hide none; to hold all places of one node against n members takes
about 64 (n + 1) stamps. One address prefix gets a quarter of the places, and a reserved record
(of an officer of a run that this node takes part in) is kept whatever others do.

A full node
-----------
Room is made at the cost of the publisher with the most records, since names are chosen for
free, and nothing more is taken of a publisher that has as many as the others. When all have
one, a publisher's first record evicts the keys farthest from the node, which other nodes are
nearer to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final

from p2p.dht.core.validation import CLOCK_TOLERANCE, RecordPriority
from p2p.dht.messages import MAX_RECORDS, MAX_VALUES_BYTES
from p2p.dht.record import Record
from p2p.identity import PeerId

MAX_PER_PUBLISHER: Final = 96
"""Maximum number of records of one publisher on one node: all that it publishes, 32 under three
keys, in a swarm so small that every node holds everything."""
MAX_HELD: Final = 16 * 1024
"""Maximum number of records on one node, 24 MiB at their largest. If every node publishes its
maximum, 32 records under three keys with eight replicas, each node holds 768 of them."""


@dataclass(frozen=True, slots=True)
class _StoredRecord:
    record: Record
    blob: bytes
    drop_at: float
    priority: RecordPriority


class RecordStore:
    """Records by key and publisher. The caller validates them first; ``now`` is monotonic
    time."""

    def __init__(self, own: int, limit: int = MAX_HELD, secret: bytes = b"") -> None:
        """Create an empty store. ``own`` is our DHT id as a number, and ``secret`` the key of
        the hash that ranks publishers."""
        self._own = own
        self._limit = limit
        self._secret = secret
        self._keys: dict[bytes, dict[PeerId, _StoredRecord]] = {}
        self._by_publisher: dict[PeerId, dict[bytes, None]] = {}
        self._by_count: list[dict[PeerId, None]] = [{} for _ in range(MAX_PER_PUBLISHER + 1)]
        """Publishers by their number of records; the index is that number."""
        self._expiry: list[tuple[float, bytes, PeerId]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def next_deadline(self) -> float:
        """Time at which the next record may expire."""
        return self._expiry[0][0] if self._expiry else math.inf

    def holds(self, key: bytes, blob: bytes, publisher: PeerId) -> bool:
        """Return True if exactly this encoded record is held, and was thus validated."""
        held = self._keys.get(key, {}).get(publisher)
        return held is not None and held.blob == blob

    def put(
        self,
        key: bytes,
        record: Record,
        blob: bytes,
        wall: float,
        now: float,
        priority: RecordPriority,
    ) -> bool:
        """Store a valid record until it expires, unless a newer one of its publisher is held.
        Return False if there is no place for it."""
        publisher = record.publisher
        held = self._keys.get(key, {}).get(publisher)
        if held is not None and held.record.rank >= record.rank:
            return True
        evicted = self._evicted(key, publisher, priority)
        if evicted is None or (held is None and not self._has_room(key, publisher)):
            return False
        for peer in evicted:
            self._drop(key, peer)
        if held is None:
            self._count += 1
            keys = self._by_publisher.setdefault(publisher, {})
            self._by_count[len(keys)].pop(publisher, None)
            keys[key] = None
            self._by_count[len(keys)][publisher] = None
        drop_at = now + record.expires - wall + CLOCK_TOLERANCE
        stored = _StoredRecord(record, blob, drop_at, priority)
        self._keys.setdefault(key, {})[publisher] = stored
        heappush(self._expiry, (drop_at, key, publisher))
        if len(self._expiry) > 2 * self._count + 1024:
            self._compact()
        return True

    def _evicted(
        self, key: bytes, publisher: PeerId, priority: RecordPriority
    ) -> list[PeerId] | None:
        """Return the publishers whose records a record of ``publisher`` evicts under ``key``,
        or None if there is no place for it.

        The publisher with the highest rank is evicted, first in each full address prefix of
        ``publisher``, else under the whole key. If the newcomer ranks higher still, it has no
        place.
        """
        under_key = self._keys.get(key, {})
        others = [(peer, held.priority) for peer, held in under_key.items()]
        others = [(peer, theirs) for peer, theirs in others if peer != publisher]
        evicted: dict[PeerId, None] = {}
        unreserved = [(peer, theirs) for peer, theirs in others if not theirs.reserved]
        for group in () if priority.reserved else priority.groups:
            crowd = [peer for peer, theirs in unreserved if group in theirs.groups]
            # A quarter of the places. An attacker then needs four networks to fill the key, and
            # a laboratory of sixteen machines behind one address fits.
            if len(crowd) >= 16:
                evicted[max(crowd, key=self._rank)] = None
        # All records fit into one answer. A larger membership is found hop by hop from these.
        if not evicted and len(others) >= MAX_RECORDS:
            crowd = [peer for peer, _ in unreserved]
            if not crowd:
                return None
            evicted[max(crowd, key=self._rank)] = None
        rank = b"" if priority.reserved else self._rank(publisher)
        return None if any(self._rank(peer) < rank for peer in evicted) else list(evicted)

    def _rank(self, publisher: PeerId) -> bytes:
        """Return the rank of a publisher on this node. The rank is secret, so that nobody can
        create a name that ranks low."""
        return blake2b(publisher.digest, digest_size=8, key=self._secret).digest()

    def _compact(self) -> None:
        """Forget the old expiries of renewed records, so that frequent renewals cost no
        memory."""
        self._expiry = [
            (held.drop_at, key, publisher)
            for key, publishers in self._keys.items()
            for publisher, held in publishers.items()
        ]
        heapify(self._expiry)

    def _has_room(self, key: bytes, publisher: PeerId) -> bool:
        share = len(self._by_publisher.get(publisher, ())) + 1
        if share > MAX_PER_PUBLISHER:
            return False
        if self._count < self._limit or self._take_from_most(share):
            return True
        return share == 1 and self._make_room(key)

    def _take_from_most(self, share: int) -> bool:
        """Drop the farthest record of a publisher with more than ``share`` records. Return
        False if there is none."""
        for count in range(MAX_PER_PUBLISHER, share, -1):
            if self._by_count[count]:
                most = next(iter(self._by_count[count]))
                self._drop(max(self._by_publisher[most], key=self._distance), most)
                return True
        return False

    def _distance(self, key: bytes) -> int:
        return int.from_bytes(key, "big") ^ self._own

    def _make_room(self, key: bytes) -> bool:
        """Drop the farthest keys, unless ``key`` would be among them, and return True if there
        is room."""
        farthest = sorted(self._keys, key=self._distance, reverse=True)
        # All keys are sorted by distance once for 1,024 records, not for each.
        goal = self._count - max(1, self._limit // 16)
        distance = self._distance(key)
        for candidate in farthest:
            if self._count <= goal or self._distance(candidate) <= distance:
                break
            for publisher in list(self._keys[candidate]):
                self._drop(candidate, publisher)
        return self._count < self._limit

    def _drop(self, key: bytes, publisher: PeerId) -> None:
        del self._keys[key][publisher]
        self._count -= 1
        keys = self._by_publisher[publisher]
        del self._by_count[len(keys)][publisher]
        del keys[key]
        if keys:
            self._by_count[len(keys)][publisher] = None
        else:
            del self._by_publisher[publisher]
        if not self._keys[key]:
            del self._keys[key]

    def get(self, key: bytes) -> list[Record]:
        """Return all records under ``key``."""
        return [held.record for held in self._keys.get(key, {}).values()]

    def blobs(self, key: bytes) -> tuple[bytes, ...]:
        """Return the encoded records under ``key`` that fit into one answer. Reserved records
        come first, then the shortest, so that long records displace only themselves."""

        def order(held: _StoredRecord) -> tuple[bool, int, PeerId]:
            return not held.priority.reserved, len(held.blob), held.record.publisher

        blobs = [held.blob for held in sorted(self._keys.get(key, {}).values(), key=order)]
        fit = sum(size <= MAX_VALUES_BYTES for size in accumulate(map(len, blobs)))
        return tuple(blobs[:fit])

    def expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            _, key, publisher = heappop(self._expiry)
            held = self._keys.get(key, {}).get(publisher)
            if held is not None and held.drop_at <= now:
                self._drop(key, publisher)
