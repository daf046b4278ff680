"""What this node itself has published, and when it has to say it again.

Each renewal is signed anew with a higher sequence number and a later expiry. Sequence numbers are wall
milliseconds, and at least one more than the last, so they grow over restarts and over clocks set back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p.dht.record import Record, sign_record
from p2p.errors import LimitExceeded
from p2p.identity import Signer

MAX_PUBLICATIONS: Final = 32
"""Records that one node keeps alive; under three keys, what others hold for it (`MAX_PER_PUBLISHER`)."""
RENEWALS: Final = 3
"""Renewals in a lifetime: two may fail before the record is gone."""


@dataclass(slots=True)
class _Publication:
    namespace: str
    name: bytes
    value: bytes
    lifetime: float
    due: float = -math.inf


class Publications:
    """The records we keep alive. ``interval`` is the most seconds between two renewals."""

    def __init__(self, signer: Signer, nonce: bytes, interval: float, seqno: int) -> None:
        self._signer = signer
        self._nonce = nonce
        self._interval = interval
        self._kept: dict[tuple[str, bytes], _Publication] = {}
        self.seqno = seqno

    @property
    def next_deadline(self) -> float:
        """When the next renewal is due."""
        return min((kept.due for kept in self._kept.values()), default=math.inf)

    def add(self, namespace: str, name: bytes, value: bytes, lifetime: float, *, own: bool = False) -> None:
        """Publish from now on, in place of what was published under this name.

        Raise `LimitExceeded`, but not for what we say of ourselves (``own``): there is one such record, and
        our addresses change when no caller is there to be told.
        """
        place = (namespace, name)
        if not own and place not in self._kept and len(self._kept) >= MAX_PUBLICATIONS:
            raise LimitExceeded(f"a node keeps at most {MAX_PUBLICATIONS} DHT records alive")
        self._kept[place] = _Publication(namespace, name, value, lifetime)

    def forget(self, namespace: str, name: bytes) -> None:
        """Let it expire."""
        self._kept.pop((namespace, name), None)

    def sign(self, namespace: str, name: bytes, wall: float, now: float) -> Record:
        """The next edition of one publication; the one after it is due before a third of its life is over."""
        kept = self._kept[(namespace, name)]
        kept.due = now + min(self._interval, kept.lifetime / RENEWALS)
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
        """Namespace and name of everything to be renewed."""
        return [place for place, kept in self._kept.items() if kept.due <= now]

    def retry(self, namespace: str, name: bytes, when: float) -> None:
        """Nobody took it: publish again at ``when``, if that is sooner than planned."""
        kept = self._kept.get((namespace, name))
        if kept is not None:
            kept.due = min(kept.due, when)

    def renew_all(self, now: float) -> None:
        """The swarm has changed (we have just joined it): publish everything again."""
        for kept in self._kept.values():
            kept.due = min(kept.due, now)
