"""Content between a node and its engine: files of any size, whole or refused, and none left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import trio

from p2p.machine import open_world
from roles.engines import client, codec
from roles.engines.base import GroupTask, Sampling
from roles.engines.client import open_engine
from roles.engines.torch.learner import TorchLearner
from roles.shared.backoff import Backoff
from roles.workers.calls import MAX_FRAME
from roles.workers.files import MappedRecords, Scratch, write_records
from tests.unit.content_life import ARGV, CONFIG, IDLE, LESSON, TOKENS
from tests.unit.trainer_life import CONFIG as SMALL, lessons

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
    """A folder in the place of a file is refused like a full disk: first to the worker, which
    keeps what it has drawn, then to the node."""
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
    torch.set_num_threads(1)
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
