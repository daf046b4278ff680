"""Who is alive: nobody believes older words after newer ones, and in the end everybody knows
everybody.

Each node says a policy version that grows with time; an observer must never see it go back.
Sequence numbers must never be used twice, over all lives on one disk. When the storm is over
some nodes vanish for good, and all survivors must learn of just these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from p2p.identity import PeerId
from p2p.membership import Change, MemberEvent, Membership, MembershipConfig, open_membership
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from tests.simulation.storms import Broken

BOOTSTRAP: Final = 3
SPEAK: Final = 7.0  # seconds between two policies that a node says it has


class MembershipStorm:
    """A `sim.run.scenario.Workload`."""

    def __init__(self) -> None:
        self._open: dict[str, Membership] = {}
        self._believed: dict[tuple[str, PeerId], int] = {}
        self._numbers: dict[str, int] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        swarm.on_death.append(self._forget)
        swarm.on_return.append(self._returned)
        for number in range(scenario.nodes):
            swarm.add(f"n{number}", self._live, link=scenario.link)
        swarm.every(SPEAK, lambda: self._speak(swarm))
        swarm.every(1.0, self._check_numbers)
        await swarm.sleep_until(scenario.parameter("last_deaths", 110.0))
        for number in range(BOOTSTRAP, BOOTSTRAP + scenario.nodes // 8):
            swarm.kill(f"n{number}", silent=True)
        await swarm.sleep_until(scenario.duration)
        return self._measure(swarm)

    async def _live(self, node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_membership(
                node.world, host, MembershipConfig(), may=lambda peer: True
            ) as membership,
        ):
            membership.on_change(lambda event: self._hear(node.name, event))
            membership.me.update(policy=int(node.simulation.now))
            self._open[node.name] = membership
            await membership.join(
                [other.addr for other in node.siblings[:BOOTSTRAP] if other is not node]
            )
            await trio.sleep_forever()

    def _speak(self, swarm: Swarm) -> None:
        for membership in self._open.values():
            membership.me.update(policy=int(swarm.simulation.now))

    def _hear(self, observer: str, event: MemberEvent) -> None:
        place = observer, event.member.peer
        if event.change is Change.FORGOTTEN:
            self._believed.pop(place, None)
            return
        before = self._believed.get(place, -1)
        if event.member.policy < before:
            raise Broken(
                f"{observer} believes policy {event.member.policy} of a peer after {before}"
            )
        self._believed[place] = event.member.policy

    def _check_numbers(self) -> None:
        for name, membership in self._open.items():
            number = membership._core._local.seqno
            if number < self._numbers.get(name, 0):
                raise Broken(
                    f"{name} uses sequence number {number} after {self._numbers[name]}"
                )
            self._numbers[name] = number

    def _forget(self, node: SimNode) -> None:
        self._open.pop(node.name, None)
        for place in [place for place in self._believed if place[0] == node.name]:
            del self._believed[place]

    def _returned(self, node: SimNode) -> None:
        if not node.disk.paths():
            self._numbers.pop(node.name, None)  # its numbers are gone with its disk

    def _measure(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        alive = {node.peer_id: node.name for node in swarm.alive}
        seen = {
            name: {member.peer for member in membership.members()}
            for name, membership in self._open.items()
        }
        known = sum(len(peers & alive.keys()) for peers in seen.values())
        return {
            "coverage": round(known / max(1, len(alive) * (len(alive) - 1)), 4),
            "ghosts": sum(len(peers - alive.keys()) for peers in seen.values()),
            "alive": len(alive),
        }
