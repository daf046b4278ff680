"""The demo's nodes, roles and configuration in virtual time, with the fake engine. (L1)

One relay-only node that knows the run, a trainer, a validator, two honest inference nodes and
one that cheats. One honest node is killed in the middle and started again on its disk; the run
must go on, nothing accepted may be lost, no policy version may go back. The metrics have the
names of the demo's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from p2p.node.config import NodeConfig
from p2p.node.node import Node, run_roles
from p2p.node.plugins import load_roles
from p2p.node.role import Role
from proofs.checks import Limits
from roles.contract import Run
from roles.contract.core.file import Delivery
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.trust import TrustTerms
from roles.own.status import SwarmStatus
from roles.rl.learner import FILE, LearnerConfig, write_learner
from sim.node.swarm import NodeMain, SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.dht import STAMP_BITS
from sim.workloads.run_file import open_member, write_run
from sim.workloads.supervision import supervise

CAST: Final[Mapping[str, str]] = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
    "cheat-1": "roles.demo.cheats:Cheat",
}
TRUST: Final = TrustTerms(share=0.25, probation=8, window=4)
"""Trust terms of a short run, as in the demo: a newcomer owes little, and more is checked."""
LOOK: Final = 0.5
"""Virtual seconds between looks at the swarm."""


class Spine:
    """The demo's nodes, one of which is killed and started again half-way."""

    parameters: ClassVar[Sequence[str]] = (
        "steps",
        "groups",
        "group_size",
        "submission",
        "kill_at_step",
        "down_seconds",
    )

    def __init__(self, cast: Mapping[str, str] = CAST) -> None:
        """Begin with the role of every node in ``cast``; its first node only relays, and knows
        the run.

        Every further node of a larger scenario is an honest inference node.
        """
        self._cast = dict(cast)
        self._open: dict[str, tuple[Node, Sequence[Role]]] = {}
        self._run: Run | None = None
        self._config = NodeConfig()
        self._learner = b""
        self._swarm: Swarm | None = None

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play until all nodes hold the last policy, or the duration is over."""
        self._swarm = swarm
        cast = dict(self._cast)
        for number in range(3, scenario.nodes - len(cast) + 3):
            cast[f"inference-{number}"] = "inference"
        sampling = _sampling(scenario)
        self._learner = write_learner(_learner(scenario)).encode()
        self._run = self.make_run(swarm, sampling)
        self._config = _config()
        for name, role in cast.items():
            swarm.add(name, self._life(role), link=scenario.link)
        status = await self._play(swarm, scenario, sampling)
        figures = {key: value for key, value in status.figures().items() if value is not None}
        return {**figures, "done": int(status.done), "seconds": round(swarm.simulation.now, 3)}

    def make_run(self, swarm: Swarm, sampling: SamplingTerms) -> Run:
        """Return the signed run."""
        return write_run(
            swarm.simulation.keys,
            "spine",
            "trainer-1",
            "validator-1",
            sampling=sampling,
            limits=replace(Limits.fp32(), end_probability=1e-12),
            delivery=Delivery(chunk_bytes=8 * 1024),
            trust=TRUST,
        )

    def _life(self, role: str) -> NodeMain:
        async def process(machine: SimNode) -> None:
            assert self._run is not None
            roles = load_roles((role,), self._config.role)
            await machine.world.disk.write(FILE, self._learner)
            async with open_member(machine, self._config, self._run) as node:
                self._open[machine.name] = node, roles
                await run_roles(node, roles)

        async def live(machine: SimNode) -> None:
            await supervise(machine, process)

        return live

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        watcher = swarm.nodes["relay-1"].world
        kill_at = scenario.parameter("kill_at_step", 4)
        status = self._status(sampling)
        killed = False
        while swarm.simulation.now < scenario.duration and not status.done:
            await watcher.sleep(LOOK)
            status = self._status(sampling)
            if not killed and status.trainer.get("step", -1) >= kill_at:
                killed = True
                swarm.kill("inference-1", torn=True)
                await watcher.sleep(scenario.parameter("down_seconds", 2.0))
                swarm.restart("inference-1")
        return status

    def health(self) -> dict[str, Mapping[str, Any]]:
        """Return the health of every node."""
        return {name: node.health(roles) for name, (node, roles) in self._open.items()}

    def _status(self, sampling: SamplingTerms) -> SwarmStatus:
        return SwarmStatus(self.health(), sampling.submission * sampling.group_size)


def _sampling(scenario: Scenario) -> SamplingTerms:
    return SamplingTerms(
        steps=int(scenario.parameter("steps", 12)),
        group_size=int(scenario.parameter("group_size", 8)),
        submission=int(scenario.parameter("submission", 4)),
        max_new_tokens=12,
    )


def _learner(scenario: Scenario) -> LearnerConfig:
    groups = int(scenario.parameter("groups", 8))
    return LearnerConfig(groups=groups, rate=8e-4, evaluate_every=0)


def _config() -> NodeConfig:
    config = NodeConfig()
    return replace(
        config,
        dht=replace(config.dht, difficulty=STAMP_BITS),
        membership=replace(config.membership, interval=1.0),
        role={"trainer": {"checkpoint_every": 3}},
    )
