"""Lots, appeals, and validators that are away, together: a run with three bad ones of six.

One accepts whatever its accomplice hands in and refuses honest work one time in twenty, one
accepts all without a look, one takes the question and never answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import trio

from p2p.host import Stream
from p2p.node.node import Node
from roles.demo.status import SwarmStatus
from roles.protocol.core.lots import COMMIT_PROTOCOL, LOT_PROTOCOL
from roles.protocol.core.messages import OFFER_PROTOCOL, ROLLOUT_PROTOCOL
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.run.core.proposal import Proposal, decode_proposal_untrusted
from roles.run.core.trust import TrustTerms
from roles.trainer.watch import PROPOSAL
from roles.validator.role import Validator
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine

TRUST = TrustTerms(share=0.25, probation=8, window=8, validators=2, beacon=0.5)
HORIZON = 1500.0


class Silent(Validator):
    """Takes the question and never answers."""

    name: ClassVar[str] = "validator"

    async def run(self, node: Node) -> None:
        async def hang(_: Stream) -> None:
            await trio.sleep_forever()

        asked = (ROLLOUT_PROTOCOL, OFFER_PROTOCOL, COMMIT_PROTOCOL, LOT_PROTOCOL)
        for protocol in asked[1:]:
            node.host.serving(protocol, hang).__enter__()
        with node.host.serving(asked[0], hang):
            await trio.sleep_forever()


class Court(spine.Spine):
    """A run with lots and appeals that goes on until so many validators were named, and some
    steps more."""

    def __init__(self, bad: Mapping[str, str], honest: int, **others: str) -> None:
        judges = {f"validator-{number}": "validator" for number in range(1, honest + 1)}
        workers = {f"inference-{number}": "inference" for number in range(1, 5)}
        super().__init__(
            {"relay-1": "none", "trainer-1": "trainer", **judges, **bad, **workers, **others}
        )
        self.bad = bad
        self.found: dict[str, tuple[float, str]] = {}
        """When each was named, and for what."""

    def make_run(self, swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in self._cast if "validator" in name)
        terms = super().make_run(swarm, recipe).terms
        terms = replace(terms, validators=judges, trust=TRUST, appeals=True)
        return sign_run(terms, keys.signer("owner"))

    async def _proposal(self, swarm: Swarm) -> Proposal | None:
        disk = swarm.nodes["trainer-1"].world.disk
        if await disk.size(PROPOSAL) is None:
            return None
        return decode_proposal_untrusted(await disk.read(PROPOSAL))

    async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
        watcher, after = swarm.nodes["relay-1"].world, 0
        keys = swarm.simulation.keys
        names = {keys.signer(name).peer_id: name for name in self._cast}
        while swarm.simulation.now < scenario.duration:
            await watcher.sleep(spine.LOOK)
            step = self._status(recipe).trainer.get("step", -1)
            proposal = await self._proposal(swarm)
            for who, why in () if proposal is None else proposal.drop:
                if names[who] not in self.found:
                    self.found[names[who]] = swarm.simulation.now, why
                    after = step
            if len(self.found) >= len(self.bad) and step >= after + 4:
                break
        return self._status(recipe)


def perform(court: Court, seed: int = 7) -> Mapping[str, Any]:
    scenario = load_scenario("spine").with_changes(nodes=len(court._cast), duration=HORIZON)
    changes = {
        "steps": 2000,
        "kill_at_step": 9999,
        "groups": 32,
        "submission": 1,
        "group_size": 4,
    }
    scenario = replace(scenario, parameters={**scenario.parameters, **changes})

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            await court.run(swarm, scenario)
            return {**court.health(), "now": simulation.now}

    outcome = run_simulation(main, seed=seed, horizon=HORIZON + 60)
    assert outcome.value is not None
    return outcome.value


def test_a_silent_judge_is_passed_over_and_holds_up_nobody_for_long() -> None:
    court = Court({"validator-silent": f"{__name__}:Silent"}, honest=3)
    health = perform(court)
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert trainer["step"] >= 4
    assert list(court.found) == ["validator-silent"]
