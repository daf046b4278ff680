"""Participants with their lines, keys, configuration and run file: the same on every level.

Keys follow from the seed, so rosters, and with them relay forests, are the same on every level
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.node.config import NodeConfig
from p2p.node.tables import read_table
from roles.contract.core.file import Delivery
from roles.rl.recipes import SORTING
from sim.kernel.keys import KeyRing, derived_rng
from sim.net.link import MBIT
from sim.run.scenario import Scenario
from sim.workloads.dht import STAMP_BITS
from sim.workloads.participants import ORIGIN, Participant, draw_participants
from sim.workloads.run_file import write_run

WITNESS: Final = "sim.workloads.nodes.roles:Witness"
PUBLISHER: Final = "sim.workloads.nodes.roles:ScheduledPublisher"
HEARTBEAT: Final = 2.0
"""Seconds between heartbeats: so few nodes can afford it, and all are known sooner."""
FIRST_AT: Final = 10.0
"""Second of the first publication: by then all have joined."""
LINGER: Final = 2.0
"""Seconds after the end for the last healths to come in; for latecomers among the bytes, on all
levels."""


class Deployment:
    """The nodes of one scenario and seed."""

    def __init__(self, scenario: Scenario, seed: int, keys: KeyRing) -> None:
        """Draw the participants of a scenario.

        Raises:
            ConfigError: The scenario wants nodes that are not whole and honest.
        """
        self.participants = draw_participants(scenario, derived_rng(seed, "swarm", "links"))
        if not all(participant.honest for participant in self.participants.values()):
            raise ConfigError(
                f"scenario {scenario.name}: whole nodes neither lie nor drip; use Policies"
            )
        self.policy_bytes = int(scenario.parameter("policy_bytes", 4_000_000))
        self.versions = int(scenario.parameter("versions", 1))
        self.chunk_bytes = int(scenario.parameter("chunk_bytes", 0))
        """Chunk size in its run file; 0 lets the origin choose."""
        self._scenario = scenario
        self._seed = seed
        self._keys = keys
        self.run = write_run(
            keys,
            scenario.name,
            ORIGIN,
            ORIGIN,
            model=SORTING,
            delivery=Delivery(chunk_bytes=self.chunk_bytes),
        )

    @property
    def receivers(self) -> list[str]:
        """Names of all nodes but the origin."""
        return [name for name in self.participants if name != ORIGIN]

    @property
    def busy_until(self) -> float:
        """Second at which the last fault is over and all latecomers have come."""
        faults = [fault.at + fault.seconds for fault in self._scenario.faults]
        return max([participant.joins for participant in self.participants.values()] + faults)

    def peer(self, name: str) -> PeerId:
        return self._keys.signer(name).peer_id

    def participant(self, name: str) -> Participant:
        """Return how a node takes part."""
        return self.participants[name]

    def roles(self, name: str) -> tuple[str, ...]:
        """Return a node's roles, as the command line wants them."""
        return (PUBLISHER,) if name == ORIGIN else (WITNESS,)

    def table(self, name: str) -> Mapping[str, Mapping[str, object]]:
        """Return a node's configuration, as its TOML file has it."""
        role: dict[str, object] = {
            "witness": {"upload": round(self.participants[name].claim * MBIT / 8)}
        }
        if name == ORIGIN:
            role = {"publisher": self._schedule()}
        return {
            "membership": {"interval": HEARTBEAT},
            "dht": {"difficulty": STAMP_BITS},
            "role": role,
        }

    def config(self, name: str) -> NodeConfig:
        """Return a node's configuration, read from its `table` as production reads its file."""
        return read_table(NodeConfig, self.table(name), f"the configuration of {name}")

    def _schedule(self) -> dict[str, object]:
        return {
            "seed": self._seed,
            "receivers": sum(self.participants[name].joins == 0 for name in self.receivers),
            "first_at": float(self._scenario.parameter("first_at", FIRST_AT)),
            "interval": float(self._scenario.parameter("interval", 20.0)),
            "versions": self.versions,
            "policy_bytes": self.policy_bytes,
        }
