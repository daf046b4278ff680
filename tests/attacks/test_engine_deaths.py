"""An engine's process: it dies, or cannot be started; and content between it and its node."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import trio

from p2p.errors import WorkerDied, WorkerNotStarted
from p2p.machine import open_world
from p2p.world import World
from roles.contract.core.shape import Family
from roles.engines import client, codec
from roles.engines.base import EngineError, Group, GroupTask, Sampling
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig
from roles.engines.fake import FakeEngine
from roles.engines.torch.files import encode_weights
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.inference.outbox import FullPlace
from roles.inference.session import InferenceSession
from roles.protocol.scorer import ENGINE_FAILED
from roles.protocol.standing import RoleStanding
from roles.shared.backoff import Backoff
from roles.workers import client as workers
from roles.workers.calls import MAX_FRAME
from roles.workers.client import START_PAUSES
from roles.workers.files import MappedRecords, Scratch, write_records
from tests.support.models import SHAPES
from tests.support.processes import kill
from tests.support.swarm import CAST, Play, perform, roles_of, scored, trainer_of
from tests.unit.content_life import ARGV, CONFIG, IDLE, LESSON, TOKENS
from tests.unit.trainer_life import CONFIG as SMALL, lessons


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
        self.calls: Counter[str] = Counter()

    async def toll(self, method: str) -> None:
        self.calls[method] += 1
        if self.calls[method] % 6 == 3:
            self._loaded = self._learning = None
            self._under_way.clear()
            raise WorkerDied(f"the worker process of {method} ended (exit -9)")


def mortal(method: str) -> Any:
    async def call(self: Mortal, *args: Any) -> Any:
        await self.toll(method)
        return await getattr(FakeEngine, method)(self, *args)

    return call


for method in ("advance", "score", "step", "save", "answer"):
    setattr(Mortal, method, mortal(method))


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


# A machine that starts no further process, and an engine that fails


class Refusing:
    """In place of the fork: fails for the next so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.pauses: list[float] = []
        self._open = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self._refuse)

    def _refuse(self, *args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if self.left:
            self.left -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._open(*args, **options)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def test_an_engine_that_cannot_be_forked_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """BlockingIOError came out of the call, and ended the node."""
    monkeypatch.setattr(client, "WORKER_ARGV", (*ARGV, "worker"))
    monkeypatch.setattr(workers, "FIRST_PAUSE", 0.0)
    machine = Refusing(monkeypatch)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        monkeypatch.setattr(world, "sleep", machine.sleep)
        kill(engine)
        with pytest.raises(WorkerDied):
            await engine.drop()
        machine.left, machine.pauses[:] = len(START_PAUSES), []
        await engine.drop()
        assert machine.pauses == [0.0, *START_PAUSES], "the first is for its death"
        assert "ulimit -u" in caplog.text
        kill(engine)
        with pytest.raises(WorkerDied):
            await engine.drop()
        machine.left = len(START_PAUSES) + 1
        with pytest.raises(WorkerNotStarted, match=r"temporarily .*ulimit -u"):
            await engine.drop()


def test_an_engine_that_fails_under_an_older_policy_goes_on_with_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of one worker stood at step 3 of 6 for ever."""
    sessions: dict[int, InferenceSession] = {}
    newest: dict[int, int] = {}
    failed: list[int] = []
    advance, produce = FakeEngine.advance, InferenceSession.produce

    async def noting(session: InferenceSession) -> FullPlace:
        sessions[id(session.engine)] = session
        newest[id(session.engine)] = session.node.shardcast.newest
        return await produce(session)

    async def failing(engine: FakeEngine) -> list[Group]:
        ended = await advance(engine)
        await engine._world.sleep(1.0)
        session = sessions[id(engine)]
        if 2 <= session.loaded < newest[id(engine)] and session.loaded not in failed:
            failed.append(session.loaded)
            raise EngineError("the hidden states are no numbers")
        return ended

    monkeypatch.setattr(InferenceSession, "produce", noting)
    monkeypatch.setattr(FakeEngine, "advance", failing)
    monkeypatch.setattr(FakeEngine, "has_room", property(lambda _: True))
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    health = perform(Play(cast), steps=6, seconds=90)
    assert failed
    assert trainer_of(health)["step"] == 6


# Content between a node and its engine


FOLDER = "engine/engine"


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WORKER_ARGV", (*ARGV, "worker"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(_: Backoff) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Backoff, "wait", wait)


async def test_a_gpu_that_lies_idle_is_said_as_the_engine_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WORKER_ARGV", (*ARGV, "idle"))
    caplog.set_level(logging.INFO)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG):
        said = [(one.levelno, one.getMessage()) for one in caplog.records]
    assert (logging.WARNING, IDLE) in said
    assert (logging.INFO, "engine_ready kind=counter device=cpu threads=1") in said


@pytest.mark.usefixtures("counting")
async def test_a_step_and_answers_larger_than_a_frame(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        assert 46 * len(codec.encode_training(LESSON)) > MAX_FRAME
        report = await engine.step([LESSON] * 46)
        assert (report.tokens, report.loss) == (92 * TOKENS, -0.5 * 92 * TOKENS)
        tasks = [GroupTask(number, (number + 1,), (b"s" * 32,) * 2) for number in range(90)]
        assert 90 * 2 * 4 * TOKENS > MAX_FRAME
        answers = await engine.answer(tasks, Sampling(1.0, TOKENS, 2))
        for task, given in zip(tasks, answers, strict=True):
            assert given == (task.prompt * TOKENS,) * 2
        assert await world.disk.list(FOLDER) == []
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.usefixtures("counting")
def test_killed_between_writing_and_reading_it_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.content_life", "node", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading\n"
        (left,) = (tmp_path / FOLDER).iterdir()
        assert left.stat().st_size > 8 * 2 * TOKENS
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert left.exists()

    async def live_on() -> None:
        async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
            assert await world.disk.list(FOLDER) == []
            assert (await engine.step([LESSON])).step == 1

    trio.run(live_on)


@pytest.mark.usefixtures("counting", "patient")
async def test_what_a_full_disk_does_not_take_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of a file is refused like a full disk."""
    tasks = [GroupTask(number, (number + 20,), (b"s" * 32,)) for number in range(20)]
    left, waiting = 3, list[int]()

    @asynccontextmanager
    async def refused(self: Scratch, *contents: Iterable[bytes]) -> AsyncIterator[Any]:
        nonlocal left
        waiting.append(engine.writes_waiting)
        async with files(self, *contents) as (answer, given):
            if left:
                left -= 1
                os.mkdir(answer)
                if contents:
                    write_records(answer, [])
            yield answer, given

    files = Scratch.files
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        await engine.submit(tasks, Sampling(1.0, 4, 1))
        assert not engine.has_room
        monkeypatch.setattr(Scratch, "files", refused)
        with caplog.at_level(logging.WARNING):
            found = await engine.advance()
        assert [group.group for group in found] == [19, 18, 17, 16]  # as one call gave them
        assert waiting == [0, 1, 1, 1]
        while len(found) < 20:
            found += await engine.advance()
        assert [group.group for group in found] == list(range(20))[::-1]
        assert [one.completions[0].tokens for one in found] == [
            (group.group + 20,) for group in found
        ]
        assert engine.has_room
        assert await engine.advance() == []
        await world.disk.remove(FOLDER)
        left, waiting[:] = 3, []
        report = await engine.step([replace(LESSON, completions=LESSON.completions[:1])])
        assert (report.step, report.tokens, waiting) == (1, TOKENS, [0, 1, 1, 1])
        assert engine.writes_waiting == 0
    assert "the engine stops until the disk takes data" in caplog.text
    assert "the engine no longer waits for the disk" in caplog.text


def test_a_mapped_step_teaches_the_same_and_is_decoded_by_minibatches(tmp_path: Path) -> None:
    groups = [
        codec.decode_training(codec.encode_training(lessons(index)[0].group))
        for index in range(5)
    ]
    file = write_records(str(tmp_path / "step"), map(codec.encode_training, groups))
    alike = [TorchLearner(SMALL) for _ in range(2)]
    for learner in alike:
        learner.model.initialise(Random(1).randrange(99))
    content = MappedRecords(file, codec.decode_training)
    assert list(content) == groups
    for _ in range(3):
        assert alike[0].step(groups) == alike[1].step(content)
    for one, other in zip(*(learner.model.parameters() for learner in alike), strict=True):
        assert torch.equal(one, other)
