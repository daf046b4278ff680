"""What swarms of sans-I/O cores share: names, signatures that cost little, and time."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from p2p.identity import PeerId
from sim.kernel.queue import EventQueue, nanoseconds
from sim.kernel.trace import Trace


def peer_named(number: int) -> PeerId:
    return PeerId.from_public_key(hashlib.sha256(b"peer %d" % number).digest())


def _mac(peer: PeerId, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=peer.digest).digest()


class FakeSigner:
    """A signature is a keyed hash that anybody could make; attackers in tests are too honest
    to.
    """

    def __init__(self, peer: PeerId) -> None:
        self.peer_id = peer

    def sign(self, domain: str, payload: bytes) -> bytes:
        return _mac(self.peer_id, domain.encode() + b"\0" + payload)


def fake_verify(peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
    return _mac(peer, domain.encode() + b"\0" + payload) == signature


@dataclass
class Node:
    peer: PeerId
    core: Any
    alive: bool = True
    side: int = 0
    timer: float = math.inf
    sent: int = 0
    penalties: Counter[PeerId] = field(default_factory=Counter)
    events: list[tuple[float, Any]] = field(default_factory=list)


class Timeline:
    """The simulator's queue, for cores that need no more of it than time."""

    def __init__(self) -> None:
        self._queue = EventQueue(Trace())

    @property
    def now(self) -> float:
        return self._queue.now / 1e9

    def at(self, when: float, callback: Callable[[], None]) -> None:
        self._queue.schedule(nanoseconds(when), self._queue.kernel, "call", callback)

    def run(self, until: float) -> None:
        """Call what is due by then, and at that moment."""
        queue, limit = self._queue, nanoseconds(until)
        while (due := queue.next_due()) is not None and due <= limit:
            queue.run_next()
        queue.now = limit
