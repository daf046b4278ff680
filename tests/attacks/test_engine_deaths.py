"""The process of an engine dies: for lack of memory, by a driver, by a person's hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import WorkerDied
from p2p.machine import open_world
from p2p.world import World
from roles.contract.core.shape import Family
from roles.engines import client
from roles.engines.base import GroupTask, Sampling
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig
from roles.engines.fake import FakeEngine
from roles.engines.torch.files import encode_weights
from roles.engines.torch.model import TransformerModel
from roles.protocol.scorer import ENGINE_FAILED
from roles.protocol.standing import RoleStanding
from roles.workers import client as workers
from tests.support.models import SHAPES
from tests.support.processes import kill
from tests.support.swarm import Play, perform, roles_of, scored, trainer_of
from tests.unit.content_life import ARGV, CONFIG, LESSON


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WORKER_ARGV", (*ARGV, "worker"))
    monkeypatch.setattr(workers, "FIRST_PAUSE", 0.0)


@pytest.mark.usefixtures("counting")
async def test_a_process_that_was_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WorkerDied came out of every call after that, and the first of them ended the node."""
    monkeypatch.setattr(workers, "MOST_DEATHS", 2)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        assert (await engine.step([LESSON])).step == 1
        for _ in range(2):
            kill(engine)
            with pytest.raises(WorkerDied, match="exit -9"):
                await engine.step([LESSON])
            assert (await engine.step([LESSON])).step == 1, "a new one, which holds nothing"
        assert (await engine.step([LESSON])).step == 2
        assert await world.disk.list("engine/engine") == []


async def test_rows_that_wait_for_the_environment_die_with_the_engine_and_come_again(
    tmp_path: Path,
) -> None:
    model = TransformerModel(SHAPES[Family.QWEN3])
    model.initialise(5)
    config = EngineConfig(
        kind="torch", shape=model.shape, context=256, end_tokens=tuple(range(1, 30))
    )
    sampling = Sampling(1.0, 24, 4, turns=3, heard=8)
    task = GroupTask(7, (40, 41, 42), tuple(bytes([number]) * 32 for number in range(4)))

    async with open_world(tmp_path) as world, open_engine(world, config) as engine:

        async def draw(*, is_killed: bool) -> Sequence[Any]:
            await engine.load("weights")
            await engine.submit([task], sampling)
            groups: list[Any] = []
            while not groups:
                groups = await engine.advance()
                if rows := list(engine.waiting):
                    if is_killed:
                        kill(engine)
                    await engine.hear([replace(row, tokens=(50, 51)) for row in rows])
            return groups

        await world.disk.write("weights", encode_weights(model))
        before = await draw(is_killed=False)
        assert max(len(one.turns) for one in before[0].completions) > 0
        with pytest.raises(WorkerDied):
            await draw(is_killed=True)
        assert (engine.has_room, list(engine.waiting)) == (True, [])
        assert await draw(is_killed=False) == before


class Mortal(FakeEngine):
    """Dies at every sixth call of a method, and holds nothing afterwards."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        super().__init__(world, config)
        self.born = world, config
        self.calls: Counter[str] = Counter()

    async def toll(self, method: str) -> None:
        self.calls[method] += 1
        if self.calls[method] % 6 == 3:
            self._loaded = self._learning = None
            self._under_way.clear()
            raise WorkerDied(f"the worker process of {method} ended (exit -9)")

    async def advance(self) -> Any:
        await self.toll("advance")
        return await super().advance()

    async def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Any], sampling: Sampling
    ) -> Any:
        await self.toll("score")
        return await super().score(tasks, groups, sampling)

    async def step(self, groups: Sequence[Any]) -> Any:
        await self.toll("step")
        return await super().step(groups)

    async def save(self, checkpoint: str, weights: str) -> None:
        await self.toll("save")
        await super().save(checkpoint, weights)

    async def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> Any:
        await self.toll("answer")
        return await super().answer(tasks, sampling)


@pytest.mark.parametrize("role", ["trainer", "validator", "inference"])
def test_no_role_ends_with_the_process_of_its_engine(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Mortal] = []

    @asynccontextmanager
    async def open_mortal(
        world: World, config: EngineConfig, *, name: str = "", learns: bool = True
    ) -> AsyncIterator[FakeEngine]:
        engines.append(Mortal(world, config))
        yield engines[-1]

    def open_of(world: World, config: EngineConfig, *, name: str, learns: bool = True) -> Any:
        opener = open_mortal if name == role else open_engine
        return opener(world, config, name=name, learns=learns)

    for opens in ("roles.trainer.role", "roles.protocol.machine"):
        monkeypatch.setattr(f"{opens}.open_engine", open_of)
    standings: list[str] = []
    make_standing = RoleStanding.__init__

    def note_standing(
        self: RoleStanding, node: Any, began: Any, job: str, name: str = ""
    ) -> None:
        standings.append(job)
        make_standing(self, node, began, job, name)

    monkeypatch.setattr(RoleStanding, "__init__", note_standing)
    health = perform(Play(), steps=6, seconds=100)
    (judge,) = roles_of(health, "validator")
    assert any(count >= 3 for engine in engines for count in engine.calls.values())
    assert trainer_of(health)["step"] == 6
    # an engine is of the edition under which it was opened, however often it dies
    assert standings.count("trainer") == 1
    assert judge["rejected"] == 0
    assert sum(scored(health, f"inference-{number}")["accepted"] for number in (1, 2)) > 4
    assert (ENGINE_FAILED in judge["inconclusive"]) == (role == "validator")
