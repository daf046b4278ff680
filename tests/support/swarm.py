"""Short runs of a whole swarm in virtual time, with whatever goes wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from roles.contract import Run, Terms, sign_run
from roles.contract.core.sampling import SamplingTerms
from roles.own.status import SwarmStatus
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine

CAST = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
}

Health = Mapping[str, Any]


class Play(spine.Spine):
    """The spine with a cast, terms and crashes of its own."""

    def __init__(
        self,
        cast: Mapping[str, str] = CAST,
        change: Callable[[Swarm, Terms], Terms] = lambda _, terms: terms,
    ) -> None:
        """``change`` makes other terms of the spine's."""
        super().__init__(cast)
        self._change = change

    def make_run(self, swarm: Swarm, sampling: SamplingTerms) -> Run:
        """What is played, signed. All validators of the cast are named."""
        keys = swarm.simulation.keys
        judges = [name for name in self._cast if name.startswith("validator")]
        terms = replace(
            super().make_run(swarm, sampling).terms,
            validators=tuple(keys.signer(name).peer_id for name in judges),
        )
        return sign_run(self._change(swarm, terms), keys.signer("owner"))

    async def disturb(self, swarm: Swarm) -> None:
        """What goes wrong, beginning when the first policy is out."""

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        watcher = swarm.nodes["relay-1"].world
        while self._status(sampling).trainer.get("step", -1) < 1:
            await watcher.sleep(spine.LOOK)
        await self.disturb(swarm)
        return await super()._play(swarm, scenario, sampling)


class Lingering(Play):
    """Goes on for a while when everything is done."""

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        await super()._play(swarm, scenario, sampling)
        await swarm.sleep(30)
        return self._status(sampling)


def perform(play: Play, seed: int = 7, **parameters: float) -> Health:
    """Every node's health at the end of a short run, and whether it ended well."""
    scenario: Scenario = load_scenario("spine").with_changes(nodes=len(play._cast))
    changes = {"steps": 4, "kill_at_step": 999, **parameters}
    duration = changes.pop("seconds", scenario.duration)
    scenario = replace(
        scenario, parameters={**scenario.parameters, **changes}, duration=duration
    )

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            metrics = await play.run(swarm, scenario)
            return {"done": metrics["done"], **play.health()}

    outcome = run_simulation(main, seed=seed, horizon=duration + 1000)
    assert outcome.value is not None
    return outcome.value


def finish(play: Play, seed: int = 7, **parameters: float) -> Health:
    """Perform a play that must end its run, and in which no honest worker may be rejected."""
    health = perform(play, seed, **parameters)
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
    return health


def roles_of(health: Health, kind: str) -> list[Mapping[str, Any]]:
    """What all roles of one kind say of themselves."""
    return [
        node["roles"][kind]
        for node in health.values()
        if isinstance(node, dict) and kind in node["roles"]
    ]


def trainer_of(health: Health) -> Mapping[str, Any]:
    """What the trainer says of itself."""
    return roles_of(health, "trainer")[0]


def scored(health: Health, name: str) -> dict[str, Any]:
    """What trainer and validators say of the places of one node."""
    peer = health[name]["peer"]
    records = [
        one["nodes"][peer]
        for kind in ("trainer", "validator")
        for one in roles_of(health, kind)
        if peer in one.get("nodes", {})
    ]
    reasons: dict[str, int] = {}
    for record in records:
        for reason, count in record["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "accepted": sum(record["accepted"] for record in records),
        "rejected": sum(record["rejected"] for record in records),
        "reasons": reasons,
    }


def nobody_honest_is_rejected(health: Health) -> bool:
    """Return True if no place of an inference node was rejected, and none was banned."""
    honest = [name for name in health if name.startswith("inference")]
    banned = trainer_of(health)["bans"]
    return all(
        not scored(health, name)["rejected"] and health[name]["peer"] not in banned
        for name in honest
    )


CHECKPOINTS = ("trainer/checkpoint", "trainer/checkpoint.previous")
