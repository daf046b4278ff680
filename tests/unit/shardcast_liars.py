"""The swarm of `test_shardcast_core`, with peers that lie, and with ones that come later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import PolicyVersion
from p2p.shardcast.messages import NO_STRIPE, ChunkHeader, Credit, Have
from tests.unit.test_shardcast_core import MBIT, RUN, Node, Swarm


class LiarSwarm(Swarm):
    """Some nodes pass nothing on, and claims need not be true. Peers in ``late`` come later.

    Of those in ``holes``, all are ``silent`` about what they hold, or ``mute`` about what came
    from the origin, or answer each pull after ``drip`` seconds; without it never.
    """

    def __init__(
        self,
        count: int,
        *,
        up: Callable[[int], float] = lambda _: 40 * MBIT,
        down: Callable[[int], float] = lambda _: 40 * MBIT,
        claim: Callable[[int], float] | None = None,
        holes: Sequence[int] = (),
        silent: bool = False,
        mute: bool = False,
        drip: float = 0.0,
        late: Sequence[int] = (),
        latency: float = 0.01,
    ) -> None:
        super().__init__(count, up=up, down=down, latency=latency)
        claim = claim or up
        self.claims = {
            pair.peer_id: claim(number) for number, pair in enumerate(self.keys) if number
        }
        peers = [pair.peer_id for pair in self.keys]
        self.holes = {peers[number] for number in holes}
        self.silent, self.mute, self.drip = silent, mute, drip
        self.late = {peers[number] for number in late}
        for peer in self.late:
            self.nodes[peer].alive = False
        self.epoch = 1
        self.roster = self.newest = self.sign(1)

    def sign(self, epoch: int) -> Roster:
        entries = [
            RosterEntry(peer, claim)
            for peer, claim in self.claims.items()
            if peer not in self.late
        ]
        return Roster.sign(self.trainer, RUN, epoch, self.origin.core.believe(entries))

    def come(self, node: Node, friends: int = 3) -> None:
        """A late node is here, and meets the origin and some others."""
        node.alive = True
        self.late.discard(node.peer)
        others = [n for n in self.nodes.values() if n.alive and n is not node]
        place = list(self.nodes).index(node.peer)
        met = {self.origin.peer: self.origin}
        for step in range(min(friends, len(others))):
            other = others[(place * 7 + step * 5) % len(others)]
            met[other.peer] = other
        for other in met.values():
            self.give(node, ev.PeerUp(other.peer))
            self.give(other, ev.PeerUp(node.peer))

    def _apply(self, node: Node, effect: ev.Effect) -> None:
        if node.peer in self.holes:
            match effect:
                case ev.Push(peer, ChunkHeader() as header):
                    size = len(node.chunks[header.policy, header.index])
                    self.at(self.now, lambda: self.give(node, ev.ChunkSent(peer, size)))
                    if self.drip and header.stripe == NO_STRIPE:
                        self._answer_late(node, peer, header)
                    return
                case ev.Send(_, Have()) if self.silent:
                    return
                case ev.Send(_, Credit()) if self.mute:
                    return
        if isinstance(effect, ev.Regroup):
            self.at(self.now, self._regroup)
            return
        super()._apply(node, effect)

    def _answer_late(self, node: Node, peer: PeerId, header: ChunkHeader) -> None:
        data = node.chunks[header.policy, header.index]
        came = ev.ChunkCame(node.peer, header, len(data))
        self._bulk(node, peer, self.now + self.drip, len(data), came)

    def _regroup(self) -> None:
        roster = self.sign(self.epoch + 1)
        if roster.peers != self.newest.peers or roster.classes != self.newest.classes:
            self.epoch += 1
            self.newest = roster
            self.give(self.origin, ev.Regrouped(roster))

    @property
    def honest(self) -> list[Node]:
        return [node for node in self.peers if node.peer not in self.holes]

    def time_to(self, version: int, nodes: Sequence[Node]) -> float:
        return max(node.whole.get(version, float("inf")) for node in nodes)


def roots_of(swarm: Swarm, version: int) -> list[int]:
    """The numbers of the peers that a version is given to."""
    assert swarm.roster is not None
    numbers = {peer: number for number, peer in enumerate(swarm.nodes)}
    forest = build_forest(swarm.roster, PolicyVersion(version))
    return [numbers[root] for root in forest.roots]
