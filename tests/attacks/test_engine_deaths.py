"""The process of an engine dies: for lack of memory, by a driver, by a person's hand."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.errors import StorageError, WorkerDied
from p2p.machine import open_world
from p2p.worker_process import ProcessWorker
from p2p.world import World
from roles.engines import client, codec, lasting
from roles.engines.base import EngineError, GroupTask, Sampling
from roles.engines.client import open_engine
from roles.engines.config import EngineConfig
from roles.engines.content import ContentFile, ContentFolder
from roles.engines.fake import FakeEngine
from roles.engines.lasting import EngineLost
from roles.engines.mapped import open_content
from roles.protocol.scorer import ENGINE_FAILED
from roles.protocol.standing import RoleStanding
from roles.shared.checked_json import DamagedFile
from tests.attacks.judged import accepted, play, trainer, validator
from tests.processes import kill_family
from tests.unit.content_life import ARGV, CONFIG, LESSON


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WORKER_ARGV", (*ARGV, "worker"))
    monkeypatch.setattr(lasting, "FIRST_PAUSE", 0.0)


def kill(engine: Any) -> None:
    kill_family(engine._worker._worker.pid)


@pytest.mark.usefixtures("counting")
async def test_a_process_that_was_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WorkerDied came out of every call after that, and the first of them ended the node."""
    monkeypatch.setattr(lasting, "MOST_DEATHS", 2)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        assert (await engine.step([LESSON])).step == 1
        for _ in range(2):
            kill(engine)
            with pytest.raises(WorkerDied, match="exit -9"):
                await engine.step([LESSON])
            assert (await engine.step([LESSON])).step == 1, "a new one, which holds nothing"
        assert (await engine.step([LESSON])).step == 2
        assert await world.disk.list("engine/engine") == []


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("deaths", [1, lasting.MOST_DEATHS])
async def test_a_process_that_dies_while_it_starts_is_replaced(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WorkerDied came out of `open_engine`, and ended the node: of one that dies later, four
    more are tried.
    """
    start, started = lasting.LastingWorker.start, 0

    async def start_and_die(self: lasting.LastingWorker) -> None:
        nonlocal started
        await start(self)
        started += 1
        if started <= deaths:
            assert isinstance(self._worker, ProcessWorker)
            kill_family(self._worker.pid)

    monkeypatch.setattr(lasting.LastingWorker, "start", start_and_die)
    async with open_world(tmp_path) as world:
        if deaths < lasting.MOST_DEATHS:
            async with open_engine(world, CONFIG) as engine:
                assert (await engine.step([LESSON])).step == 1
        else:
            with pytest.raises(
                EngineLost, match=r"5 times in a row at configure: .* the memory"
            ):
                async with open_engine(world, CONFIG):
                    pytest.fail("no engine was configured")


@pytest.mark.usefixtures("counting")
async def test_a_process_that_always_dies_is_given_up_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "MOST_DEATHS", 3)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        living = lasting.LastingWorker._living
        pauses: list[float] = []

        async def doomed(self: lasting.LastingWorker) -> Any:
            found = await living(self)
            kill(engine)
            return found

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(lasting.LastingWorker, "_living", doomed)
        monkeypatch.setattr(lasting, "FIRST_PAUSE", 1.0)
        monkeypatch.setattr(world, "sleep", sleep)
        for _ in range(2):
            with pytest.raises(WorkerDied):
                await engine.step([LESSON])
        with pytest.raises(EngineLost, match=r"3 times in a row at step: .* the memory"):
            await engine.step([LESSON])
        assert pauses == [1.0, 2.0]


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

    monkeypatch.setattr(f"roles.{role}.role.open_engine", open_mortal)
    standings: list[str] = []
    make_standing = RoleStanding.__init__

    def note_standing(self: RoleStanding, node: Any, job: str, name: str = "") -> None:
        standings.append(job)
        make_standing(self, node, job, name)

    monkeypatch.setattr(RoleStanding, "__init__", note_standing)
    workers = {"inference-1": "inference", "inference-2": "inference"}
    health = play(workers, 100.0, steps=6)
    assert any(count >= 3 for engine in engines for count in engine.calls.values())
    assert trainer(health)["step"] == 6
    # an engine is of the edition under which it was opened, however often it dies
    assert standings.count("trainer") == 1
    assert validator(health)["rejected"] == 0
    assert accepted(health, "inference") > 4
    assert (ENGINE_FAILED in validator(health)["inconclusive"]) == (role == "validator")


def test_what_the_machine_refuses_is_not_taken_for_a_full_disk() -> None:
    """A bare OSError of the worker, whatever it was, was waited for as a full disk is: for
    ever, with one line in the log.
    """
    full = codec.failure_of(OSError(errno.ENOSPC, "No space left on device"))
    assert client._KINDS[full.kind] is StorageError
    for number in (errno.ENOMEM, errno.EMFILE, errno.ENODEV):
        failure = codec.failure_of(OSError(number, os.strerror(number)))
        assert client._KINDS.get(failure.kind, EngineError) is EngineError


def test_an_error_that_quotes_a_file_crosses_the_pipe_whatever_it_quotes() -> None:
    """The name of a tensor with half of a surrogate pair: UnicodeEncodeError in the worker,
    which ended it, and with it the node.
    """
    failure = codec.failure_of(EngineError("weights: \ud800" + "x" * 10**6))
    sent = codec.encode_failure(failure)
    assert len(sent) < 4 * codec.MAX_SAID
    again = codec.decode_reply(sent)
    assert again == failure
    assert again.message.startswith(r"weights: \ud800x")


async def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """The engine opened it, and waited for a writer that never came."""
    os.mkfifo(tmp_path / "0")
    file = ContentFile(str(tmp_path / "0"), (1,), bytes(32))
    with pytest.raises(DamagedFile, match="cannot be read"), open_content(file, bytes, 10):
        pass


async def test_a_file_that_goes_while_it_is_read_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FileNotFoundError came out of the call, and ended the role."""
    async with open_world(tmp_path) as world:
        folder = ContentFolder(world.disk, "content")
        file = await folder.write("content/0", [b"x"], 10)
        size = world.disk.size

        async def size_then_none(path: str) -> int | None:
            found = await size(path)
            await world.disk.remove(path)
            return found

        monkeypatch.setattr(world.disk, "size", size_then_none)
        with trio.fail_after(10), pytest.raises(DamagedFile, match="cannot be read"):
            await folder.read("content/0", file, bytes, 10)
