"""Hostile validators on the product's roles: the run goes on, who lies is convicted, and nobody
honest is banned, convicted or kept waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.core.window import Submission
from roles.protocol.scorer import Ruling
from roles.trainer import desk
from roles.trainer.core import gate
from roles.trainer.intake import Intake
from roles.trainer.taken import TakenPlace
from roles.validator.role import Validator
from roles.validator.session import ValidatorSession
from sim.node.swarm import Swarm
from tests.support.gates import FORGER, TRUST, Silent, cast_of, with_one_listed
from tests.support.swarm import (
    Health,
    Play,
    finish,
    perform,
    roles_of,
    trainer_of,
)
from tests.sweeps import swept


class StampingSession(ValidatorSession):
    async def judge(self, submission: Submission) -> Ruling:
        honest = await super().judge(submission)
        rewards = honest.rewards or (0.0,)
        return replace(honest, verdict=Verdict.ACCEPTED, reason="", rewards=rewards)


class Stamper(Validator):
    """Accepts everything."""

    session_type: ClassVar[type[ValidatorSession]] = StampingSession


class RefusingSession(ValidatorSession):
    seen = 0
    every = 3

    async def judge(self, submission: Submission) -> Ruling:
        honest = await super().judge(submission)
        self.seen += honest.verdict is Verdict.ACCEPTED
        if self.seen % self.every != 1:
            return honest
        reason = Reason.MANTISSA_MEAN.value
        return Ruling(verdict=Verdict.REJECTED, reason=reason, statistic=900.0, limit=1.0)


class Refuser(Validator):
    """Rejects honest work now and then, beyond doubt."""

    session_type: ClassVar[type[ValidatorSession]] = RefusingSession


class Besieged(Play):
    """Cheats, and honest newcomers, come under fresh names until the liars are convicted."""

    fresh = 0
    most = 24

    async def disturb(self, swarm: Swarm) -> None:
        keys = swarm.simulation.keys
        liars = {
            str(keys.signer(f"validator-{name}").peer_id) for name in ("stamper", "refuser")
        }
        while not liars <= trainer_of(self.health())["liars"].keys() and self.fresh < self.most:
            self.fresh += 1
            swarm.add(f"cheat-{self.fresh}", self._life(FORGER))
            if self.fresh % 2:
                swarm.add(f"inference-{self.fresh + 10}", self._life("inference"))
            await swarm.sleep(1)


@pytest.mark.deep
@pytest.mark.parametrize("seed", swept(range(1, 7), 1))
def test_hostile_validators_are_convicted_and_none_of_their_lies_is_learnt_from(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 honest, 1 stamping, 1 refusing, 1 silent, and cheats under fresh names. Audits are more
    frequent and deadlines shorter than in earnest: `bench trust` plays the real figures."""
    monkeypatch.setattr(gate, "AUDITS", 0.5)
    for module in (gate, desk):
        monkeypatch.setattr(module, "DUE", 40.0)
    learnt: dict[str, int] = {}
    take = Intake.take

    async def note(self: Intake, place: TakenPlace) -> None:
        who = str(place.verdict.commitment.node)
        learnt[who] = learnt.get(who, 0) + 1
        await take(self, place)

    monkeypatch.setattr(Intake, "take", note)
    cast = cast_of(
        workers=3,
        one=Validator,
        two=Validator,
        three=Validator,
        stamper=Stamper,
        refuser=Refuser,
        silent=Silent,
    )
    play = Besieged(cast, with_one_listed(TRUST))
    health = perform(play, seed=seed, steps=40, seconds=560)
    assert_the_run_is_well(health, play, learnt)


def assert_the_run_is_well(health: Health, play: Besieged, learnt: dict[str, int]) -> None:
    trainer = trainer_of(health)
    peers = {name: health[name]["peer"] for name in health if name != "done"}
    liars: dict[str, Any] = trainer["liars"]
    assert "false" in liars[peers["validator-stamper"]]
    assert "false" in liars[peers["validator-refuser"]]
    assert not {peers[f"validator-{name}"] for name in ("one", "two", "three")} & liars.keys()
    banned = {name for name, peer in peers.items() if peer in trainer["bans"]}
    assert banned
    assert all(name.startswith("cheat") for name in banned)
    cheats = {peer for name, peer in peers.items() if name.startswith("cheat")}
    assert not cheats & learnt.keys()
    honest = [health[f"inference-{number}"]["roles"]["inference"] for number in range(1, 4)]
    assert [worker["owed"] for worker in honest] == [0] * 3
    assert trainer["step"] > 5
    assert play.fresh < play.most


class TardySession(StampingSession):
    async def judge(self, submission: Submission) -> Ruling:
        ruling = await super().judge(submission)
        await self.node.shardcast.wait_policy(PolicyVersion(submission.commitment.version + 8))
        return ruling


class Tardy(Stamper):
    """Accepts everything, once the trainer can repeat nothing of it."""

    session_type: ClassVar[type[ValidatorSession]] = TardySession


def test_verdicts_that_nobody_can_repeat_any_more_raise_nobody() -> None:
    cast = {**cast_of(workers=1, tardy=Tardy), "cheat-1": FORGER}
    health = finish(Play(cast, with_one_listed(TRUST)), steps=14, seconds=200)
    assert sum(one["accepted"] for one in roles_of(health, "validator")) > 0
    assert health["cheat-1"]["roles"]["forger"]["stood"] == 0
