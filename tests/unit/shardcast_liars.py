"""The swarm of `test_shardcast_core`, with peers that lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.forest import Roster, RosterEntry
from p2p.shardcast.messages import NO_STRIPE, ChunkHeader
from tests.unit.test_shardcast_core import MBIT, RUN, Node, Swarm


class LiarSwarm(Swarm):
    """Nodes in ``holes`` pass nothing on, and claims need not be true.

    With ``drip`` these nodes answer each pull after so many seconds, otherwise never.
    """

    def __init__(
        self,
        count: int,
        *,
        up: Callable[[int], float] = lambda _: 40 * MBIT,
        down: Callable[[int], float] = lambda _: 40 * MBIT,
        claim: Callable[[int], float] | None = None,
        holes: Sequence[int] = (),
        drip: float = 0.0,
        latency: float = 0.01,
    ) -> None:
        super().__init__(count, up=up, down=down, latency=latency)
        claim = claim or up
        self.claims = {
            pair.peer_id: claim(number) for number, pair in enumerate(self.keys) if number
        }
        peers = [pair.peer_id for pair in self.keys]
        self.holes = {peers[number] for number in holes}
        self.drip = drip
        self.epoch = 1
        self.roster = self.newest = self.sign(1)

    def sign(self, epoch: int) -> Roster:
        entries = [RosterEntry(peer, claim) for peer, claim in self.claims.items()]
        return Roster.sign(self.trainer, RUN, epoch, self.origin.core.believe(entries))

    def _apply(self, node: Node, effect: ev.Effect) -> None:
        if node.peer in self.holes:
            match effect:
                case ev.Push(peer, ChunkHeader() as header):
                    size = len(node.chunks[header.policy, header.index])
                    self.at(self.now, lambda: self.give(node, ev.ChunkSent(peer, size)))
                    if self.drip and header.stripe == NO_STRIPE:
                        self._answer_late(node, peer, header)
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
