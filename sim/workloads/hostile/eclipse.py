"""Can a coalition make a newcomer see no other members than its own, by membership alone?

The members of the coalition run the real protocol, but admit, and therefore name, only each
other and the newcomers; they were there first, and the newcomers' bootstrap list names several
of them and one honest node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

import trio

from p2p.identity import PeerId
from p2p.membership import Membership, MembershipConfig, open_membership
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario

_COALITION = "evil"
_HONEST_BOOTSTRAP = 1
"""Honest bootstrap peers of a newcomer: the fewest with which it can be saved."""


class Eclipse:
    """Honest nodes, a coalition, and newcomers that ask mostly the coalition."""

    parameters: ClassVar[Sequence[str]] = ("coalition_share", "newcomers")

    def __init__(self) -> None:
        self._views: dict[str, Membership] = {}
        self._evil: dict[PeerId, None] = {}
        self._newcomers: dict[PeerId, None] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Let newcomers in, one a second, and measure their views."""
        evil = round(scenario.nodes * scenario.parameter("coalition_share", 0.2))
        newcomers = int(scenario.parameter("newcomers", 10))
        for number in range(evil):
            self._evil[
                swarm.add(f"{_COALITION}{number}", self._live, link=scenario.link).peer_id
            ] = None
        for number in range(scenario.nodes - evil - newcomers):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        await swarm.sleep(60.0)  # they settle
        names = [f"new{number}" for number in range(newcomers)]
        for name in names:
            self._newcomers[swarm.add(name, self._live, link=scenario.link).peer_id] = None
            await swarm.sleep(1)
        await swarm.sleep_until(scenario.duration)
        seen = [self._honest_share(name) for name in names]
        return {
            "honest_neighbours_least": min(share for _, share in seen),
            "honest_seen_least": round(min(share for share, _ in seen), 4),
            "honest_seen_mean": round(statistics.fmean(share for share, _ in seen), 4),
            "honest_share_of_swarm": round(1 - evil / scenario.nodes, 4),
        }

    async def _live(self, node: SimNode) -> None:
        evil = node.name.startswith(_COALITION)
        async with (
            node.open_host() as host,
            open_membership(
                node.world, host, MembershipConfig(), may=self._only_ours if evil else _anyone
            ) as membership,
        ):
            self._views[node.name] = membership
            await membership.join(
                [other.addr for other in self._bootstrap(node) if other is not node]
            )
            await trio.sleep_forever()

    def _bootstrap(self, node: SimNode) -> list[SimNode]:
        evil = [other for other in node.siblings if other.peer_id in self._evil]
        honest = [other for other in node.siblings if other.peer_id not in self._evil]
        if node.peer_id in self._newcomers or node.name.startswith("new"):
            return [
                *node.world.rng("bootstrap").sample(evil, min(4, len(evil))),
                *honest[:_HONEST_BOOTSTRAP],
            ]
        return (evil if node.peer_id in self._evil else honest)[:3]

    def _only_ours(self, peer: PeerId) -> bool:
        return peer in self._evil or peer in self._newcomers

    def _honest_share(self, name: str) -> tuple[float, int]:
        view = self._views[name]
        members = [member.peer for member in view.members()]
        honest = sum(peer not in self._evil for peer in members)
        return honest / max(1, len(members)), sum(
            peer not in self._evil for peer in view.neighbours
        )


def _anyone(peer: PeerId) -> bool:
    return True
