"""Base of the hostile scenarios: honest members, and members that attack them (L1).

Theory of operation
-------------------
All nodes run the production services and settle as one swarm. The traffic of a quiet stretch is
measured; then, at ``attack_at``, the hostile members begin: they have been admitted, they are
known, some of them are neighbours of honest nodes. What they send are the real messages of the
wire. From then on honest nodes are looked at, every second for their neighbours and less often
for their whole view; the least that any honest node ever had is the figure, since one eclipsed
node is one victim.

No node comes or goes after `ARRIVAL`, so every honest node looked at has been up for four
intervals at least. Hostile members that behave are chosen like others: a node may by chance
have fewer than `ENOUGH` honest neighbours before anything was done to it. It is counted
(``unlucky``), and counts in the figure from `RECOVERY` seconds after the beginning of the
attack, if it has not found enough of them earlier.

Parameters: ``hostile_share`` of the nodes, ``attack_at`` and ``quiet_from`` in virtual seconds.
The attack lasts until the scenario's duration ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

import trio

from p2p.identity import PeerId
from p2p.membership import Membership, MembershipConfig, open_membership
from p2p.multiaddr import Multiaddr
from sim.node.host import SimHost
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario

HONEST: Final = "n"
HOSTILE: Final = "h"
BOOTSTRAP: Final = 3
"""Honest nodes through which all others join."""
ARRIVAL: Final = 20.0
"""Seconds over which the nodes come."""
LOOK: Final = 1.0
"""Seconds between looks at neighbours: less than an interval between heartbeats, so that no gap
is missed."""
VIEWS: Final = 5
"""Looks at neighbours for each look at whole views, which are long."""

ENOUGH: Final = 3
"""Honest neighbours below which a node is as good as surrounded."""
RECOVERY: Final = 60.0
"""Seconds of attack after which also those must have enough that had not when it began: their
hostile neighbours have lost their credit by then."""

Metrics = dict[str, float | int | str]


class HostileWorkload:
    """Honest nodes and hostile members in one swarm; a subclass says what the hostile do."""

    def __init__(self) -> None:
        self.scenario = Scenario(name="hostile", caption="", workload="")
        self.hosts: dict[str, SimHost] = {}
        self.views: dict[str, Membership] = {}
        self.hostile: dict[PeerId, None] = {}
        """Identities of the attackers."""
        self.attack = trio.Event()
        """Set when the attack begins."""
        self._neighbours: list[int] = []
        self._unlucky: dict[str, None] = {}
        """Honest nodes that had too few honest neighbours when the attack began, and have had
        ever since."""
        self._unlucky_at_first = 0
        self._attack_at = 0.0
        self._shares: list[float] = []
        self._quiet_neighbours: list[int] = []
        self._quiet_shares: list[float] = []
        self._looks = 0

    # What a scenario adds.

    def configure(self) -> MembershipConfig:
        """Return the membership configuration of every node, honest or hostile."""
        return MembershipConfig(interval=self.scenario.parameter("interval", 5.0))

    def before_attack(self, swarm: Swarm) -> None:
        """Further behaviour of honest nodes from ``quiet_from`` on, for comparison."""

    async def be_honest(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Behaviour of an honest node beside membership."""
        await trio.sleep_forever()

    async def be_hostile(self, node: SimNode, host: SimHost, membership: Membership) -> None:
        """Behaviour of a hostile member from the beginning of the attack."""
        await trio.sleep_forever()

    async def run_attack(self, swarm: Swarm) -> None:
        """Run the rest until the duration ends."""
        await swarm.sleep_until(self.scenario.duration)

    def figures(self, swarm: Swarm) -> Metrics:
        """Metrics of this attack alone."""
        return {}

    # The play.

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Settle, measure the quiet, let the attack go on until the duration ends."""
        self.scenario = scenario
        hostile = max(1, round(scenario.nodes * scenario.parameter("hostile_share", 0.1)))
        attack_at = scenario.parameter("attack_at", 60.0)
        quiet_from = scenario.parameter("quiet_from", 40.0)
        for number in range(scenario.nodes):
            # The hostile come in between, as far as possible; the first are whom all bootstrap
            # from.
            due = (number + 1) * hostile // scenario.nodes > number * hostile // scenario.nodes
            name = f"{HOSTILE if due and number >= BOOTSTRAP else HONEST}{number}"
            node = swarm.add(name, self._live, link=scenario.link)
            if name.startswith(HOSTILE):
                self.hostile[node.peer_id] = None
            await swarm.sleep(min(ARRIVAL, quiet_from / 2) / scenario.nodes)
        await swarm.sleep_until(quiet_from)
        self.before_attack(swarm)
        before = self._sent(swarm)
        swarm.every(LOOK, lambda: self._look(swarm))
        await swarm.sleep_until(attack_at)
        quiet = (self._sent(swarm) - before) / (attack_at - quiet_from)
        before = self._sent(swarm)
        few = [
            name for name in self.honest_names(swarm) if self.honest_neighbours(name) < ENOUGH
        ]
        self._unlucky, self._unlucky_at_first = dict.fromkeys(few), len(few)
        self._attack_at = attack_at
        self.attack.set()
        await self.run_attack(swarm)
        rate = (self._sent(swarm) - before) / max(LOOK, swarm.simulation.now - attack_at)
        honest = sum(name.startswith(HONEST) for name in swarm.nodes)
        return {
            "honest_neighbours_least": min(self._neighbours, default=0),
            "honest_neighbours_mean": _mean(self._neighbours),
            "unlucky": self._unlucky_at_first,
            "honest_share_least": round(min(self._shares, default=0.0), 4),
            "honest_share_mean": _mean(self._shares),
            "quiet_neighbours_least": min(self._quiet_neighbours, default=0),
            "quiet_share_least": round(min(self._quiet_shares, default=0.0), 4),
            "quiet_bytes_per_second": round(quiet / honest, 1),
            "attack_bytes_per_second": round(rate / honest, 1),
            "traffic_ratio": round(rate / max(1.0, quiet), 3),
            "hostile": len(self.hostile),
            **self.figures(swarm),
        }

    async def _live(self, node: SimNode) -> None:
        async with (
            node.open_host() as host,
            open_membership(node.world, host, self.configure(), may=_anyone) as membership,
        ):
            self.hosts[node.name], self.views[node.name] = host, membership
            async with trio.open_nursery() as nursery:
                nursery.start_soon(membership.join, self._bootstrap(node))
                if node.name.startswith(HOSTILE):
                    await self.attack.wait()
                    await self.be_hostile(node, host, membership)
                else:
                    await self.be_honest(node, host, membership)

    def _bootstrap(self, node: SimNode) -> list[Multiaddr]:
        return [other.addr for other in node.siblings[:BOOTSTRAP] if other is not node]

    def is_honest(self, peer: PeerId) -> bool:
        """Return True if the peer is one of the honest nodes."""
        return peer not in self.hostile

    def honest_names(self, swarm: Swarm) -> list[str]:
        """Return the names of the honest nodes that run."""
        return [
            name for name in self.views if name.startswith(HONEST) and swarm.nodes[name].alive
        ]

    def honest_neighbours(self, name: str) -> int:
        """Return how many honest neighbours a node has now."""
        return sum(map(self.is_honest, self.views[name].neighbours))

    def _look(self, swarm: Swarm) -> None:
        under_attack = self.attack.is_set()
        neighbours = self._neighbours if under_attack else self._quiet_neighbours
        shares = self._shares if under_attack else self._quiet_shares
        names = self.honest_names(swarm)
        held = {name: self.honest_neighbours(name) for name in names}
        found = list(held.values())
        neighbours += [
            count for name, count in held.items() if not self._is_excused(name, count, swarm)
        ]
        swarm.simulation.plot("honest neighbours, least", min(found))
        swarm.simulation.plot("honest neighbours, mean", statistics.fmean(found))
        swarm.simulation.plot("bytes sent by the honest", self._sent(swarm))
        self._looks += 1
        if self._looks % VIEWS == 0:
            for name in names:
                members = [member.peer for member in self.views[name].members()]
                shares.append(sum(map(self.is_honest, members)) / max(1, len(members)))

    def _is_excused(self, name: str, count: int, swarm: Swarm) -> bool:
        """Return True if a node has few neighbours by chance and has had no time to find
        others."""
        if name not in self._unlucky:
            return False
        if count >= ENOUGH or swarm.simulation.now >= self._attack_at + RECOVERY:
            del self._unlucky[name]
        return name in self._unlucky

    def _sent(self, swarm: Swarm) -> int:
        return sum(
            node.endpoint.sent for name, node in swarm.nodes.items() if name.startswith(HONEST)
        )


def _mean(values: list[int] | list[float]) -> float:
    return round(statistics.fmean(values), 4) if values else 0.0


def _anyone(peer: PeerId) -> bool:
    return True
