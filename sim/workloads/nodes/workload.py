"""Spread of a policy over whole nodes (L1 to L3).

Each has run file, membership, DHT, gossip and SHARDCAST, as production has.

All nodes join through the origin and the first receiver, as a command line would tell them;
the origin publishes once it knows them all, a version each ``interval``. Nothing is arranged
behind the nodes' backs: the roster is what heartbeats say, announcements go by gossip.
Parameters are those of `sim.workloads.participants` (without liars and drippers) and
``policy_bytes``, ``chunk_bytes``, ``versions``, ``interval``, ``first_at``; for real lines also
``queue`` (seconds) and ``congestion`` (a name), see `sim.studies.lab.machines.EmulationConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Final

from p2p import open_host
from p2p.host import Host
from p2p.node.node import Node, open_node, run_roles
from p2p.node.plugins import load_roles
from p2p.node.role import Role
from sim.net.link import PAYLOAD_SHARE
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.nodes.deployment import LINGER, Deployment
from sim.workloads.nodes.metrics import HealthLog, measure
from sim.workloads.participants import PARTICIPANT_PARAMETERS

LOOK: Final = 0.5
"""Virtual seconds between looks at who holds what."""


class WholeNodes:
    """A `sim.run.scenario.Workload` for levels 1 to 3."""

    levels: ClassVar[Sequence[int]] = (1, 2, 3)
    parameters: ClassVar[Sequence[str]] = (
        *PARTICIPANT_PARAMETERS,
        "policy_bytes",
        "versions",
        "first_at",
        "interval",
        "chunk_bytes",
        "congestion",
        "queue",
    )

    def __init__(self) -> None:
        self._open: dict[str, list[tuple[Node, Sequence[Role]]]] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play in a simulation until all hold the last policy, or the duration is
        over."""
        self._scenario = scenario
        self._deployment = deployment = Deployment(
            scenario, swarm.simulation.seed, swarm.simulation.keys
        )
        for name, participant in deployment.participants.items():
            self._open[name] = []
            swarm.add(name, self._live, link=participant.link)
        while swarm.simulation.now < scenario.duration and not self._is_over(swarm):
            await swarm.sleep(LOOK)
            self._plot(swarm)
        await swarm.sleep(LINGER)
        return measure(deployment, self._logs(swarm), [node.name for node in swarm.alive])

    # A node in a simulation

    async def _live(self, machine: SimNode) -> None:
        deployment, name = self._deployment, machine.name
        await machine.world.sleep_until(deployment.participant(name).joins)
        config = deployment.config(name)
        roles = load_roles(deployment.roles(name), config.role)
        doors = [other.addr for other in machine.siblings[:2] if other is not machine]
        async with (
            self._open_host(machine) as host,
            open_node(
                machine.world, host, config, document=deployment.run.document, bootstrap=doors
            ) as node,
        ):
            self._open[name].append((node, roles))
            await run_roles(node, roles)

    def _open_host(self, machine: SimNode) -> AbstractAsyncContextManager[Host]:
        if self._scenario.level == 1:
            return machine.open_host()
        return open_host(
            network=machine.network, world=machine.world, listen=["/memory/0"], strict=True
        )

    # What came of it

    def _holders(self, swarm: Swarm) -> list[str]:
        """Return the living nodes that hold the last policy."""
        last = self._deployment.versions
        lives = {node.name: self._open[node.name] for node in swarm.alive}
        return [
            name
            for name, nodes in lives.items()
            if nodes and nodes[-1][0].shardcast.newest >= last
        ]

    def _is_over(self, swarm: Swarm) -> bool:
        now = swarm.simulation.now
        return now >= self._deployment.busy_until and len(self._holders(swarm)) == len(
            swarm.alive
        )

    def _plot(self, swarm: Swarm) -> None:
        swarm.simulation.plot("nodes that hold the last policy", len(self._holders(swarm)))

    def _logs(self, swarm: Swarm) -> dict[str, HealthLog]:
        logs = {name: HealthLog() for name in self._open}
        for name, lives in self._open.items():
            logs[name].line_bytes = round(swarm.nodes[name].endpoint.sent / PAYLOAD_SHARE)
            for node, roles in lives:
                logs[name].begin_life()
                logs[name].hear(node.health(roles))
        return logs
