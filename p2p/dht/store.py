"""The records that one node holds for others, and what it refuses to hold.

Whoever is first keeps the place: a full key or a full publisher turns newcomers away, since every
identity costs a work stamp and refreshing what is there must always succeed. A full node makes room by
dropping what lies farthest from it, which other nodes are nearer to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Final

from p2p.dht.messages import MAX_RECORDS, MAX_VALUES_BYTES
from p2p.dht.record import CLOCK_TOLERANCE, Record
from p2p.identity import PeerId

MAX_PUBLISHERS: Final = MAX_RECORDS
"""Records under one key: they fit into one answer. A larger membership is found hop by hop from these."""
MAX_PER_PUBLISHER: Final = 64
"""Records of one publisher on one node. A publisher has a handful, and a node gets few of those."""
MAX_HELD: Final = 16 * 1024
"""Records of one node: 24 MiB at their largest."""
_ROOM: Final = MAX_HELD // 16
"""Records dropped at once when the node is full, so that sorting pays."""


class Holding(Enum):
    """What became of a record."""

    NEW = "new"
    KNOWN = "known"
    """We hold this one."""
    OLDER = "older"
    """We hold a newer one of this publisher."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class _Held:
    record: Record
    blob: bytes
    drop_at: float


class RecordStore:
    """Records by key and publisher. Judging them is the caller's duty; time is monotonic."""

    def __init__(self, own: int, limit: int = MAX_HELD) -> None:
        self._own = own
        self._limit = limit
        self._keys: dict[bytes, dict[PeerId, _Held]] = {}
        self._per_publisher: dict[PeerId, int] = {}
        self._expiry: list[tuple[float, bytes, PeerId]] = []
        self._refreshed: dict[bytes, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def next_deadline(self) -> float:
        """When the next record may have to be dropped."""
        return self._expiry[0][0] if self._expiry else math.inf

    def holds(self, key: bytes, blob: bytes, publisher: PeerId) -> bool:
        """Whether exactly this encoded record is here (and therefore judged)."""
        held = self._keys.get(key, {}).get(publisher)
        return held is not None and held.blob == blob

    def put(self, key: bytes, record: Record, blob: bytes, wall: float, now: float) -> Holding:
        """Hold a judged record until it expires."""
        held = self._keys.get(key, {}).get(record.publisher)
        if held is not None:
            if held.record.rank >= record.rank:
                same = held.blob == blob
                if same:
                    self._refreshed[key] = now
                return Holding.KNOWN if same else Holding.OLDER
        elif not self._has_room(key, record.publisher):
            return Holding.FULL
        else:
            self._count += 1
            self._per_publisher[record.publisher] = self._per_publisher.get(record.publisher, 0) + 1
        drop_at = now + record.expires - wall + CLOCK_TOLERANCE
        self._keys.setdefault(key, {})[record.publisher] = _Held(record, blob, drop_at)
        self._refreshed[key] = now
        heappush(self._expiry, (drop_at, key, record.publisher))
        if len(self._expiry) > 2 * self._count + _ROOM:
            self._compact()
        return Holding.NEW

    def _compact(self) -> None:
        """Forget the old expiries of records that were renewed, so that renewing often costs no memory."""
        self._expiry = [
            (held.drop_at, key, publisher)
            for key, publishers in self._keys.items()
            for publisher, held in publishers.items()
        ]
        heapify(self._expiry)

    def _has_room(self, key: bytes, publisher: PeerId) -> bool:
        if len(self._keys.get(key, ())) >= MAX_PUBLISHERS:
            return False
        if self._per_publisher.get(publisher, 0) >= MAX_PER_PUBLISHER:
            return False
        return self._count < self._limit or self._make_room(key)

    def _distance(self, key: bytes) -> int:
        return int.from_bytes(key, "big") ^ self._own

    def _make_room(self, key: bytes) -> bool:
        """Drop the farthest keys, unless ``key`` would be among them."""
        farthest = sorted(self._keys, key=self._distance, reverse=True)
        goal = self._count - max(1, min(_ROOM, self._limit // 16))
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
        left = self._per_publisher.pop(publisher) - 1
        if left:
            self._per_publisher[publisher] = left
        if not self._keys[key]:
            del self._keys[key]
            self._refreshed.pop(key, None)

    def get(self, key: bytes) -> list[Record]:
        """Every record under ``key``."""
        return [held.record for held in self._keys.get(key, {}).values()]

    def blobs(self, key: bytes) -> tuple[bytes, ...]:
        """Every encoded record under ``key`` that fits into one answer, latest expiry first."""
        newest = sorted(
            self._keys.get(key, {}).values(), key=lambda held: (-held.record.expires, held.record.publisher)
        )
        room = MAX_VALUES_BYTES
        taken: list[bytes] = []
        for held in newest:
            room -= len(held.blob)
            if room < 0:
                break
            taken.append(held.blob)
        return tuple(taken)

    def expire(self, now: float) -> None:
        """Drop what is past its time."""
        while self._expiry and self._expiry[0][0] <= now:
            _, key, publisher = heappop(self._expiry)
            held = self._keys.get(key, {}).get(publisher)
            if held is not None and held.drop_at <= now:
                self._drop(key, publisher)

    def unrefreshed(self, before: float, limit: int) -> list[bytes]:
        """Up to ``limit`` keys that nobody has stored here since ``before``. They count as refreshed now
        only once something is stored again, or `note_refreshed` says so.
        """
        stale = (key for key, at in self._refreshed.items() if at < before)
        return [key for key, _ in zip(stale, range(limit), strict=False)]

    def note_refreshed(self, key: bytes, now: float) -> None:
        """Note that we have handed ``key``'s records on ourselves."""
        if key in self._refreshed:
            self._refreshed[key] = now
