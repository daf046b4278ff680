"""A swarm of sans-I/O cores on one heap, for tests: latency, loss, connections, deaths,
partitions.

A link is what a host offers: messages in order, connecting on demand. ``silent`` deaths are
power cuts: nobody is told, bytes just vanish; the others are crashes, which the peers' hosts
notice.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

from p2p.identity import PeerId

DIAL_TIMEOUT = 3.0


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


class Core(Protocol):
    @property
    def next_deadline(self) -> float: ...

    def handle(self, event: Any, now: float) -> list[Any]: ...


@dataclass
class Node:
    peer: PeerId
    core: Any
    alive: bool = True
    side: int = 0
    timer: float = math.inf
    sent: int = 0
    received: int = 0
    messages: int = 0
    penalties: Counter[PeerId] = field(default_factory=Counter)
    events: list[tuple[float, Any]] = field(default_factory=list)


class CoreSwarm:
    """Subclasses say how their core's events and effects are called."""

    def __init__(
        self, seed: int, *, loss: float = 0.0, latency: tuple[float, float] = (0.01, 0.15)
    ) -> None:
        self.rng = Random(seed)
        self.loss = loss
        self.latency = latency
        self.now = 1000.0
        self.nodes: dict[PeerId, Node] = {}
        self.trace = hashlib.sha256()
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._links: dict[tuple[PeerId, PeerId], float] = {}
        self._arrival: dict[tuple[PeerId, PeerId], float] = {}

    # What subclasses say.

    def received(self, peer: PeerId, data: bytes) -> Any:
        raise NotImplementedError

    def tick(self) -> Any:
        raise NotImplementedError

    def connection_event(self, peer: PeerId, state: str) -> Any | None:
        """``state`` is connected, disconnected or unreachable; None if the core does not
        care.
        """
        return None

    def carry_out(self, node: Node, effect: Any) -> None:
        raise NotImplementedError

    # The heap.

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), callback))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        self.now = until

    def drive(self, node: Node, event: Any) -> None:
        if not node.alive or event is None:
            return
        self.handled += 1
        self.trace.update(b"%r" % self.now + node.peer.digest + type(event).__name__.encode())
        self.trace.update(getattr(event, "data", b""))
        for effect in node.core.handle(event, self.now):
            self.carry_out(node, effect)
        deadline = node.core.next_deadline
        if deadline < node.timer:
            node.timer = max(deadline, self.now)
            self.call_at(node.timer, partial(self._fire, node, node.timer))

    def _fire(self, node: Node, when: float) -> None:
        if node.timer == when and self.nodes.get(node.peer) is node:
            node.timer = math.inf
            self.drive(node, self.tick())

    # Links.

    def reaches(self, a: Node, b: Node | None) -> bool:
        return b is not None and a.alive and b.alive and a.side == b.side

    def send(self, node: Node, peer: PeerId, data: bytes) -> None:
        node.sent += len(data)
        node.messages += 1
        other = self.nodes.get(peer)
        pair = (node.peer, peer) if node.peer < peer else (peer, node.peer)
        delay = self.rng.uniform(*self.latency)
        if pair not in self._links:
            if not self.reaches(node, other):
                self.call_at(
                    self.now + DIAL_TIMEOUT, lambda: self.notify(node, peer, "unreachable")
                )
                return
            self._links[pair] = self.now
            self._arrival[node.peer, peer] = self._arrival[peer, node.peer] = (
                self.now + 4 * delay
            )
            self.call_at(self.now + 4 * delay, lambda: self._connected(node, peer))
        if self.rng.random() < self.loss:
            return
        arrival = max(self.now + delay, self._arrival[node.peer, peer])
        self._arrival[node.peer, peer] = arrival
        self.call_at(arrival, lambda: self._deliver(node, peer, data))

    def _connected(self, node: Node, peer: PeerId) -> None:
        self.notify(node, peer, "connected")
        other = self.nodes.get(peer)
        if other is not None:
            self.notify(other, node.peer, "connected")

    def _deliver(self, node: Node, peer: PeerId, data: bytes) -> None:
        other = self.nodes.get(peer)
        if other is not None and self.reaches(node, other):
            other.received += len(data)
            self.drive(other, self.received(node.peer, data))

    def notify(self, node: Node, peer: PeerId, state: str) -> None:
        if self.nodes.get(node.peer) is node:
            self.drive(node, self.connection_event(peer, state))

    def kill(self, peer: PeerId, *, silent: bool = False) -> None:
        victim = self.nodes[peer]
        victim.alive = False
        if not silent:
            self.hang_up(peer)

    def hang_up(self, peer: PeerId) -> None:
        """End all connections of ``peer``."""
        for pair in [pair for pair in self._links if peer in pair]:
            del self._links[pair]
            for end in pair:
                other = pair[0] if end == pair[1] else pair[1]
                if end in self.nodes:
                    self.call_at(
                        self.now + self.latency[1],
                        partial(self.notify, self.nodes[end], other, "disconnected"),
                    )

    def partition(self, peers: list[PeerId]) -> None:
        for peer in peers:
            self.nodes[peer].side = 1

    def repair(self) -> None:
        """Connections across the cut were lost meanwhile, as TCP's would be."""
        self._links = {
            pair: since
            for pair, since in self._links.items()
            if self.nodes[pair[0]].side == self.nodes[pair[1]].side
        }
        for node in self.nodes.values():
            node.side = 0

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]
