"""Validators that refuse everything, never answer, or stamp everything: each is found, its lots
go to the other one, the run goes on, and its owner is handed the next edition to sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio

from p2p.host import Stream
from p2p.node.node import Node
from proofs.checks import Reason, Verdict
from roles.demo.status import SwarmStatus
from roles.protocol.core.groups import OFFER_PROTOCOL, ROLLOUT_PROTOCOL, SignedVerdict
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.run.core.proposal import Proposal, decode_proposal_untrusted
from roles.trainer.watch import PROPOSAL
from roles.validator.judge import GAP, Judge
from roles.validator.role import Validator
from roles.validator.verdicts import Job, Ruling
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine
from tests.attacks.test_lying_validator import RubberStampingValidator

WORKERS = 4
HORIZON = 1200.0


class RefusingJudge(Judge):
    reason: ClassVar[str] = Reason.DRAW_DISTANCE.value

    async def judge(self, job: Job, weights: str) -> Ruling:
        await trio.lowlevel.checkpoint()
        me, commitment = self.node.host.peer_id, job.submission.commitment
        lie = SignedVerdict(me, commitment, Verdict.REJECTED, self.reason, 1.0, 1e-4, ())
        return Ruling(lie.signed(self.node.world.signer))


class Refusing(Validator):
    """Rejects all work, for something that a replay can contradict."""

    name: ClassVar[str] = "validator"
    judge_type: ClassVar[type[Judge]] = RefusingJudge


class EvasiveJudge(RefusingJudge):
    reason: ClassVar[str] = GAP


class Evasive(Refusing):
    """Rejects all work, for something that nobody can repeat."""

    judge_type: ClassVar[type[Judge]] = EvasiveJudge


class Silent(Validator):
    """Takes the question and never answers."""

    name: ClassVar[str] = "validator"

    async def run(self, node: Node) -> None:
        async def hang(_: Stream) -> None:
            await trio.sleep_forever()

        serving = node.host.serving
        with serving(ROLLOUT_PROTOCOL, hang), serving(OFFER_PROTOCOL, hang):
            await trio.sleep_forever()


class Stamping(RubberStampingValidator):
    """Accepts what it should not."""


class Court(spine.Spine):
    """A run with an honest validator and another one; plays until its owner has something to
    sign, and some steps more."""

    def __init__(self, kind: type[Validator], **others: str) -> None:
        workers = {f"inference-{number}": "inference" for number in range(1, WORKERS + 1)}
        judges = {"validator-1": "validator", "validator-2": f"{__name__}:{kind.__name__}"}
        super().__init__(
            {"relay-1": "none", "trainer-1": "trainer", **judges, **workers, **others}
        )
        self.proposal: Proposal | None = None
        self.found_at = 0.0

    async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
        watcher, after = swarm.nodes["relay-1"].world, 0
        while swarm.simulation.now < scenario.duration:
            await watcher.sleep(spine.LOOK)
            step = self._status(recipe).trainer.get("step", -1)
            disk = swarm.nodes["trainer-1"].world.disk
            if self.proposal is None and await disk.size(PROPOSAL) is not None:
                self.proposal = decode_proposal_untrusted(await disk.read(PROPOSAL))
                self.found_at, after = swarm.simulation.now, step
            elif self.proposal is not None and step >= after + 8:
                break
        return self._status(recipe)


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in ("validator-1", "validator-2"))
        terms = replace(real(swarm, recipe).terms, validators=judges, appeals=True)
        return sign_run(terms, keys.signer("owner"))

    monkeypatch.setattr(spine, "_write_run", write_run)


def perform(court: Court, seconds: float = HORIZON) -> Mapping[str, Any]:
    """Every node's health at the end, with what the trainer says of itself first."""
    scenario = load_scenario("spine").with_changes(nodes=len(court._cast), duration=seconds)
    changes = {"steps": 2000, "kill_at_step": 9999}
    scenario = replace(scenario, parameters={**scenario.parameters, **changes})

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            await court.run(swarm, scenario)
            names = {name: swarm.nodes[name].peer_id for name in court._cast}
            return {**court.health(), "names": names, "now": simulation.now}

    outcome = run_simulation(main, seed=7, horizon=seconds + 60)
    assert outcome.value is not None
    return outcome.value


@pytest.mark.parametrize(
    ("kind", "is_convicted"),
    [(Refusing, True), (Evasive, False), (Silent, False), (Stamping, True)],
)
def test_a_validator_that_is_of_no_use_loses_its_lots_and_is_named(
    kind: type[Validator], *, is_convicted: bool
) -> None:
    """Its lots were its own for as long as the edition named it: half of all work was lost."""
    cheats = {"cheat-1": "roles.demo.cheats:Cheat"} if kind is Stamping else {}
    court = Court(kind, **cheats)
    health = perform(court)
    bad, good = health["names"]["validator-2"], health["names"]["validator-1"]
    assert court.proposal is not None
    assert [who for who, _ in court.proposal.drop] == [bad]
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert (str(bad) in trainer["liars"]) is is_convicted
    assert str(good) not in trainer["liars"]
    assert health["now"] < HORIZON  # eight steps more were taken


class Honest(Validator):
    """As it should be."""

    name: ClassVar[str] = "validator"


def test_honest_validators_are_neither_convicted_nor_named_for_what_cheats_say() -> None:
    cheats = {f"cheat-{number}": "roles.demo.cheats:Cheat" for number in range(1, 4)}
    court = Court(Honest, **cheats)
    health = perform(court, 60.0)
    assert court.proposal is None
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert trainer["liars"] == {}
    assert trainer["step"] > 8
    for number in range(1, 4):  # they have appealed, and will not be heard again
        (role,) = court._open[f"cheat-{number}"][1]
        assert role._session.appeals.ruled.get("in vain", 0) > 0  # type: ignore[attr-defined]
