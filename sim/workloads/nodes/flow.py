"""The same question at L0: the real forest over the same lines, with relays reduced to their flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from p2p.errors import ConfigError
from p2p.shardcast import PolicyVersion, RosterEntry
from p2p.shardcast.forest import Forest, Roster, build_forest
from sim.link import MBIT
from sim.scenario import Scenario
from sim.simulation import Simulation
from sim.workloads.broadcast import Broadcast, FlowNode
from sim.workloads.nodes.cast import Cast
from sim.workloads.nodes.tale import bound_seconds
from sim.workloads.parts import ORIGIN


class Flow(Broadcast):
    """One policy over the lines, names and claims of a cast: no faults, nobody late, nothing else sent."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast

    def run_bare(self, simulation: Simulation, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Set up, let it flow, and measure under the names of the other levels."""
        cast = self._cast
        if scenario.faults or any(part.joins for part in cast.parts.values()):
            raise ConfigError(f"scenario {scenario.name}: at level 0 nothing goes wrong and nobody is late")
        chunk_bytes = int(scenario.parameter("chunk_bytes", 65_536))
        parameters = {"chunks": -(-cast.policy_bytes // chunk_bytes), "chunk_bytes": chunk_bytes, "deaths": 0}
        changed = replace(scenario, nodes=len(cast.receivers), parameters=parameters)
        flowed = super().run_bare(simulation, changed)
        return {
            "hold_newest": flowed["completed"],
            "published": 1,
            "seconds_50": flowed["seconds_50"],
            "seconds_99": flowed["seconds_99"],
            "seconds_100": flowed["seconds_last"],
            "bound_seconds": round(bound_seconds(cast, cast.receivers), 3),
            "origin_policies_sent": flowed["origin_policies_sent"],
            "duplicate_share": flowed["duplicate_share"],
        }

    def _make_node(self, name: str, scenario: Scenario) -> FlowNode:
        receiver = self._cast.receivers[int(name[1:])]
        return self._as_cast(super()._make_node(name, scenario), receiver)

    def _make_origin(self, scenario: Scenario) -> FlowNode:
        return self._as_cast(super()._make_origin(scenario), ORIGIN)

    def _as_cast(self, node: FlowNode, name: str) -> FlowNode:
        node.name, node.peer = name, self._cast.peer(name)
        node.endpoint.set_link(self._cast.part(name).link)
        return node

    def _plant(self) -> Forest:
        cast = self._cast
        entries = [RosterEntry(cast.peer(name), cast.part(name).claim * MBIT / 8) for name in cast.receivers]
        signer = self._simulation.keys.signer(ORIGIN)
        return build_forest(Roster.sign(signer, cast.run.id, 1, entries), PolicyVersion(1))
