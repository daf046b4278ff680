"""A run whose model is never right: six minutes of ``step 0/30``, and nobody said why."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p.machine import RealWorld
from roles.shared.durable import Durable
from roles.trainer.core.buffer import GroupBuffer
from roles.trainer.curve import LearningCurve
from roles.trainer.intake import ALIKE, Intake
from roles.trainer.metrics import Metrics
from roles.trainer.session import TrainerSession
from tests.unit.trainer_life import CONFIG, KEY, LEARNER, Ledger, ToldInbox, Unasked, place

torch = pytest.importorskip("torch", reason="tests.unit.trainer_life learns with it")


async def test_a_hundred_groups_alike_are_said_with_the_remedy_until_one_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, sampling = RealWorld(KEY, tmp_path), CONFIG.sampling
    node: Any = SimpleNamespace(world=world)
    ledger: Any = Ledger(tmp_path)
    inbox, durable = ToldInbox(world, "intake", tmp_path / "told"), Durable(world, "trainer")
    intake = Intake(node, sampling, ledger, inbox, GroupBuffer(sampling.lag), durable)
    curve = LearningCurve(world.disk, sampling, LEARNER, Unasked())
    other: Any = None
    engine: Any = SimpleNamespace(warning="")
    session = TrainerSession(
        *(
            node,
            sampling.steps,
            LEARNER,
            engine,
            intake,
            other,
            curve,
            other,
            other,
            Metrics({}),
        )
    )
    places = -(-ALIKE // sampling.submission)
    intake.note_unsent(KEY.peer_id, places - 1)
    assert session.warning == ""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            intake.note_unsent(KEY.peer_id, 1)
    assert [one.split(" ")[0] for one in caplog.messages] == ["nothing_to_learn"]
    assert "Give easier tasks" in session.warning
    curve.learnt.greedy = 0.98
    assert "Give harder tasks" in session.warning
    await intake.take(place(0))
    assert session.warning == ""
