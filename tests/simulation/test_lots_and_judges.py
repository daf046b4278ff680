"""Lots, appeals, and validators that are away, together: a run with three bad ones of six.

One accepts whatever its accomplice hands in and refuses honest work one time in twenty, one
accepts all without a look, one takes the question and never answers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest
import trio

from p2p.host import Stream
from p2p.identity import PeerId
from p2p.node.node import Node
from proofs.checks import Reason, Verdict
from roles.demo.canary import Canary, CanaryConfig
from roles.demo.status import SwarmStatus
from roles.inference.appeals import Appeals
from roles.inference.session import InferenceSession
from roles.protocol.core.lots import COMMIT_PROTOCOL, LOT_PROTOCOL, WitnessedWindow
from roles.protocol.core.groups import (
    OFFER_PROTOCOL,
    ROLLOUT_PROTOCOL,
    SignedVerdict,
    Submission,
)
from roles.rl.recipe import Recipe
from roles.run import Run, run_of, sign_run
from roles.run.core.proposal import Proposal, decode_proposal_untrusted
from roles.run.core.trust import TrustTerms
from roles.trainer.intake import Intake
from roles.trainer.watch import PROPOSAL
from roles.validator.judge import Judge
from roles.validator.role import Validator
from roles.validator.verdicts import Job, Ruling
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine
from tests.attacks.test_lying_validator import RubberStampingJudge
from tests.simulation.test_bad_submissions import ForgingSession
from tests.simulation.test_lots import Learnt, Turncoat

FRIEND = "accomplice-1"
TRUST = TrustTerms(share=0.25, probation=8, window=8, validators=2, beacon=0.5)
HORIZON = 1500.0


class HostileJudge(RubberStampingJudge):
    """Accepts what its friend hands in, and refuses honest work one time in twenty."""

    refuses: ClassVar[float] = 0.05

    async def judge(self, job: Job, weights: str) -> Ruling:
        worker = job.submission.commitment.node
        if worker == Court.names.get(FRIEND):
            return await super().judge(job, weights)
        ruling = await Judge.judge(self, job, weights)
        if self._world.rng("refusals").random() >= self.refuses:
            return ruling
        lie = replace(
            ruling.verdict, verdict=Verdict.REJECTED, reason=Reason.DRAW_DISTANCE.value,
            statistic=1.0, limit=1e-4, rewards=(), logprobs=b"", work=None,
        )  # fmt: skip
        return Ruling(lie.signed(self.node.world.signer))


class Hostile(Validator):
    name: ClassVar[str] = "validator"
    judge_type: ClassVar[type[Judge]] = HostileJudge


class FriendlyJudge(HostileJudge):
    """Does nothing else that is wrong, so nobody has a reason to complain of it."""

    refuses: ClassVar[float] = 0.0


class Friendly(Validator):
    name: ClassVar[str] = "validator"
    judge_type: ClassVar[type[Judge]] = FriendlyJudge


class Lazy(Validator):
    """Accepts all."""

    name: ClassVar[str] = "validator"
    judge_type: ClassVar[type[Judge]] = RubberStampingJudge


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


class MuteAppeals(Appeals):
    def note_verdict(self, submission: Submission, verdict: SignedVerdict) -> None:
        """It has reasons not to be looked at."""


class AccompliceSession(ForgingSession):
    """Shows what is false to its friend among the validators, and to no other."""

    appeals_type: ClassVar[type[Appeals]] = MuteAppeals

    async def ask(
        self, peer: PeerId, submission: Submission, witnessed: WitnessedWindow | None = None
    ) -> SignedVerdict | None:
        is_judge = peer in run_of(self.node).terms.validators
        is_friend = peer in Court.friends
        if submission.commitment.content in Turncoat.forged and is_judge and not is_friend:
            await trio.lowlevel.checkpoint()
            return None
        return await super().ask(peer, submission, witnessed)


class Accomplice(Turncoat):
    """Turns once it is in standing, and lies in one place of four."""

    name: ClassVar[str] = "inference"
    turns_at: ClassVar[int] = 24

    def make_session(self, *args: Any) -> InferenceSession:
        session = AccompliceSession(*args, self.name, self.counts)
        session.forger = self
        return session


class EarlyCanary(Canary):
    """Lies soon: a probation has eight places here."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        return cls(CanaryConfig(honest=4))


class Court(spine.Spine):
    """A run with lots and appeals that goes on until so many validators were named, and some
    steps more."""

    names: ClassVar[dict[str, PeerId]] = {}
    friends: ClassVar[list[PeerId]] = []
    trust = TRUST
    more = 8
    """Steps after the last was named."""

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
        Court.names = {name: keys.signer(name).peer_id for name in self._cast}
        Court.friends = [
            peer for name, peer in Court.names.items() if "hostile" in name or "pair" in name
        ]
        judges = tuple(keys.signer(name).peer_id for name in self._cast if "validator" in name)
        terms = super().make_run(swarm, recipe).terms
        terms = replace(terms, validators=judges, trust=self.trust, appeals=True)
        return sign_run(terms, keys.signer("owner"))

    async def _proposal(self, swarm: Swarm) -> Proposal | None:
        disk = swarm.nodes["trainer-1"].world.disk
        if await disk.size(PROPOSAL) is None:
            return None
        return decode_proposal_untrusted(await disk.read(PROPOSAL))

    async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
        watcher, after = swarm.nodes["relay-1"].world, 0
        names = {peer: name for name, peer in self.names.items()}
        while swarm.simulation.now < scenario.duration:
            await watcher.sleep(spine.LOOK)
            step = self._status(recipe).trainer.get("step", -1)
            proposal = await self._proposal(swarm)
            for who, why in () if proposal is None else proposal.drop:
                if names[who] not in self.found:
                    self.found[names[who]] = swarm.simulation.now, why
                    after = step
            if len(self.found) >= len(self.bad) and step >= after + self.more:
                break
        return self._status(recipe)


def perform(court: Court, seed: int = 7, seconds: float = HORIZON) -> dict[str, Any]:
    scenario = load_scenario("spine").with_changes(nodes=len(court._cast), duration=seconds)
    changes = {"steps": 2000, "kill_at_step": 9999, "groups": 32, "submission": 1}
    changes["group_size"] = 4
    scenario = replace(scenario, parameters={**scenario.parameters, **changes})

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            await court.run(swarm, scenario)
            return {**court.health(), "now": simulation.now}

    outcome = run_simulation(main, seed=seed, horizon=HORIZON + 60)
    assert outcome.value is not None
    return outcome.value


def judged(canaries: int) -> Court:
    """Three honest validators and three bad ones, four honest workers, and who tries them."""
    bad = {f"validator-{kind.__name__.lower()}": kind for kind in (Hostile, Lazy, Silent)}
    others = {f"canary-{number}": EarlyCanary for number in range(1, canaries + 1)}
    played = {FRIEND: Accomplice, **others}
    return Court(
        {name: f"{__name__}:{kind.__name__}" for name, kind in bad.items()},
        3,
        **{name: f"{__name__}:{kind.__name__}" for name, kind in played.items()},
    )


def test_bad_validators_are_found_lose_their_lots_are_named_and_change_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent one ended the run: no window of a newcomer settled. Those that were convicted
    kept their lots until the next edition, and who stamped was nobody's business. Three
    claims need a swarm of this size: 10 CPU s."""
    learnt = Learnt(monkeypatch)
    Turncoat.forged.clear()
    court = judged(canaries=3)
    health = perform(court)
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert court.found.keys() == court.bad.keys()
    assert "rejected honest work" in court.found["validator-hostile"][1]
    assert "waited for it in vain" in court.found["validator-silent"][1]
    liars = {str(court.names[f"validator-{name}"]) for name in ("hostile", "lazy")}
    assert set(trainer["liars"]) == liars
    assert trainer["step"] >= 8
    assert len(Turncoat.forged) > 3
    assert not Turncoat.forged.keys() & {content for content, _ in learnt.groups}
    workers = {name for name in court.names if "inference" in name}
    known = {peer: name for name, peer in court.names.items()}
    (role,) = court._open["trainer-1"][1]
    rows = role.session.intake.accounts._rows  # type: ignore[attr-defined]
    assert workers == {known[peer] for peer, row in rows.items() if row.learnt}


def test_a_lone_validator_that_stamps_is_found_by_the_first_canary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without lots it is the only one that looks, and of twenty lies one was replayed: here
    there is one, and what was called a lie beforehand is replayed and not learnt from."""
    learnt = Learnt(monkeypatch)
    warned: list[bytes] = []
    disown = Intake.disown

    def noted(intake: Intake, content: bytes) -> None:
        warned.append(content)
        disown(intake, content)

    monkeypatch.setattr(Intake, "disown", noted)
    stamping = {"validator-lazy": f"{__name__}:Lazy"}
    court = Court(stamping, 0, **{"canary-1": f"{__name__}:EarlyCanary"})
    court.trust, court.more = TrustTerms(share=1.0), 0
    health = perform(court, seconds=60.0)
    assert list(court.found) == ["validator-lazy"]
    assert list(health["trainer-1"]["roles"]["trainer"]["liars"]) == [
        str(court.names["validator-lazy"])
    ]
    assert len(warned) == 1
    assert warned[0] not in {content for content, _ in learnt.groups}
    assert learnt.groups  # of honest work, before


def test_a_pair_that_stamps_for_its_friend_alone_is_found_by_what_the_trainer_learns_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No worker complains and no canary is stamped; each lie is accepted by both its judges,
    and comes to the trainer as work to learn from."""
    learnt = Learnt(monkeypatch)
    Turncoat.forged.clear()
    pair = {f"validator-pair-{number}": f"{__name__}:Friendly" for number in (1, 2)}
    court = Court(pair, 0, **{FRIEND: f"{__name__}:Accomplice"})
    court.more = 0
    health = perform(court, seconds=100.0)
    assert court.found.keys() == pair.keys()
    assert health["trainer-1"]["roles"]["trainer"]["step"] > 0
    assert Turncoat.forged
    assert not Turncoat.forged.keys() & {content for content, _ in learnt.groups}


def main() -> None:
    """The table of docs/trust.md: when each is found, with canaries and without."""
    for canaries in (0, 3):
        for seed in range(1, 4) if len(sys.argv) < 2 else [int(sys.argv[1])]:
            with pytest.MonkeyPatch.context() as patch:
                learnt = Learnt(patch)
                Turncoat.forged.clear()
                court = judged(canaries)
                health = perform(court, seed, 150.0)
            trainer = health["trainer-1"]["roles"]["trainer"]
            found = {name.partition("-")[2]: at for name, (at, _) in court.found.items()}
            lies = Turncoat.forged.keys() & {content for content, _ in learnt.groups}
            told = f"{len(Turncoat.forged)} lies, {len(lies)} learnt from"
            sys.stdout.write(
                f"{canaries} canaries, seed {seed}: {found}, {told}, step {trainer['step']},"
                f" {trainer['windows_void']} windows void, {health['now']:.0f} s\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
