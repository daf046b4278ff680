"""An environment that makes no tasks for some places: they are handed in empty, the order of
places has no gap, and nobody is stopped, blamed or banned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from roles.envs.client import LocalEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.protocol.scorer import LOST, NO_TASKS
from sim.kernel.simulation import CURRENT_NODE
from tests.support.swarm import CAST, Play, nobody_honest_is_rejected, perform, roles_of


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
    health = perform(Play(cast), steps=5)
    assert len(failed) > 3
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
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
    health = perform(Play(CAST), steps=8)
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
    assert any(LOST in one["inconclusive"] for one in roles_of(health, "trainer"))
    assert health["inference-2"]["roles"]["inference"]["accepted"] > 0
