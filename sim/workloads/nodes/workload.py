"""Spread of a policy over whole nodes (L1 to L3).

Each has run file, membership, DHT, gossip and SHARDCAST, as production has.

All nodes join through the origin and the first receiver, as a command line would tell them;
the origin publishes once it knows them all, a version each ``interval``. Nothing is arranged
behind the nodes' backs: the roster is what heartbeats say, announcements go by gossip.
Parameters are those of `sim.workloads.participants` (without liars and drippers) and
``policy_bytes``, ``chunk_bytes``, ``versions``, ``interval``, ``first_at``; for real lines also
``queue`` (seconds) and ``congestion`` (a name), see `sim.studies.lab.machines.EmulationConfig`.

At level 2 a scenario that names ``nat_share`` has routers: nodes listen at IP addresses, ask
one another whether they can be dialled, keep reservations at relays and punch, all by
production's code. With ``relay_dies_at`` the machine that keeps most reservations, other than
the origin, is killed at that second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from p2p import SwarmConfig, SwarmHost, open_host
from p2p.host import Host
from p2p.multiaddr import Multiaddr
from p2p.node.node import Node, open_node, run_roles
from p2p.node.plugins import load_roles
from p2p.node.role import Role
from p2p.node.wiring import is_member, relay_offers, seek_relays
from p2p.reach.core.relays import WANTED
from p2p.reach.mapping import ReachConfig
from p2p.reach.nat import open_nat
from sim.net.link import PAYLOAD_SHARE
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.nodes.deployment import LINGER, Deployment
from sim.workloads.nodes.metrics import HealthLog, measure
from sim.workloads.participants import ORIGIN, PARTICIPANT_PARAMETERS

PORT: Final = 4001
"""Port at which nodes listen where there are routers."""
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
        "relay_dies_at",
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
        dies_at = scenario.parameter("relay_dies_at", math.inf)
        while swarm.simulation.now < scenario.duration and not self._is_over(swarm):
            await swarm.sleep(LOOK)
            self._plot(swarm)
            if swarm.simulation.now >= dies_at:
                dies_at = math.inf
                [(relay, _)] = self._reservations(swarm).most_common(1)
                swarm.kill(relay)
        await swarm.sleep(LINGER)
        metrics = measure(deployment, self._logs(swarm), [node.name for node in swarm.alive])
        return metrics | self._measure_routers(swarm)

    # A node in a simulation

    async def _live(self, machine: SimNode) -> None:
        deployment, name = self._deployment, machine.name
        await machine.world.sleep_until(deployment.participant(name).joins)
        config = deployment.config(name)
        roles = load_roles(deployment.roles(name), config.role)
        siblings = [other for other in machine.siblings if not other.endpoint.spec.nat]
        doors = [self._place(other) for other in siblings[:2] if other is not machine]
        nodes: list[Node] = []
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            host = await enter(self._open_host(machine))
            nat = None
            if self._has_routers:
                assert isinstance(host, SwarmHost)
                nat = await enter(
                    open_nat(
                        host,
                        machine.world.signer,
                        replace(config.nat, reach=ReachConfig(map_port=False)),
                        is_member=partial(is_member, nodes),
                        offers=partial(relay_offers, nodes),
                        seek=partial(seek_relays, nodes),
                        network=machine.network,
                    )
                )
            node = await enter(
                open_node(
                    machine.world, host, config, document=deployment.run.document,
                    bootstrap=doors, nat=nat,
                )
            )  # fmt: skip
            nodes.append(node)
            self._open[name].append((node, roles))
            await run_roles(node, roles)

    @property
    def _has_routers(self) -> bool:
        return self._scenario.level == 2 and "nat_share" in self._scenario.parameters

    def _place(self, machine: SimNode) -> Multiaddr:
        if not self._has_routers:
            return machine.addr
        return Multiaddr.tcp(machine.endpoint.ip, PORT).with_peer(machine.peer_id)

    def _open_host(self, machine: SimNode) -> AbstractAsyncContextManager[Host]:
        if self._scenario.level == 1:
            return machine.open_host()
        place = f"/ip4/0.0.0.0/tcp/{PORT}" if self._has_routers else "/memory/0"
        return open_host(
            network=machine.network, world=machine.world, listen=[place], strict=True,
            config=SwarmConfig(punch=self._has_routers),
        )  # fmt: skip

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

    def _reservations(self, swarm: Swarm) -> Counter[str]:
        """Count the reservations that living nodes keep, by the relay's name."""
        names = {machine.peer_id: machine.name for machine in swarm.alive}
        return Counter(
            names[relay]
            for machine in swarm.alive
            for node, _ in self._open[machine.name][-1:]
            for relay in (node.nat.relays if node.nat else ())
            if relay in names and names[relay] != ORIGIN
        )

    def _measure_routers(self, swarm: Swarm) -> dict[str, float]:
        """Reservations of nodes that nobody can dial, and connections that need no relay."""
        if not self._has_routers:
            return {}
        nodes = [self._open[machine.name][-1][0] for machine in swarm.alive]
        living = {node.peer_id for node in nodes}
        closed = [node.nat for node in nodes if node.nat and node.nat.needs_relays]
        doors = sum(relay in living for nat in closed for relay in nat.relays)
        paths = [
            node.nat.path(peer) for node in nodes if node.nat for peer in node.host.connected
        ]
        return {
            "closed_share": round(len(closed) / max(1, len(nodes)), 4),
            "reserved_share": round(doors / max(1, WANTED * len(closed)), 4),
            "direct_share": round(paths.count("direct") / max(1, len(paths)), 4),
        }

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
