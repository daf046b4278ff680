"""Membership cores on a heap."""

from __future__ import annotations

from random import Random
from typing import Any

from p2p.events import AddAddrs, PeerDown, Penalise, Received, Send, Tick
from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core.core import MembershipCore
from p2p.membership.core.events import Bootstrap, MemberEvent, UpdateProfile
from p2p.membership.heartbeat import Profile
from p2p.multiaddr import Multiaddr
from tests.unit.core_swarm import CoreSwarm, FakeSigner, Node, fake_verify, peer_named

WALL = 1_700_000_000.0


class MembershipSwarm(CoreSwarm):
    def __init__(
        self, size: int = 0, seed: int = 1, config: MembershipConfig | None = None, **link: Any
    ) -> None:
        super().__init__(seed, **link)
        self.config = config or MembershipConfig()
        self.refused: set[PeerId] = set()
        self.started = 0
        for number in range(size):
            self.start(number, at=self.rng.uniform(0, 2) if number else 0.0)

    def received(self, peer: PeerId, data: bytes) -> Received:
        return Received(peer, data)

    def tick(self) -> Tick:
        return Tick()

    def connection_event(self, peer: PeerId, state: str) -> PeerDown | None:
        if state == "disconnected":
            return PeerDown(peer)
        return PeerDown(peer, unreachable=True) if state == "unreachable" else None

    def carry_out(self, node: Node, effect: Any) -> None:
        match effect:
            case Send(peer, data):
                self.send(node, peer, data)
            case MemberEvent():
                node.events.append((self.now, effect))
            case Penalise(peer, offence, _):
                node.penalties[peer] += round(offence.points)
            case AddAddrs():
                pass

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
        core = MembershipCore(
            FakeSigner(peer),
            self.config,
            Random(self.started * 1_000_003 + number),
            verify=fake_verify,
            may=lambda other: other not in self.refused,
            wall=lambda: WALL + self.now + clock,
            seqno=first,
        )
        node = Node(peer, core)
        profile = profile or Profile(
            addrs=(addr_of(number).transport,),
            roles=("inference",),
            run=b"r" * 32,
            upload=10**7,
            version="0.1.0",
        )
        self.nodes[peer] = node

        def begin() -> None:
            self.drive(node, UpdateProfile(profile))
            self.drive(node, Tick())
            if bootstrap is not None and bootstrap != number:
                self.drive(node, Bootstrap((addr_of(bootstrap),)))

        self.call_at(self.now + at, begin)
        return node

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
