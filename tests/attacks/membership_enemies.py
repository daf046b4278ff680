"""A swarm of membership cores, and puppets among them that send what they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from p2p.events import PeerDown, Penalise
from p2p.identity import PeerId
from p2p.membership import messages as msg
from p2p.membership.heartbeat import SignedHeartbeat
from p2p.swarm.core.gater import PENALTY_HALF_LIFE, PENALTY_LIMIT, REFUSAL
from tests.unit.core_swarm import Node, peer_named
from tests.unit.membership_swarm import WALL, MembershipSwarm, heartbeat_of


class HostileSwarm(MembershipSwarm):
    """Hosts keep scores as the real ones do: 100 points cut a peer off for five minutes."""

    def __init__(self, size: int, seed: int = 1, **options: Any) -> None:
        self.enemies: dict[PeerId, None] = {}
        self.on_message: Callable[[PeerId, PeerId, msg.Message], None] = (
            lambda enemy, sender, message: None
        )
        self._points: dict[tuple[PeerId, PeerId], tuple[float, float]] = {}
        self._refused: dict[tuple[PeerId, PeerId], float] = {}
        super().__init__(size, seed, **options)

    def carry_out(self, node: Node, effect: Any) -> None:
        if isinstance(effect, Penalise):
            pair = node.peer, effect.peer
            points, when = self._points.get(pair, (0.0, self.now))
            points = (
                points * 0.5 ** ((self.now - when) / PENALTY_HALF_LIFE) + effect.offence.points
            )
            if points >= PENALTY_LIMIT:
                points, self._refused[pair] = 0.0, self.now + REFUSAL
                self.at(self.now, lambda: self.drive(node, PeerDown(effect.peer)))
            self._points[pair] = points, self.now
        super().carry_out(node, effect)

    def _deliver(self, node: Node, peer: PeerId, data: bytes) -> None:
        if self._refused.get((peer, node.peer), 0.0) > self.now:
            return
        if peer in self.enemies:
            self.on_message(peer, node.peer, msg.decode_message_untrusted(data))
        else:
            super()._deliver(node, peer, data)

    def enlist(self, count: int) -> list[PeerId]:
        """Enemies that only exist as names: what they do, the test says."""
        for _ in range(count):
            peer = peer_named(10_000 + len(self.enemies))
            self.enemies[peer] = None
            self.nodes[peer] = Node(peer, None)
        return list(self.enemies)[-count:]

    def drive(self, node: Node, event: Any) -> None:
        if node.core is not None:
            super().drive(node, event)

    def tell(self, enemy: PeerId, to: PeerId, message: msg.Message) -> None:
        """An enemy, or a member that lies, sends a message."""
        node, data = self.nodes[enemy], msg.encode_message(message)
        delay = self.rng.uniform(*self.latency)
        self._links.setdefault((enemy, to) if enemy < to else (to, enemy))
        self._arrival.setdefault((enemy, to), self.now)
        self._arrival.setdefault((to, enemy), self.now)
        self.at(self.now + delay, lambda: self._deliver(node, to, data))

    def words(self, peer: PeerId, seqno: int, **said: Any) -> SignedHeartbeat:
        return heartbeat_of(peer, seqno, expires=WALL + self.now + 1800, **said)

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.at(self.now + seconds, again)

        self.at(self.now, again)

    def be_polite(self) -> None:
        """Have the enemies accept whoever asks them, and answer beats and suspicions."""

        def answer(enemy: PeerId, sender: PeerId, message: msg.Message) -> None:
            words = self.words(enemy, int(self.now * 1000))
            match message:
                case msg.Neighbor():
                    self.tell(enemy, sender, msg.NeighborReply(True, words))
                case msg.Beat() | msg.NeighborReply(True):
                    self.tell(enemy, sender, msg.Beat(True, words))
                case msg.Suspect():
                    self.tell(enemy, sender, msg.Heartbeats((words,)))

        self.on_message = answer


@dataclass(frozen=True)
class Seen:
    """What the honest have after an attack, and what they had to send."""

    neighbours: int  # honest neighbours of the node that has fewest, at the worst moment
    share: float  # honest share of the view that has least, at the end
    bytes_per_second: float  # sent by an honest node, on average


def watch(
    swarm: HostileSwarm, honest: Sequence[PeerId], seconds: float, step: float = 5.0
) -> Seen:
    """Let it go on for so long, and look all the time."""
    good = dict.fromkeys(honest)
    nodes = [swarm.nodes[peer] for peer in honest]
    before = sum(node.sent for node in nodes)
    least, until = 10**9, swarm.now + seconds
    while swarm.now < until:
        swarm.run(step)
        least = min(
            least, *(sum(peer in good for peer in node.core.neighbours) for node in nodes)
        )
    shares = []
    for node in nodes:
        members = [member.peer for member in node.core.members()]
        shares.append(sum(peer in good for peer in members) / max(1, len(members)))
    sent = sum(node.sent for node in nodes) - before
    return Seen(least, min(shares), sent / seconds / len(nodes))
