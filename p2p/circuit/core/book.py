"""Reservations and circuits that a relay has granted, and which of them make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from p2p.bounded import BoundedDict, RateLimit
from p2p.circuit.messages import HopStatus, Limit
from p2p.door import check_fields
from p2p.identity import PeerId
from p2p.wire import KI, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """How much a node relays for others."""

    reservations: int = 128
    per_network: int = 32
    """Reservations of one network (/24, /48)."""
    lifetime: float = 3600.0
    """Seconds of a reservation; clients renew it."""
    circuits: int = 128
    per_peer: int = 16
    """Circuits of one peer, at either end."""
    seconds: int = 600
    """Seconds that one circuit lives."""
    bytes: int = 4 * MIB
    """Bytes that one circuit carries in each direction."""
    rate: int = 64 * KI
    """Bytes a second that one circuit carries in each direction."""
    total_rate: int = MIB
    """Bytes a second that all circuits together carry."""
    request_rate: float = 0.4
    """Requests a second that one peer may make in the long run, and 20 times as many at
    once. Our own client makes one an hour, and one for each peer that it dials."""
    strangers: bool = False
    """True if peers that are not members of the run may have reservations."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.reservations, self.circuits, self.per_peer, self.per_network) < 1:
            raise ValueError("a relay has room for at least one reservation and one circuit")
        if min(self.seconds, self.bytes, self.rate, self.total_rate) < 1 or self.lifetime < 1:
            raise ValueError("a circuit has at least a second, a byte, and a byte a second")

    @property
    def limit(self) -> Limit:
        """Limit of a circuit, as peers are told."""
        return Limit(self.seconds, self.bytes)


@dataclass(slots=True)
class _Reservation:
    expires: float
    network: str
    is_member: bool


class RelayBook:
    """The reservations and circuits of one relay. Times are those of one monotonic clock."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._reserved: dict[PeerId, _Reservation] = {}
        """Oldest first."""
        self._aborts: dict[PeerId, list[tuple[PeerId, Callable[[], None]]]] = {}
        """Target of each circuit and what ends it, by the peer that asked for it, oldest
        first."""
        self._circuits: Counter[PeerId] = Counter()
        """Circuits by peer. A circuit counts for both of its ends."""
        self._requests: BoundedDict[PeerId, RateLimit] = BoundedDict(4096)

    @property
    def reserved(self) -> tuple[PeerId, ...]:
        """Peers with a reservation."""
        return tuple(self._reserved)

    @property
    def circuits(self) -> int:
        """Circuits that are open or being opened."""
        return self._circuits.total() // 2

    def reserve(self, peer: PeerId, network: str, now: float, *, is_member: bool) -> HopStatus:
        """Grant or renew a reservation.

        When the book is full, a member takes the place of the newest stranger. Without
        strangers the network with the most reservations loses its newest one, unless it is the
        network of the new member.
        """
        if not (is_member or self._config.strangers):
            return HopStatus.PERMISSION_DENIED
        if not self._may_ask(peer, now):
            return HopStatus.RESERVATION_REFUSED
        for other in [one for one, it in self._reserved.items() if it.expires <= now]:
            del self._reserved[other]
        known = self._reserved.pop(peer, None)
        networks = Counter(one.network for one in self._reserved.values() if one.network)
        is_crowded = network != "" and networks[network] >= self._config.per_network
        if known is None and (is_crowded or not self._make_room(network, networks, is_member)):
            return HopStatus.RESERVATION_REFUSED
        expires = now + self._config.lifetime
        self._reserved[peer] = _Reservation(expires, network, is_member)
        return HopStatus.OK

    def _make_room(self, network: str, networks: Counter[str], is_member: bool) -> bool:
        if len(self._reserved) < self._config.reservations:
            return True
        if not is_member:
            return False
        newest = reversed(self._reserved.items())
        victim = next((peer for peer, one in newest if not one.is_member), None)
        if victim is None and networks:
            ((crowd, _),) = networks.most_common(1)
            if networks[network] < networks[crowd] - 1:
                newest = reversed(self._reserved.items())
                victim = next(peer for peer, one in newest if one.network == crowd)
        if victim is None:
            return False
        del self._reserved[victim]
        return True

    def lost(self, peer: PeerId) -> None:
        """End the reservation of a peer without a connection."""
        self._reserved.pop(peer, None)

    def connect(
        self, source: PeerId, target: PeerId, now: float, abort: Callable[[], None]
    ) -> HopStatus:
        """Count a circuit if it is allowed. The caller must call `end` for it.

        When there are too many, in all or to this target, the newest of them of the peer that
        asked for most is aborted, if that peer has more of them than the new circuit's would
        have.
        """
        if not self._may_ask(source, now):
            return HopStatus.RESOURCE_LIMIT_EXCEEDED
        if source == target:
            return HopStatus.PERMISSION_DENIED
        held = self._reserved.get(target)
        if held is None or held.expires <= now:
            return HopStatus.NO_RESERVATION
        most = self._config.per_peer
        if self._circuits[source] >= most:
            return HopStatus.RESOURCE_LIMIT_EXCEEDED
        crowded = target if self._circuits[target] >= most else None
        is_full = sum(map(len, self._aborts.values())) >= self._config.circuits
        if (crowded or is_full) and not self._make_way(source, crowded):
            return HopStatus.RESOURCE_LIMIT_EXCEEDED
        self._aborts.setdefault(source, []).append((target, abort))
        self._circuits[source] += 1
        self._circuits[target] += 1
        return HopStatus.OK

    def _make_way(self, source: PeerId, target: PeerId | None) -> bool:
        """Abort a circuit for a new one of ``source``, one to ``target`` if that is given."""
        asked = {
            peer: [one for one in held if target in (None, one[0])]
            for peer, held in self._aborts.items()
        }
        crowd = max(asked, key=lambda peer: len(asked[peer]), default=source)
        if len(asked.get(crowd, ())) <= len(asked.get(source, ())) + 1:
            return False
        newest = asked[crowd][-1]
        self._aborts[crowd].remove(newest)
        newest[1]()
        return True

    def end(self, source: PeerId, target: PeerId, abort: Callable[[], None]) -> None:
        """Stop counting a circuit, also an aborted one."""
        held = self._aborts.get(source, [])
        if (target, abort) in held:
            held.remove((target, abort))
        if not held:
            self._aborts.pop(source, None)
        for peer in (source, target):
            self._circuits[peer] -= 1
            if not self._circuits[peer]:
                del self._circuits[peer]

    def _may_ask(self, peer: PeerId, now: float) -> bool:
        limit = self._requests.get(peer)
        if limit is None:
            limit = RateLimit(self._config.request_rate, 20.0 * self._config.request_rate)
        self._requests.renew(peer, limit)
        return limit.allows(1.0, now)
