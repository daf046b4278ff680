"""Content between a node and its engine: files of any size, whole or refused, and none left."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import trio

from p2p.errors import StorageError
from p2p.machine import RealDisk, open_world
from roles.engines import client, codec, content
from roles.engines.base import EngineError, GroupTask, Sampling, draw_all
from roles.engines.client import open_engine
from roles.engines.content import ContentFile, ContentFolder, ContentLimit
from roles.engines.mapped import open_content, write_content
from roles.engines.torch.learner import TorchLearner
from roles.shared.backoff import Backoff
from roles.shared.checked_json import DamagedFile
from tests.unit.content_life import ARGV, CONFIG, IDLE, LESSON, TOKENS
from tests.unit.trainer_life import CONFIG as SMALL, lessons

FOLDER = "engine/engine"
RECORDS = [bytes([number]) * number for number in (0, 1, 5, 40, 3)]
MOST = 1000


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
async def test_a_step_and_answers_larger_than_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    check = ContentFile.check_size

    def note(self: ContentFile, most: int) -> None:
        seen.append(self.size)
        check(self, most)

    monkeypatch.setattr(ContentFile, "check_size", note)
    write = ContentFolder.write

    async def written(*arguments: object) -> ContentFile:
        file = await write(*arguments)  # type: ignore[arg-type]
        seen.append(file.size)
        return file

    monkeypatch.setattr(ContentFolder, "write", written)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        report = await engine.step([LESSON] * 46)
        assert seen.pop() > codec.MAX_FRAME
        assert (report.tokens, report.loss) == (92 * TOKENS, -0.5 * 92 * TOKENS)
        tasks = [GroupTask(number, (number + 1,), (b"s" * 32,) * 2) for number in range(90)]
        answers = await engine.answer(tasks, Sampling(1.0, TOKENS, 2))
        assert max(seen) > codec.MAX_FRAME
        for task, given in zip(tasks, answers, strict=True):
            assert given == (task.prompt * TOKENS,) * 2
        assert await world.disk.list(FOLDER) == []
        with pytest.raises(EngineError, match=r"bytes of content, and the run allows"):
            await engine.step([LESSON] * 48)
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


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = (truncate, alter, extend, empty, replace_by_a_folder, Path.unlink)


@pytest.mark.usefixtures("counting", "patient")
async def test_a_damaged_step_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damages = list(DAMAGES)
    waiting: list[int] = []
    write = ContentFolder.write

    async def damaged(
        self: ContentFolder, path: str, records: Iterable[bytes], most: int
    ) -> ContentFile:
        file = await write(self, path, records, most)
        waiting.append(engine.writes_waiting)
        if damages:
            damages.pop()(Path(file.path))
        return file

    monkeypatch.setattr(ContentFolder, "write", damaged)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        with caplog.at_level(logging.WARNING):
            report = await engine.step([replace(LESSON, completions=LESSON.completions[:1])])
    assert (report.step, report.tokens, damages) == (1, TOKENS, [])
    assert waiting == [0, *[1] * len(DAMAGES)]
    assert engine.writes_waiting == 0
    (stops, goes_on) = caplog.messages
    assert "the engine stops until the disk takes data: step failed with DamagedFile" in stops
    assert goes_on == "the engine no longer waits for the disk"


@pytest.mark.usefixtures("counting", "patient")
async def test_groups_are_given_again_until_the_node_has_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damages, reads = list(DAMAGES), list[int]()
    check = ContentFile.check_size

    def damaged(self: ContentFile, most: int) -> None:
        check(self, most)
        reads.append(len(self.sizes))
        if damages and len(self.sizes) < 3:
            damages.pop()(Path(self.path))

    tasks = [GroupTask(number, (number + 20,), (b"s" * 32,)) for number in range(20)]
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        await engine.submit(tasks, Sampling(1.0, 4, 1))
        assert not engine.has_room
        monkeypatch.setattr(ContentFile, "check_size", damaged)
        found = await engine.advance()
        assert [group.group for group in found] == [19, 18, 17]  # as one call gave them
        assert reads == [1, 2, 3]
        damages.clear()
        while len(found) < 20:
            found += await engine.advance()
        assert [group.group for group in found] == list(range(20))[::-1]
        assert [one.completions[0].tokens for one in found] == [
            (group.group + 20,) for group in found
        ]
        assert engine.has_room
        assert await engine.advance() == []
        assert await world.disk.list(FOLDER) == []


@pytest.mark.usefixtures("counting")
async def test_an_engine_that_fails_has_dropped_what_was_under_way(tmp_path: Path) -> None:
    tasks = [GroupTask(number, (number,), (b"s" * 32,)) for number in range(11, 16)]
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        await engine.submit(tasks, Sampling(1.0, 4, 1))
        assert [group.group for group in await engine.advance()] == [15]
        assert [group.group for group in await engine.advance()] == [14]
        with pytest.raises(EngineError, match="advance failed with EngineError: 13 is not"):
            await engine.advance()
        assert (engine.has_room, await engine.advance()) == (True, [])
        await engine.submit(tasks[-1:], Sampling(1.0, 4, 1))
        await engine.drop()
        assert await engine.advance() == []
        (group,) = await draw_all(engine, tasks[:1], Sampling(1.0, 4, 1))
        assert group.group == 11


@pytest.mark.parametrize("damage", DAMAGES)
async def test_what_was_not_written_is_refused_on_both_sides(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "content/0"
    file = write_content(str(path), RECORDS, MOST)
    with open_content(file, bytes, MOST) as values:
        assert list(values) == RECORDS
        assert (values[-1], values[1:3]) == (RECORDS[-1], RECORDS[1:3])
    folder = ContentFolder(RealDisk(tmp_path), "content")
    assert await folder.read("content/0", file, bytes, MOST) == RECORDS
    damage(path)
    sentence = r"content/0 (is not what was written there|cannot be read): "
    with pytest.raises(DamagedFile, match=sentence), open_content(file, bytes, MOST):
        pass
    with pytest.raises(DamagedFile, match=sentence):
        await folder.read("content/0", file, bytes, MOST)


async def test_files_have_the_limit_of_the_recipe(tmp_path: Path) -> None:
    limit = ContentLimit(completions=16, tokens=10_000, context=1000, proof_values=62)
    tokens = 256 * 16 * 10_000
    assert 8 * tokens < limit.of(256) < 16 * tokens
    folder = ContentFolder(RealDisk(tmp_path), "content")
    file = await folder.write(folder.new(), RECORDS, 49)
    with pytest.raises(EngineError, match=r"has 49 bytes of content, .* allows 48"):
        await folder.write(folder.new(), RECORDS, 48)
    with pytest.raises(EngineError, match=r"allows 48"):
        write_content(str(tmp_path / "over"), RECORDS, 48)
    with pytest.raises(EngineError, match=r"allows 48"), open_content(file, bytes, 48):
        pass
    with pytest.raises(StorageError, match=r"cannot be written"):
        write_content(str(tmp_path / "over/below"), RECORDS, 49)


async def test_both_sides_write_the_same_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ContentFolder(RealDisk(tmp_path), "content")
    for block in (1, 5, 6, 49, 50):
        monkeypatch.setattr(content, "BLOCK", block)
        for records in ([], [b""], RECORDS, RECORDS * 3):
            path = folder.new()
            file = await folder.write(path, records, MOST)
            assert write_content(folder.locate(path), records, MOST) == file
            assert await folder.read(path, file, bytes, MOST) == records
            with open_content(file, bytes, MOST) as values:
                assert list(values) == records
    await folder.clear()
    assert not (tmp_path / "content").exists()


def test_a_mapped_step_teaches_the_same_and_is_decoded_by_minibatches(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    groups = [
        codec.decode_training(codec.encode_training(lessons(index)[0].group))
        for index in range(5)
    ]
    path = str(tmp_path / "step")
    file = write_content(path, map(codec.encode_training, groups), 10 * MOST)
    alike = [TorchLearner(SMALL) for _ in range(2)]
    for learner in alike:
        learner.model.initialise(Random(1).randrange(99))
    with open_content(file, codec.decode_training, 10 * MOST) as content:
        assert list(content) == groups
        for _ in range(3):
            assert alike[0].step(groups) == alike[1].step(content)
    for one, other in zip(*(learner.model.parameters() for learner in alike), strict=True):
        assert torch.equal(one, other)
