"""A trainer away, validators gone, places without tasks, a refused worker, lost state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from roles.envs.client import LocalEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.inference.windows import SILENT, TOO_OLD, Windows
from roles.protocol.core.answer import Answer, Refused
from roles.protocol.core.window import SignedWindow
from roles.protocol.scorer import LOST, NO_TASKS
from sim.kernel.simulation import CURRENT_NODE
from sim.node.swarm import Swarm
from tests.support.gates import FORGER, TRUST, Deaf, Silent, cast_of, given_up, with_one_listed
from tests.support.swarm import CAST, Health, Play, finish, perform, roles_of, trainer_of
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
    health = finish(play, steps=8, seconds=AWAY + 200)
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
    """Nobody is in standing, so no version is replaced, and nothing becomes too old."""

    class Bereft(Play):
        async def _play(self, swarm: Swarm, *rest: Any) -> Any:
            if kind is None:
                swarm.kill("validator-gone")
                self._open.pop("validator-gone", None)
            return await super()._play(swarm, *rest)

    cast = cast_of(workers=2, gone=kind or Silent)
    health = finish(Bereft(cast), steps=3, seconds=2500)
    assert trainer_of(health)["step"] == 3


def break_tasks(monkeypatch: pytest.MonkeyPatch, one_in: int, *, of: str = "") -> list[str]:
    """Let the environment fail on one seed in ``one_in``, on nodes whose name begins so."""
    plain, failed = LocalEnvironment.tasks, list[str]()

    async def tasks(self: LocalEnvironment, seeds: Sequence[bytes]) -> Any:
        where = CURRENT_NODE.get()
        if where.startswith(of) and any(seed[0] % one_in == 0 for seed in seeds):
            failed.append(where)
            raise EnvironmentFailed("no task for this seed")
        return await plain(self, seeds)

    monkeypatch.setattr(LocalEnvironment, "tasks", tasks)
    return failed


@pytest.mark.parametrize("judge", ["validator", "trainer"])
def test_places_without_tasks_stop_no_newcomer_and_no_worker_in_standing(
    judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of newcomers alone there is no newer version that a worker could wait for."""
    failed = break_tasks(monkeypatch, 16)
    cast = {name: role for name, role in CAST.items() if role != "validator" or judge == role}
    health = finish(Play(cast), steps=5)
    assert len(failed) > 3
    undecided = [
        one["inconclusive"]
        for kind in ("trainer", "validator")
        for one in roles_of(health, kind)
    ]
    assert any(NO_TASKS in reasons for reasons in undecided)
    assert not any(LOST in reasons for reasons in undecided)
    assert all(worker["owed"] == 0 for worker in roles_of(health, "inference"))


def test_a_worker_whose_own_environment_fails_is_not_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_tasks(monkeypatch, 48, of="inference-2")
    health = finish(Play(CAST), steps=8)
    assert any(LOST in one["inconclusive"] for one in roles_of(health, "trainer"))
    assert health["inference-2"]["roles"]["inference"]["accepted"] > 0


TWO = {"relay-1": "none", "trainer-1": "trainer"}
NEWCOMERS = {**TWO, "inference-1": "inference", "inference-2": "inference"}


@pytest.mark.deep
def test_a_banned_worker_asks_seldom_draws_nothing_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, object]] = []
    plain = Windows._ask

    async def ask(self: Windows, signed: SignedWindow) -> Answer | Refused | None:
        reply = await plain(self, signed)
        if self._node.world.name == "cheat-1":
            asked.append((self._node.world.now(), reply))
        return reply

    monkeypatch.setattr(Windows, "_ask", ask)
    cast = {**TWO, "inference-1": "inference", "cheat-1": FORGER}
    health = perform(Play(cast), steps=400, seconds=60)
    cheat = health["cheat-1"]["roles"]["forger"]
    assert health["cheat-1"]["peer"] in trainer_of(health)["bans"]
    assert "the trainer refuses this node's work: this name is banned" in cheat["now"]
    refused = [when for when, reply in asked if isinstance(reply, Refused)]
    pauses = [later - when for when, later in pairwise(refused)]
    assert 3 <= len(refused) <= 9
    assert pauses[-1] > 9
    assert cheat["submitted"] < 20


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_who_loses_what_it_knew_of_places_goes_on_where_the_other_is(who: str) -> None:
    """Of newcomers alone there is no next version to begin again with."""

    class Forgetful(Play):
        async def _play(self, swarm: Swarm, *rest: Any) -> Any:
            trainer = swarm.nodes["trainer-1"]
            while not any("gate/name" in path for path in trainer.disk.paths()):
                await swarm.sleep(0.1)
            await swarm.sleep(0.3)
            if who == "trainer":
                swarm.kill("trainer-1")
                for path in trainer.disk.paths():
                    if "gate/name" in path:
                        trainer.disk.remove_now(path)
                await swarm.sleep(1)
                swarm.restart("trainer-1")
            else:
                for name in ("inference-1", "inference-2"):
                    swarm.kill(name)
                    disk = swarm.nodes[name].disk
                    for path in disk.paths():
                        if "outbox" in path:
                            disk.remove_now(path)
                    swarm.restart(name)
            return await super()._play(swarm, *rest)

    finish(Forgetful(NEWCOMERS), steps=3, seconds=120)
