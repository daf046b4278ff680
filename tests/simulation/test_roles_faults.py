"""Roles under crashes, several validators, lost answers: nothing honest is rejected, lost or
used twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from p2p.identity import PeerId
from roles.engines.base import EngineError
from roles.engines.fake import FakeEngine
from roles.inference.session import InferenceSession
from roles.inference.windows import Windows
from roles.protocol.core.window import Submission
from sim.node.swarm import NodeMain, SimNode, Swarm
from tests.support.swarm import (
    CAST,
    Lingering,
    Play,
    finish,
    perform,
    roles_of,
    scored,
)

TWO_VALIDATORS = {**CAST, "validator-2": "validator"}


def test_two_validators_share_newcomers_and_nobody_honest_is_rejected() -> None:
    cast = {**TWO_VALIDATORS, **{f"inference-{number}": "inference" for number in range(3, 7)}}
    health = finish(Play(cast), steps=10)
    assert all(judge["accepted"] > 0 for judge in roles_of(health, "validator"))


def test_a_run_without_validators_works() -> None:
    """The trainer's scorer judges newcomers: two machines are a run."""
    cast = {name: role for name, role in CAST.items() if role in ("none", "trainer")}
    finish(Play({**cast, "inference-1": "inference"}), steps=6)


@pytest.mark.deep
def test_a_run_goes_on_without_one_of_two_validators() -> None:
    class Bereft(Play):
        async def disturb(self, swarm: Swarm) -> None:
            swarm.kill("validator-2")
            del self._open["validator-2"]

    cast = {**TWO_VALIDATORS, **{f"inference-{number}": "inference" for number in range(3, 7)}}
    finish(Bereft(cast), steps=6)


@pytest.mark.deep
def test_a_worker_killed_again_and_again_without_a_validator_stays_in_its_window() -> None:
    class Stubborn(Play):
        async def disturb(self, swarm: Swarm) -> None:
            watcher = swarm.nodes["relay-1"].world
            swarm.kill("validator-1")
            for _ in range(4):
                await watcher.sleep(5)
                swarm.restart("inference-1")
            await watcher.sleep(5)
            swarm.restart("validator-1")

    finish(Stubborn(CAST))


def test_nobody_works_under_the_last_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    plain = InferenceSession.produce

    async def produce(self: InferenceSession) -> Any:
        submission = await plain(self)
        late.append(submission.version)
        return submission

    monkeypatch.setattr(InferenceSession, "produce", produce)
    health = perform(Lingering(CAST), steps=3)
    assert health["done"] == 1
    assert late.count(3) <= 2  # what the two nodes were about to draw when it came


def test_a_lost_answer_is_given_again_whatever_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine fails now and then, and every worker's first answer is lost."""
    score, send = FakeEngine.score, Windows.send
    calls = itertools.count()
    lost: dict[bytes, None] = {}

    async def fail(self: FakeEngine, *args: Any) -> Any:
        if next(calls) % 5 == 0:
            raise EngineError("out of memory")
        return await score(self, *args)

    async def lose(self: Windows, scorer: PeerId, answer: Any, submission: Submission) -> Any:
        reply = await send(self, scorer, answer, submission)
        is_first = submission.commitment.digest not in lost
        lost[submission.commitment.digest] = None
        return None if is_first else reply

    monkeypatch.setattr(FakeEngine, "score", fail)
    monkeypatch.setattr(Windows, "send", lose)
    health = finish(Play(CAST), steps=6)
    undecided = [
        one["inconclusive"].get("the engine could not score it", 0)
        for kind in ("trainer", "validator")
        for one in roles_of(health, kind)
    ]
    assert sum(undecided) > 3


def test_clocks_ten_minutes_off_change_nothing() -> None:
    class Unsynchronised(Play):
        def _life(self, role: str) -> NodeMain:
            plain = super()._life(role)

            async def live(machine: SimNode) -> None:
                machine.clock.change(
                    skew={"trainer-1": 600.0, "inference-1": -600.0}.get(machine.name, 0.0)
                )
                await plain(machine)

            return live

    health = finish(Unsynchronised(CAST))
    assert all(scored(health, name)["accepted"] for name in ("inference-1", "inference-2"))


def test_a_place_that_is_stuck_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Windows.send

    async def send(self: Windows, scorer: PeerId, answer: Any, submission: Submission) -> Any:
        if submission.index == 0 and not self._counts.retries:
            await self._node.world.sleep(20)
        return await plain(self, scorer, answer, submission)

    monkeypatch.setattr(Windows, "send", send)
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    finish(Play(cast), steps=2, groups=64)
