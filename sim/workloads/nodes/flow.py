"""The same question at L0: the real forest, with relays reduced to their flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from p2p.errors import ConfigError
from p2p.shardcast import PolicyVersion, RosterEntry
from p2p.shardcast.forest import Forest, Roster, build_forest
from p2p.shardcast.layout import span_for
from sim.kernel.simulation import Simulation
from sim.net.link import MBIT
from sim.run.scenario import Scenario
from sim.workloads.broadcast import Broadcast, FlowNode
from sim.workloads.nodes.deployment import Deployment
from sim.workloads.nodes.metrics import bound_seconds
from sim.workloads.participants import ORIGIN


class PolicyFlow(Broadcast):
    """One policy over the lines, names and claims of a deployment: no faults, no latecomers,
    nothing else sent."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def run_bare(
        self, simulation: Simulation, scenario: Scenario
    ) -> Mapping[str, float | int | str]:
        """Set up, let it flow, and measure under the names of the other levels."""
        deployment = self._deployment
        if scenario.faults or any(
            participant.joins for participant in deployment.participants.values()
        ):
            raise ConfigError(
                f"scenario {scenario.name}: at level 0 nothing goes wrong and no node is late"
            )
        chunk_bytes = deployment.chunk_bytes or span_for(deployment.policy_bytes)
        parameters = {
            "chunks": -(-deployment.policy_bytes // chunk_bytes),
            "chunk_bytes": chunk_bytes,
            "deaths": 0,
        }
        changed = replace(scenario, nodes=len(deployment.receivers), parameters=parameters)
        flowed = super().run_bare(simulation, changed)
        return {
            "hold_newest": flowed["completed"],
            "published": 1,
            "seconds_50": flowed["seconds_50"],
            "seconds_99": flowed["seconds_99"],
            "seconds_100": flowed["seconds_last"],
            "bound_seconds": round(bound_seconds(deployment, deployment.receivers), 3),
            "origin_policies_sent": flowed["origin_policies_sent"],
            "duplicate_share": flowed["duplicate_share"],
        }

    def _make_node(self, name: str, scenario: Scenario) -> FlowNode:
        receiver = self._deployment.receivers[int(name[1:])]
        return self._as_deployed(super()._make_node(name, scenario), receiver)

    def _make_origin(self, scenario: Scenario) -> FlowNode:
        return self._as_deployed(super()._make_origin(scenario), ORIGIN)

    def _as_deployed(self, node: FlowNode, name: str) -> FlowNode:
        node.name, node.peer = name, self._deployment.peer(name)
        node.endpoint.set_link(self._deployment.participant(name).link)
        return node

    def _plant(self) -> Forest:
        deployment = self._deployment
        entries = [
            RosterEntry(deployment.peer(name), deployment.participant(name).claim * MBIT / 8)
            for name in deployment.receivers
        ]
        signer = self._simulation.keys.signer(ORIGIN)
        return build_forest(
            Roster.sign(signer, deployment.run.id, 1, entries), PolicyVersion(1)
        )
