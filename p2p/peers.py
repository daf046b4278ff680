"""What a host remembers of peers: where they may be dialled, and how they behaved. No I/O."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

MAX_ADDRS: Final = 8
"""Addresses kept per peer: two families, public and private, now and before the last move."""
MAX_PEERS: Final = 10_000
"""Peers whose addresses, or scores, are kept: the largest run we simulate. About 1 KiB each; the one
touched longest ago goes first."""

_MEMO: Final = 4096
"""Lists of addresses remembered: peers say the same for hours. 1 MiB at most."""

PENALTY_LIMIT: Final = 100.0
"""Points at which a peer is disconnected and refused."""
PENALTY_HALF_LIFE: Final = 60.0
"""Seconds in which half of the points are forgotten: a bad minute does not follow a peer for hours."""
REFUSAL: Final = 300.0
"""Seconds for which a peer that reached the limit is refused: five times as long as it takes to forgive."""
VIOLATION: Final = 67.0
"""Points for breaking a protocol: the second time within a minute (67 / 2 + 67 > 100) is one too many."""


class AddressBook:
    """Hints where peers are, newest first, a few per peer, for a bounded number of peers."""

    __slots__ = ("_addrs",)

    def __init__(self) -> None:
        self._addrs: dict[PeerId, tuple[Multiaddr, ...]] = {}

    def add(self, peer: PeerId, addrs: Sequence[Multiaddr]) -> bool:
        """Remember; returns whether one of them is new."""
        known = self._addrs.get(peer, ())
        fresh = _places(peer, tuple(addrs))
        if fresh is known and len(self._addrs) < MAX_PEERS // 2:
            return False  # what nearly all say, and nobody need go soon: who was touched last is no matter
        kept = tuple(addr for addr in known if addr not in fresh)
        both = (*fresh, *kept)[:MAX_ADDRS] if kept else fresh
        self._addrs.pop(peer, None)
        if both:
            self._addrs[peer] = both
        if len(self._addrs) > MAX_PEERS:
            del self._addrs[next(iter(self._addrs))]
        return any(addr not in known for addr in both)

    def forget(self, peer: PeerId, addr: Multiaddr) -> None:
        """Somebody else answers there."""
        place = addr.transport
        self._addrs[peer] = tuple(known for known in self._addrs.get(peer, ()) if known != place)

    def of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Where ``peer`` was last said to be, newest first, without ``/p2p/``."""
        return self._addrs.get(peer, ())


@functools.lru_cache(_MEMO)
def _places(peer: PeerId, addrs: tuple[Multiaddr, ...]) -> tuple[Multiaddr, ...]:
    """Where ``addrs`` say that ``peer`` is, at most `MAX_ADDRS`; one tuple for all books that hold it."""
    places = dict.fromkeys(addr.transport for addr in addrs if addr.peer_id in (None, peer))
    return tuple(places)[:MAX_ADDRS]


@dataclass(slots=True)
class _Record:
    points: float
    at: float
    refused_until: float = -math.inf


class Scores:
    """Penalty points that fade, refusals that end, bans that do not."""

    __slots__ = ("_banned", "_records")

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}
        self._banned: dict[PeerId, None] = {}

    def penalise(self, peer: PeerId, points: float, now: float) -> bool:
        """Add ``points``; True if the peer is to be disconnected and refused from now on."""
        record = self._records.pop(peer, None) or _Record(0.0, now)
        record.points = self._faded(record, now) + points
        record.at = now
        self._records[peer] = record
        if len(self._records) > MAX_PEERS:
            del self._records[next(iter(self._records))]
        if record.points < PENALTY_LIMIT:
            return False
        record.refused_until = now + REFUSAL
        return True

    def points(self, peer: PeerId, now: float) -> float:
        """What is left of a peer's penalty points."""
        record = self._records.get(peer)
        return self._faded(record, now) if record else 0.0

    def ban(self, peer: PeerId) -> None:
        """Refuse for good."""
        self._banned[peer] = None

    def is_refused(self, peer: PeerId, now: float) -> bool:
        """Whether connections to and from ``peer`` are unwelcome."""
        record = self._records.get(peer)
        return peer in self._banned or (record is not None and now < record.refused_until)

    def _faded(self, record: _Record, now: float) -> float:
        return record.points * math.exp2((record.at - now) / PENALTY_HALF_LIFE)
