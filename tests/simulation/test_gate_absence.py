"""A trainer away, validators gone for good: nothing stands still for ever, nobody is blamed."""

from __future__ import annotations

from typing import Any

import pytest

from roles.inference.windows import SILENT, TOO_OLD
from sim.node.swarm import Swarm
from tests.support.gates import TRUST, Deaf, Silent, cast_of, given_up, with_one_listed
from tests.support.swarm import (
    CAST,
    Health,
    Play,
    nobody_honest_is_rejected,
    perform,
    trainer_of,
)
from tests.sweeps import swept

AWAY = 900.0


class Away(Play):
    """The trainer is away for 15 minutes."""

    def __init__(self, how: str) -> None:
        super().__init__({**CAST, "inference-3": "inference"}, with_one_listed(TRUST))
        self._how = how
        self.before: Health = {}

    async def disturb(self, swarm: Swarm) -> None:
        await swarm.sleep(1)
        self.before = self.health()
        if self._how == "stopped":
            # A host of this level keeps what is sent to it; a real one's connections time out.
            others = [name for name in swarm.nodes if name != "trainer-1"]
            cuts = swarm.partition(["trainer-1"], others)
            swarm.pause("trainer-1", AWAY)
            await swarm.sleep(AWAY + 1)
            swarm.repair(cuts)
        else:
            swarm.kill("trainer-1", torn=True, silent=self._how == "vanished")
            await swarm.sleep(AWAY)
            swarm.restart("trainer-1")


@pytest.mark.parametrize("how", swept(["killed", "stopped", "vanished"], 1))
def test_a_trainer_away_for_15_minutes_ends_no_standing_and_accuses_nobody(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = given_up(monkeypatch)
    play = Away(how)
    health = perform(play, steps=8, seconds=AWAY + 200)
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
    assert trainer_of(health)["liars"] == {}
    workers = [health[f"inference-{number}"]["roles"]["inference"] for number in range(1, 4)]
    before = [
        play.before[f"inference-{number}"]["roles"]["inference"] for number in range(1, 4)
    ]
    assert [worker["owed"] for worker in workers] == [0] * 3
    assert all(now["stood"] >= was["stood"] for now, was in zip(workers, before, strict=True))
    stale = {TOO_OLD, "its policy is not held here any more", "the run has all its steps"}
    assert set(reasons) <= {*stale, SILENT}, reasons


@pytest.mark.deep
@pytest.mark.parametrize("kind", swept([None, Silent, Deaf], 1))
def test_newcomers_reach_standing_though_their_only_validator_says_nothing(kind: Any) -> None:
    """Nobody is in standing, so no version is replaced, and nothing becomes too old: a worker
    must not wait for a validator that is gone with all its places."""

    class Bereft(Play):
        async def _play(self, swarm: Swarm, *rest: Any) -> Any:
            if kind is None:
                swarm.kill("validator-gone")
                self._open.pop("validator-gone", None)
            return await super()._play(swarm, *rest)

    cast = cast_of(workers=2, gone=kind or Silent)
    health = perform(Bereft(cast), steps=3, seconds=2500)
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
    assert trainer_of(health)["step"] == 3
