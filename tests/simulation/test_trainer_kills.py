"""A killed trainer repeats the steps since its checkpoint, and gets the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2p.node.config import NodeConfig
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import StepReport, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.fake import FakeEngine, FakePolicy, first_policy, next_policy
from roles.own.status import SwarmStatus
from roles.trainer.session import TrainerSession
from sim.node.swarm import Swarm
from sim.run.scenario import Scenario
from sim.workloads import spine
from tests.support.swarm import CAST, CHECKPOINTS, Play, perform
from tests.sweeps import swept

EVERY = 3
STEPS = 10


@pytest.fixture(autouse=True)
def rare_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = spine._config

    def config() -> NodeConfig:
        table = {"trainer": {"checkpoint_every": EVERY}}
        return replace(plain(), role=table)

    monkeypatch.setattr(spine, "_config", config)


class Course:
    """Every step that any life of the trainer took, and every policy that was published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lessons: dict[int, list[Sequence[TrainingGroup]]] = {}
        self.config: EngineConfig | None = None
        self.published: dict[int, list[bytes]] = {}
        take, publish = FakeEngine.step, TrainerSession.publish

        async def step(this: FakeEngine, groups: Sequence[TrainingGroup]) -> StepReport:
            report = await take(this, groups)
            self.config = this._config
            self.lessons.setdefault(report.step, []).append(groups)
            return report

        async def out(this: TrainerSession, step: int) -> None:
            assert isinstance(this.engine, FakeEngine)
            assert this.engine._learning is not None
            self.published.setdefault(step, []).append(this.engine._learning.encode())
            await publish(this, step)

        monkeypatch.setattr(FakeEngine, "step", step)
        monkeypatch.setattr(TrainerSession, "publish", out)

    def undisturbed(self) -> list[FakePolicy]:
        """Every policy of a trainer that learns from these groups and is never killed."""
        assert self.config is not None
        policies = [first_policy(self.config)]
        for step in range(1, STEPS + 1):
            lesson = self.lessons[step][-1]
            policies.append(next_policy(policies[-1], self.config.profile.learning, lesson))
        return policies


class Deadly(Play):
    """The trainer dies some seconds after it was started, again and again."""

    def __init__(self, delays: Sequence[float]) -> None:
        super().__init__(CAST)
        self._delays = delays

    async def disturb(self, swarm: Swarm) -> None:
        for delay in self._delays:
            await swarm.sleep(delay)
            swarm.kill("trainer-1", torn=True)
            await swarm.sleep(0.2)
            swarm.restart("trainer-1")

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        status = await super()._play(swarm, scenario, sampling)
        self.disk = swarm.nodes["trainer-1"].disk
        return status


@pytest.mark.parametrize("seed", swept(range(3), 1))
def test_killed_at_any_time_it_comes_to_the_same_weights(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    course, rng = Course(monkeypatch), random.Random(seed)
    delays = [rng.uniform(0.3, 4.0) for _ in range(7)]
    health = perform(play := Deadly(delays), seed=seed, steps=STEPS)
    assert health["done"] == 1
    assert health["trainer-1"]["roles"]["trainer"]["step"] == STEPS
    assert any(len(lessons) > 1 for lessons in course.lessons.values())  # some were repeated
    for step, policy in enumerate(course.undisturbed()):
        assert set(course.published[step]) == {policy.encode()}
    weights = play.disk.read_now(f"trainer/weights/{STEPS:08d}.safetensors", 0, None)
    assert weights == course.undisturbed()[-1].encode()


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Places stay until the older generation covers them."""

    class Rotten(Deadly):
        async def disturb(self, swarm: Swarm) -> None:
            watcher, node = swarm.nodes["relay-1"].world, swarm.nodes["trainer-1"]
            while self._open["trainer-1"][0].shardcast.newest < 2 * EVERY - 1:
                await watcher.sleep(0.05)
            swarm.kill("trainer-1")
            node.disk.corrupt(CHECKPOINTS[0], 70)  # of step 3; the other is of step 0
            swarm.restart("trainer-1")

    course = Course(monkeypatch)
    health = perform(Rotten([]), steps=STEPS)
    assert health["done"] == 1
    repeated = [step for step, lessons in course.lessons.items() if len(lessons) > 1]
    assert repeated[:5] == [1, 2, 3, 4, 5]
    for step, policy in enumerate(course.undisturbed()):
        assert set(course.published[step]) == {policy.encode()}


@pytest.mark.deep
def test_places_that_two_checkpoints_cover_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    Course(monkeypatch)
    perform(play := Deadly([]), steps=STEPS)
    left = [path for path in play.disk.paths() if path.startswith("trainer/intake/")]
    # The steps after the older checkpoint (9, the last is of 10), those that wait, the log.
    assert 1 < len(left) <= 2 + 2 * 8 + round(1.5 * 8)
