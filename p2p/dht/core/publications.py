"""The records that this node publishes, and when each has to be republished.

Each republished record is signed anew with a higher sequence number and a later expiry.
Sequence numbers are wall milliseconds, and at least one more than the last, so they grow over
restarts and over clocks set back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.dht.record import Record, sign_record
from p2p.errors import LimitExceeded
from p2p.identity import Signer

MAX_PUBLICATIONS: Final = 32
"""Records that one node publishes; under three keys, all that others hold for it
(`MAX_PER_PUBLISHER`)."""
REPUBLISHED: Final = 3
"""Times that a record is republished in its lifetime: two may fail before the record is
gone."""


@dataclass(slots=True)
class _Publication:
    namespace: str
    name: bytes
    value: bytes
    lifetime: float
    due: float = -math.inf


class Publications:
    """What this node publishes. ``interval`` is the most seconds between two times; a third of
    the lifetime if that is less."""

    def __init__(self, signer: Signer, nonce: bytes, interval: float, seqno: int) -> None:
        self._signer = signer
        self._nonce = nonce
        self._interval = interval
        self._kept: dict[tuple[str, bytes], _Publication] = {}
        self.seqno = seqno
        """The highest sequence number signed."""

    @property
    def next_deadline(self) -> float:
        """When the next record is due."""
        return min((kept.due for kept in self._kept.values()), default=math.inf)

    def add(
        self, namespace: str, name: bytes, value: bytes, lifetime: float, *, own: bool = False
    ) -> None:
        """Publish from now on, in place of what was published under this name.

        Raise `LimitExceeded` beyond `MAX_PUBLICATIONS`, but not for our own address record
        (``own``): there is one, and our addresses change when no caller is there to be told.
        """
        place = (namespace, name)
        if not own and place not in self._kept and len(self._kept) >= MAX_PUBLICATIONS:
            raise LimitExceeded(f"a node keeps at most {MAX_PUBLICATIONS} DHT records alive")
        self._kept[place] = _Publication(namespace, name, value, lifetime)

    def forget(self, namespace: str, name: bytes) -> None:
        """Republish no more; the record expires by itself."""
        self._kept.pop((namespace, name), None)

    def sign(self, namespace: str, name: bytes, wall: float, now: float) -> Record:
        """The record with the next sequence number; it is due again before a third of its
        lifetime is over."""
        kept = self._kept[(namespace, name)]
        kept.due = now + min(self._interval, kept.lifetime / REPUBLISHED)
        self.seqno = max(self.seqno + 1, int(wall * 1000))
        unsigned = Record(
            namespace,
            name,
            self._signer.peer_id,
            self._nonce,
            self.seqno,
            math.ceil(wall + kept.lifetime),
            kept.value,
            b"",
        )
        return sign_record(unsigned, self._signer)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """Namespace and name of each record to be republished."""
        return [place for place, kept in self._kept.items() if kept.due <= now]

    def retry(self, namespace: str, name: bytes, when: float) -> None:
        """No node took it: republish at ``when``, if that is sooner than planned."""
        kept = self._kept.get((namespace, name))
        if kept is not None:
            kept.due = min(kept.due, when)

    def republish_all(self, now: float) -> None:
        """We have just joined a swarm that holds nothing of ours: republish everything."""
        for kept in self._kept.values():
            kept.due = min(kept.due, now)
