"""Membership cores in one swarm: latency, loss, connections, deaths, partitions.

A link is what a host offers: messages in order, connecting on demand. ``silent`` deaths are
power cuts: nobody is told, bytes just vanish; the others are crashes, which the peers' hosts
notice.
"""

from __future__ import annotations

import math
from functools import partial
from random import Random
from typing import Any

from p2p.events import PeerDown, Penalise, Received, Send, Tick
from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core.core import MembershipCore
from p2p.membership.core.events import Bootstrap, Effect, MemberEvent, UpdateProfile
from p2p.membership.heartbeat import Heartbeat, Profile, SignedHeartbeat, sign_heartbeat
from p2p.membership.messages import Message, Neighbor, decode_message_untrusted, encode_message
from p2p.multiaddr import Multiaddr
from tests.unit.core_swarm import FakeSigner, Node, Timeline, fake_verify, peer_named

WALL = 1_700_000_000.0
DIAL_TIMEOUT = 3.0


class MembershipSwarm(Timeline):
    def __init__(
        self,
        size: int = 0,
        seed: int = 1,
        config: MembershipConfig | None = None,
        *,
        loss: float = 0.0,
        latency: tuple[float, float] = (0.01, 0.15),
    ) -> None:
        super().__init__()
        self.rng = Random(seed)
        self.loss = loss
        self.latency = latency
        self.config = config or MembershipConfig()
        self.nodes: dict[PeerId, Node] = {}
        self.refused: set[PeerId] = set()
        self.started = 0
        self._links: dict[tuple[PeerId, PeerId], None] = {}
        self._arrival: dict[tuple[PeerId, PeerId], float] = {}
        super().run(1000.0)
        for number in range(size):
            self.start(number, at=self.rng.uniform(0, 2) if number else 0.0)

    def start(
        self,
        number: int,
        *,
        at: float = 0.0,
        bootstrap: int | None = 0,
        profile: Profile | None = None,
        clock: float = 0.0,
        seqno: int | None = None,
    ) -> Node:
        """Start (or restart) a node ``at`` seconds from now; its wall clock is ``clock``
        seconds off.
        """
        self.started += 1
        peer = peer_named(number)
        first = int((WALL + self.now + at + clock) * 1000) if seqno is None else seqno
        core = make_core(
            first,
            number,
            config=self.config,
            rng=Random(self.started * 1_000_003 + number),
            may=lambda other: other not in self.refused,
            wall=lambda: WALL + self.now + clock,
        )
        node = self.nodes[peer] = Node(peer, core)
        profile = profile or Profile(
            addrs=(addr_of(number).transport,),
            roles=("inference",),
            run=b"r" * 32,
            upload=10**7,
            version="0.1.0",
        )

        def begin() -> None:
            self.drive(node, UpdateProfile(profile))
            self.drive(node, Tick())
            if bootstrap is not None and bootstrap != number:
                self.drive(node, Bootstrap((addr_of(bootstrap),)))

        self.at(self.now + at, begin)
        return node

    def run(self, seconds: float) -> None:
        super().run(self.now + seconds)

    def drive(self, node: Node, event: Any) -> None:
        if not node.alive:
            return
        for effect in node.core.handle(event, self.now):
            self.carry_out(node, effect)
        deadline = node.core.next_deadline
        if deadline < node.timer:
            node.timer = max(deadline, self.now)
            self.at(node.timer, partial(self._fire, node, node.timer))

    def carry_out(self, node: Node, effect: Any) -> None:
        match effect:
            case Send(peer, data):
                self.send(node, peer, data)
            case MemberEvent():
                node.events.append((self.now, effect))
            case Penalise(peer, offence, _):
                node.penalties[peer] += round(offence.points)

    def _fire(self, node: Node, when: float) -> None:
        if node.timer == when and self.nodes.get(node.peer) is node:
            node.timer = math.inf
            self.drive(node, Tick())

    # Links.

    def reaches(self, a: Node, b: Node | None) -> bool:
        return b is not None and a.alive and b.alive and a.side == b.side

    def send(self, node: Node, peer: PeerId, data: bytes) -> None:
        node.sent += len(data)
        pair = (node.peer, peer) if node.peer < peer else (peer, node.peer)
        delay = self.rng.uniform(*self.latency)
        if pair not in self._links:
            if not self.reaches(node, self.nodes.get(peer)):
                lost = PeerDown(peer, unreachable=True)
                self.at(self.now + DIAL_TIMEOUT, lambda: self.notify(node, lost))
                return
            self._links[pair] = None
            self._arrival[node.peer, peer] = self._arrival[peer, node.peer] = (
                self.now + 4 * delay
            )
        if self.rng.random() < self.loss:
            return
        arrival = max(self.now + delay, self._arrival[node.peer, peer])
        self._arrival[node.peer, peer] = arrival
        self.at(arrival, lambda: self._deliver(node, peer, data))

    def _deliver(self, node: Node, peer: PeerId, data: bytes) -> None:
        other = self.nodes.get(peer)
        if other is not None and self.reaches(node, other):
            self.drive(other, Received(node.peer, data))

    def notify(self, node: Node, event: PeerDown) -> None:
        if self.nodes.get(node.peer) is node:
            self.drive(node, event)

    def kill(self, peer: PeerId, *, silent: bool = False) -> None:
        self.nodes[peer].alive = False
        if not silent:
            self.hang_up(peer)

    def hang_up(self, peer: PeerId) -> None:
        """End all connections of ``peer``."""
        for pair in [pair for pair in self._links if peer in pair]:
            del self._links[pair]
            for end, other in (pair, pair[::-1]):
                if end in self.nodes:
                    lost = partial(self.notify, self.nodes[end], PeerDown(other))
                    self.at(self.now + self.latency[1], lost)

    def partition(self, peers: list[PeerId]) -> None:
        for peer in peers:
            self.nodes[peer].side = 1

    def repair(self) -> None:
        """Connections across the cut were lost meanwhile, as TCP's would be."""
        for pair in list(self._links):
            if len({self.nodes[end].side for end in pair}) > 1:
                del self._links[pair]
        for node in self.nodes.values():
            node.side = 0

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def knowing(self, peer: PeerId) -> list[Node]:
        return [
            node
            for node in self.alive()
            if node.peer != peer and any(member.peer == peer for member in node.core.members())
        ]


def addr_of(number: int) -> Multiaddr:
    return Multiaddr.parse(
        f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
    ).with_peer(peer_named(number))


def heartbeat_of(
    peer: PeerId,
    seqno: int = 1,
    *,
    signer: PeerId | None = None,
    interval: float = 5.0,
    leaving: bool = False,
    expires: float = WALL + 2600,
    **said: Any,
) -> SignedHeartbeat:
    """Return a heartbeat with fields of a `Profile`."""
    heartbeat = Heartbeat(
        peer=peer,
        seqno=seqno,
        expires=round(expires),
        interval=interval,
        leaving=leaving,
        profile=Profile(**{"roles": ("liar",), **said}),
    )
    return sign_heartbeat(heartbeat, FakeSigner(signer or peer))


def make_core(seqno: int = 1000, number: int = 1, **options: Any) -> MembershipCore:
    usual: dict[str, Any] = {
        "config": MembershipConfig(),
        "rng": Random(1),
        "verify": fake_verify,
        "may": lambda _: True,
        "wall": lambda: WALL,
    }
    return MembershipCore(FakeSigner(peer_named(number)), seqno=seqno, **(usual | options))


def linked_core(neighbours: int) -> MembershipCore:
    """Return a core with the neighbours 2, 3 and so on, at 1 s."""
    core = make_core()
    core.handle(Tick(), 0.0)
    for number in range(2, 2 + neighbours):
        tell(core, peer_named(number), Neighbor(True, heartbeat_of(peer_named(number))), 0.0)
    assert len(core.neighbours) == neighbours
    while core.next_deadline < 1.0:
        core.handle(Tick(), core.next_deadline)
    return core


def sent(effects: list[Effect]) -> list[tuple[PeerId, Message]]:
    return [
        (each.peer, decode_message_untrusted(each.data))
        for each in effects
        if isinstance(each, Send)
    ]


def tell(
    core: MembershipCore, source: PeerId, message: Message, now: float = 1.0
) -> list[tuple[PeerId, Message]]:
    """Return what a core sends because of a message."""
    return sent(core.handle(Received(source, encode_message(message)), now))
