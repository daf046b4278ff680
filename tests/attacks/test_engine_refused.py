"""A machine that starts no further process, for a moment or for good; an engine that fails
while a newer policy is here."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import WorkerDied, WorkerNotStarted
from p2p.machine import open_world
from roles.engines import client
from roles.engines.base import EngineError, Group
from roles.engines.client import open_engine
from roles.engines.fake import FakeEngine
from roles.inference.outbox import FullPlace
from roles.inference.session import InferenceSession
from roles.workers import client as workers
from roles.workers.client import START_PAUSES
from tests.support.processes import kill
from tests.support.swarm import CAST, Play, perform, trainer_of
from tests.unit.content_life import ARGV, CONFIG


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
    """It waited for the policy after the newest, and the trainer for its work: a run of one
    worker stood at step 3 of 6 for ever."""
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
