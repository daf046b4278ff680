"""Limits of what strangers may hold of a node, and eviction when it is full, without I/O.

Theory of operation
-------------------
A `Budget` counts what peers cause this node to hold: unfinished handshakes, connections,
streams that it serves (`p2p.transport.core.budget` counts their bytes). The counts are kept by
peer, by host (one IPv4 address, or one IPv6 /56, which is what one customer gets) and by
network (/24 and /48), as in go-libp2p's resource manager.

A full node that refuses newcomers belongs to the peer that filled it first, for ever. So
nothing here refuses: when a limit is reached, the budget names what must go, as Bitcoin Core's
`SelectNodeToEvict` does. An attacker can choose when it connects, from where, and what it says;
it cannot choose what *we* ask it for, and its networks are fewer than those of honest peers.
Therefore:

* of handshakes, those that have said nothing go first, of the network with the most, the
  oldest;
* of connections, each criterion that is hard to fake protects a share (peers that we opened
  streams to, one peer each of many networks, those that have been of use for longest), and of
  the rest the one that was used longest ago goes, from the network with the most;
* of served streams, the newest of the peer with the most.

Loopback, and networks without addresses, know no hosts: there only the limits on the whole
count.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from p2p.door import check_fields
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

K = TypeVar("K")

MAX_SERVED: Final = 4096
"""Most incoming streams served at a time over all peers: four for each connection, the lanes of
heartbeats, DHT, mesh and SHARDCAST. Each costs 7 KiB beside its bytes, 28 MiB together."""
_MEMO: Final = 4096
"""Addresses whose group is cached, 1 MiB at most, since the same peers are dialled, and dial,
again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Limits of what strangers may hold of this node."""

    connections: int = 1024
    """Connections in all. 11 KiB each when idle; a node needs about 200 (views, forest,
    trainers, validators). Fewer where the operating system allows fewer descriptors."""

    handshakes: int = 1024
    """Incoming handshakes at a time, at most 20 KiB each; a full house is done in 1.5 s. More
    places than a crowd of one identity, for whoever is given up dials again at once."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.connections < 1 or self.handshakes < 1:
            raise ValueError("a host needs room for at least one connection and one handshake")

    def within(self, descriptors: int) -> ResourceLimits:
        """Return limits for a process that may have ``descriptors`` files open, lower than
        these if need be.

        With 1,024, which is what Linux gives a process that does not ask, they are 528
        connections and 117 handshakes.
        """
        # Strangers never get 192 for dials (48 peers, four addresses each), 40 for files that
        # threads have open, 24 for the pipes of eight worker processes, and 64 for Python, the
        # log, the lock and the listeners.
        usable = max(descriptors - 320, 8)
        return ResourceLimits(
            connections=min(self.connections, usable * 3 // 4),
            handshakes=min(self.handshakes, max(usable // 6, 1)),
        )

    @property
    def inbound(self) -> int:
        """Most unprotected connections that others dialled. The last quarter is for our
        dials."""
        return max(self.connections * 3 // 4, 1)

    @property
    def per_peer(self) -> int:
        """Most connections to one peer: two from dialling each other at once, two more around a
        restart."""
        return 4

    @property
    def per_host(self) -> int:
        """Most inbound connections of one host: a sixteenth, 64 of 1,024. A laboratory behind
        one address fits."""
        return max(self.connections // 16, 4)

    @property
    def per_network(self) -> int:
        """Most inbound connections of one network: an eighth, 128 of 1,024, so that eight
        networks are needed to fill a node."""
        return max(self.connections // 8, 8)


# Where peers are.


@dataclass(frozen=True, slots=True)
class NetGroup:
    """The network and host of a connection, as the limits distinguish them ("netgroup" in
    Bitcoin Core)."""

    host: str
    network: str
    limited: bool
    """True if limits per host and network apply. They do not on loopback, nor where there are
    no addresses."""


UNKNOWN: Final = NetGroup("", "", limited=False)


@functools.lru_cache(_MEMO)
def group_of(addr: Multiaddr | None) -> NetGroup:
    """Return the host and the network of an address.

    A peer behind a relay is not counted under the relay's address. Otherwise one relay's
    clients would be one host, and the relay would pay for what each of them does. These peers
    are a network of their own.
    """
    if addr is not None and addr.relay is not None:
        network = f"circuit/{addr.relay.peer_id}"
        return NetGroup(f"{network}/{addr.peer_id}", network, limited=True)
    kind, value = ("", "") if addr is None else addr.parts[0]
    if kind not in {"ip4", "ip6"}:
        return UNKNOWN
    ip = ipaddress.ip_address(value)
    if ip.is_loopback:
        return NetGroup(value, "loopback", limited=False)
    host_bits, network_bits = (32, 24) if ip.version == 4 else (56, 48)
    packed = ip.packed.hex()
    return NetGroup(
        f"{kind}/{packed[: host_bits // 4]}",
        f"{kind}/{packed[: network_bits // 4]}",
        limited=True,
    )


LOOPBACK, PRIVATE, PUBLIC = range(3)


@functools.lru_cache(_MEMO)
def reach_of(addr: Multiaddr) -> int:
    """Return the scope of an address: this machine, this site, or everywhere."""
    kind, value = addr.parts[0]
    if kind not in {"ip4", "ip6"}:
        return PUBLIC
    ip = ipaddress.ip_address(value)
    if ip.is_loopback or ip.is_unspecified:
        return LOOPBACK
    return PUBLIC if ip.is_global and not ip.is_multicast else PRIVATE


# What is held.


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """An incoming connection that has not yet proved its identity."""

    group: NetGroup
    since: float
    abort: Callable[[], None]
    has_gone: Callable[[], bool] = bool
    """Returns True if its dialer has hung up, where that can be known."""
    heard: bool = False
    """True if the dialer has sent anything."""
    begun: bool = False
    """True once its cryptography has begun."""


@dataclass(slots=True, eq=False)
class Usage:
    """Usefulness of a connected peer, kept while it has a connection."""

    since: float
    used_at: float
    """Time at which a stream was last opened, or a message last came or went."""
    useful_at: float = 0.0
    """Time at which this node last opened a stream to the peer. An attacker cannot improve
    it."""

    was_used: bool = False
    """True if either side has used the connection since the peer connected."""


@dataclass(slots=True, eq=False)
class HeldConnection:
    """The facts about a connection that the budget needs."""

    peer: PeerId
    group: NetGroup
    inbound: bool
    usage: Usage
    abort: Callable[[], None]


@dataclass(slots=True, eq=False)
class ServedStream:
    """A stream that a peer has opened and that we serve."""

    peer: PeerId
    abort: Callable[[], None]
    has_stalled: Callable[[], bool] = bool
    """Returns True if the peer has taken nothing of what we send for some sweeps. It is called
    once a sweep."""
    protocol: str = ""
    """Protocol of the stream. When the block that serves the protocol ends, it resets the
    stream."""


def _count(counts: Counter[str], name: str, change: int) -> None:
    counts[name] += change
    if not counts[name]:
        del counts[name]


class Budget:
    """Account of all that peers cause a node to hold."""

    def __init__(
        self,
        limits: ResourceLimits,
        is_protected: Callable[[PeerId], bool] = lambda _: False,
        salt: bytes = b"",
    ) -> None:
        """Start empty. ``salt``, which no peer knows, chooses the networks that are
        protected."""
        self.limits = limits
        self._is_protected = is_protected
        self._salt = salt
        self._handshakes: dict[PendingHandshake, None] = {}
        self._connections: dict[HeldConnection, None] = {}
        self._of_peer: dict[PeerId, dict[HeldConnection, None]] = {}
        self._inbound = 0
        self._hosts: Counter[str] = Counter()
        self._networks: Counter[str] = Counter()
        self._served: dict[PeerId, dict[ServedStream, None]] = {}
        self._served_count = 0

    @property
    def handshakes(self) -> int:
        """Number of incoming handshakes that are not finished."""
        return len(self._handshakes)

    @property
    def connections(self) -> int:
        """Number of connections."""
        return len(self._connections)

    @property
    def served(self) -> int:
        """Number of streams that are being served."""
        return self._served_count

    def served_for(self, protocol: str) -> list[ServedStream]:
        """Return the streams of one protocol that are being served."""
        return [one for of in self._served.values() for one in of if one.protocol == protocol]

    # Handshakes.

    def begin_handshake(self, pending: PendingHandshake) -> PendingHandshake | None:
        """Count a new handshake. Return the handshake that must make room for it, which is no
        longer counted."""
        victim = self._handshake_victim(pending.group)
        if victim is not None:
            del self._handshakes[victim]
        self._handshakes[pending] = None
        return victim

    def end_handshake(self, pending: PendingHandshake) -> None:
        """Stop counting a handshake, however it ended."""
        self._handshakes.pop(pending, None)

    def oldest_handshake(self) -> PendingHandshake | None:
        """Return the handshake to give up when the machine itself runs out of a resource. It is
        no longer counted."""
        victim = self._worst_handshake(self._handshakes) if self._handshakes else None
        if victim is not None:
            del self._handshakes[victim]
        return victim

    def _handshake_victim(self, group: NetGroup) -> PendingHandshake | None:
        limits = self.limits
        if group.limited:
            siblings = [one for one in self._handshakes if one.group.network == group.network]
            twins = [one for one in siblings if one.group.host == group.host]
            # One host has an eighth of the places, one network a quarter.
            if len(twins) >= max(limits.handshakes // 8, 1):
                return self._worst_handshake(twins)
            if len(siblings) >= max(limits.handshakes // 4, 1):
                return self._worst_handshake(siblings)
        if len(self._handshakes) < limits.handshakes:
            return None
        return self._worst_handshake(self._handshakes)

    def _worst_handshake(self, among: Iterable[PendingHandshake]) -> PendingHandshake:
        """Return the oldest handshake of the network with the most: a silent one, unless those
        hold less than a quarter; else a waiting one, unless those hold less than a quarter.

        A dialer speaks first, in the packet behind its SYN, so who is silent after a moment
        waits for nothing of ours; yet every newcomer is silent for an instant, so a quarter of
        the places is theirs. A thousand silent sockets a second thus replace each other every
        quarter second, and never a dialer that has spoken. Of those that have, the ones that
        were answered have cost us the cryptography, and lack a packet of their own only: they
        were the oldest, and gone when it came, where 1,008 dialers fought for 117 places.
        """
        everyone = list(among)
        silent = [one for one in everyone if not one.heard]
        waiting = [one for one in everyone if one.heard and not one.begun]
        begun = [one for one in everyone if one.heard and one.begun]
        if len(silent) * 4 > len(everyone):
            pool = silent
        elif len(waiting) * 4 > len(everyone):
            pool = waiting
        else:
            pool = begun
        crowd = _most_crowded(one.group for one in pool)
        return next(one for one in pool if one.group.network == crowd)

    # Connections.

    def admit(self, held: HeldConnection) -> list[HeldConnection]:
        """Count a new connection. Return those that must make room for it, which are no longer
        counted.

        If everything else is protected, the new connection itself is returned.
        """
        # The oldest connections of a peer that has one too many: after a restart they are
        # ghosts.
        siblings = list(self._of_peer.get(held.peer, ()))
        victims = siblings[: max(len(siblings) + 1 - self.limits.per_peer, 0)]
        for one in victims:
            self._count(one, -1)
        self._count(held, +1)
        limits, group = self.limits, held.group
        if held.inbound and not self._is_protected(held.peer):
            if group.limited and self._hosts[group.host] > limits.per_host:
                victims += self._evict(
                    [one for one in self._connections if one.group.host == group.host], held
                )
            if group.limited and self._networks[group.network] > limits.per_network:
                siblings = [
                    one for one in self._connections if one.group.network == group.network
                ]
                victims += self._evict(siblings, held)
            if self._inbound > limits.inbound:
                inbound = [
                    one for one in self._connections if one.inbound and self._may_go(one)
                ]
                if len(inbound) > limits.inbound:
                    victims += self._evict(inbound, held, limits.connections // 64)
        if len(self._connections) > limits.connections:
            victims += self._evict(list(self._connections), held)
        return victims

    def release(self, held: HeldConnection) -> None:
        """Stop counting a connection. A repeated call does nothing."""
        if held in self._connections:
            self._count(held, -1)

    def _count(self, held: HeldConnection, change: int) -> None:
        own = self._of_peer.setdefault(held.peer, {})
        if change > 0:
            self._connections[held] = own[held] = None
        else:
            del self._connections[held], own[held]
        if not own:
            del self._of_peer[held.peer]
        if held.inbound:
            self._inbound += change
            _count(self._hosts, held.group.host, change)
            _count(self._networks, held.group.network, change)

    def _evict(
        self, among: list[HeldConnection], newcomer: HeldConnection, more: int = 0
    ) -> list[HeldConnection]:
        """Choose the connection to evict, and up to ``more`` others, so that a flood pays for
        the choice only once in a while."""
        candidates = [
            one
            for one in among
            if one is not newcomer and one in self._connections and self._may_go(one)
        ]
        victims = self._rank(candidates)[: 1 + more] if candidates else [newcomer]
        for one in victims:
            self._count(one, -1)
        return victims

    def _may_go(self, held: HeldConnection) -> bool:
        return not self._is_protected(held.peer)

    def _rank(self, candidates: list[HeldConnection]) -> list[HeldConnection]:
        """Return the connections that may be evicted, in the order of eviction; at least one if
        there are any."""
        rest = dict.fromkeys(candidates)
        share = len(candidates) // 8

        def protect(order: list[HeldConnection], count: int) -> None:
            for one in order[:count]:
                del rest[one]

        useful = [one for one in rest if one.usage.useful_at]
        protect(sorted(useful, key=lambda one: -one.usage.useful_at), 2 * share)
        first: dict[str, HeldConnection] = {}
        for one in rest:
            first.setdefault(one.group.network, one)
        # The oldest of each network, in an order that only we know.
        secret = lambda name: hashlib.sha256(self._salt + name.encode()).digest()  # noqa: E731
        protect([first[name] for name in sorted(first, key=secret)], share)
        used = [one for one in rest if one.usage.was_used]
        protect(sorted(used, key=lambda one: one.usage.since), 2 * share)
        crowd = _most_crowded(one.group for one in rest)
        pool = [one for one in rest if one.group.network == crowd]
        return sorted(pool, key=lambda one: one.usage.used_at)

    # Streams.

    def serve(self, stream: ServedStream) -> ServedStream | None:
        """Count a new served stream. Return the stream that must make room for it, which is no
        longer counted.

        A peer over its own share loses the new stream. When all places are taken, the peer with
        the most streams loses its newest; protected peers come last.
        """
        own = self._served.setdefault(stream.peer, {})
        own[stream] = None
        self._served_count += 1
        victim = None
        if len(own) > 256:  # over all its connections, as many as one may have open
            victim = stream
        elif self._served_count > MAX_SERVED:
            unprotected = [peer for peer in self._served if not self._is_protected(peer)]
            most = max(unprotected or self._served, key=lambda peer: len(self._served[peer]))
            victim = next(reversed(self._served[most]))
        if victim is not None:
            self.served_to_end(victim)
        return victim

    def served_to_end(self, stream: ServedStream) -> None:
        """Stop counting a served stream. A repeated call does nothing."""
        own = self._served.get(stream.peer)
        if own is None or stream not in own:
            return
        del own[stream]
        if not own:
            del self._served[stream.peer]
        self._served_count -= 1

    def end_stalled(self) -> None:
        """End the streams whose peers take nothing. This is called once a sweep."""
        for own in list(self._served.values()):
            for stream in list(own):
                if stream.has_stalled():
                    stream.abort()

    def served_to(self, peer: PeerId) -> tuple[ServedStream, ...]:
        """Return the streams being served to ``peer``."""
        return tuple(self._served.get(peer, ()))


def _most_crowded(groups: Iterable[NetGroup]) -> str:
    ((network, _),) = Counter(group.network for group in groups).most_common(1)
    return network


# Whom we dial on a stranger's word.


class FadingCounts(Generic[K]):
    """Amounts by name, halved every ``half_life`` seconds.

    Of more than ``most`` names, the least amount among the oldest is forgotten: 0.5 MiB.
    """

    def __init__(self, half_life: float, most: int = 4096) -> None:
        self._half_life = half_life
        self._most = most
        self._counts: dict[K, tuple[float, float]] = {}

    def add(self, name: K, now: float, amount: float = 1.0) -> float:
        """Add to the amount of a name and return it."""
        total = self.count(name, now) + amount
        self._counts.pop(name, None)
        self._counts[name] = total, now
        if len(self._counts) > self._most:
            oldest = list(itertools.islice(self._counts, 16))
            del self._counts[min(oldest, key=lambda one: self.count(one, now))]
        return total

    def count(self, name: K, now: float) -> float:
        """Return the faded amount of a name."""
        known = self._counts.get(name)
        return known[0] * 2.0 ** ((known[1] - now) / self._half_life) if known else 0.0


class DialTargets:
    """Counts the failed dials of hosts that strangers named."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        # Seconds in which half of the failed dials are forgotten: a host at its limit of eight
        # is tried once more every 11 s (60 s times log2 of 8/7).
        self._failed: FadingCounts[str] = FadingCounts(60.0)

    def begin(self, group: NetGroup, now: float) -> bool:
        """Return True if the dial may begin; then `end` must follow."""
        if not group.limited:
            return True
        # Strangers must not be able to make many nodes dial a host together. A host that
        # answers costs nothing; one that does not gets about eight SYNs a minute from us,
        # however many peers name it. A network has two hosts' worth of concurrent dials, and
        # four hosts' worth of failed ones, as some of its many machines may be off.
        if (
            self._open[group.host] >= 4
            or self._open[group.network] >= 8
            or self._failed.count(group.host, now) >= 8.0
            or self._failed.count(group.network, now) >= 32.0
        ):
            return False
        _count(self._open, group.host, +1)
        _count(self._open, group.network, +1)
        return True

    def end(self, group: NetGroup, now: float, *, answered: bool) -> None:
        """Record that the dial is over."""
        if not group.limited:
            return
        for name in (group.host, group.network):
            _count(self._open, name, -1)
            if not answered:
                self._failed.add(name, now)
