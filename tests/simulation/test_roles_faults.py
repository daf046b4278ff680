"""Roles under crashes, several validators, greedy peers: nothing honest is rejected, lost or
used twice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio

from p2p.identity import PeerId
from p2p.shardcast import Shardcast
from p2p.shardcast.manifest import PolicyVersion
from roles.demo.status import SwarmStatus
from roles.engines.base import EngineError
from roles.engines.fake import FakeEngine
from roles.inference.session import InferenceSession
from roles.protocol.core.groups import Submission
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.session import TrainerSession
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import NodeMain, SimNode, Swarm, open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads import spine
from tests.simulation.test_bad_submissions import Forger

CAST = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
}


class Play(spine.Spine):
    """The spine with a cast and crashes of its own."""

    async def disturb(self, swarm: Swarm) -> None:
        """What goes wrong, beginning when the first policy is out."""

    async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
        watcher = swarm.nodes["relay-1"].world
        while self._status(recipe).trainer.get("step", -1) < 1:
            await watcher.sleep(spine.LOOK)
        await self.disturb(swarm)
        return await super()._play(swarm, scenario, recipe)


def perform(play: Play, seed: int = 7, **parameters: float) -> Mapping[str, Any]:
    """Every node's health at the end of a short run, and whether it ended well."""
    scenario: Scenario = load_scenario("spine").with_changes(nodes=len(play._cast))
    changes = {"steps": 4, "kill_at_step": 99, **parameters}
    scenario = replace(scenario, parameters={**scenario.parameters, **changes})

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            metrics = await play.run(swarm, scenario)
            return {"done": metrics["done"], **play.health()}

    outcome = run_simulation(main, seed=seed, horizon=600)
    assert outcome.value is not None
    return outcome.value


class Lingering(Play):
    """Goes on for a while when everything is done."""

    async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
        await super()._play(swarm, scenario, recipe)
        await swarm.sleep(30)
        return self._status(recipe)


def validators(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        node["roles"]["validator"]
        for node in health.values()
        if isinstance(node, dict) and "validator" in node["roles"]
    ]


@pytest.fixture
def two_validators(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cast in which every node's work may go to either of two validators."""
    one = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in ("validator-1", "validator-2"))
        return sign_run(
            replace(one(swarm, recipe).terms, validators=judges), keys.signer("owner")
        )

    monkeypatch.setattr(spine, "_write_run", write_run)
    return {**CAST, "validator-2": "validator"}


def test_two_validators_share_the_work_and_see_no_gaps(two_validators: dict[str, str]) -> None:
    health = perform(Play(two_validators), steps=10)
    assert health["done"] == 1
    assert [judge["rejected"] for judge in validators(health)] == [0, 0]
    assert all(judge["accepted"] > 0 for judge in validators(health))


def test_a_run_goes_on_without_one_of_two_validators(two_validators: dict[str, str]) -> None:
    class Bereft(Play):
        async def disturb(self, swarm: Swarm) -> None:
            swarm.kill("validator-2")
            del self._open["validator-2"]

    cast = {**two_validators, **{f"inference-{number}": "inference" for number in range(3, 7)}}
    health = perform(Bereft(cast), steps=6)
    assert health["done"] == 1
    assert [judge["rejected"] for judge in validators(health)] == [0]


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

    health = perform(Stubborn(CAST))
    assert health["done"] == 1
    assert validators(health)[0]["rejected"] == 0


CHECKPOINTS = ("trainer/checkpoint", "trainer/checkpoint.previous")


@pytest.mark.parametrize("harm", ["flipped", "cut", "removed"])
@pytest.mark.parametrize(
    "paths",
    [CHECKPOINTS[:1], CHECKPOINTS, ("trainer/progress.json",), ("trainer/intake/used.json",)],
    ids=["checkpoint", "both checkpoints", "progress", "used"],
)
def test_a_trainer_with_damaged_files_goes_on_and_contradicts_nothing(
    paths: tuple[str, ...], harm: str
) -> None:
    """It ended with a traceback, or wrote other weights under a published
    version.
    """

    class Rotten(Play):
        published: Mapping[str, bytes]

        async def disturb(self, swarm: Swarm) -> None:
            watcher, node = swarm.nodes["relay-1"].world, swarm.nodes["trainer-1"]
            while self._open["trainer-1"][0].shardcast.newest < 4:  # both checkpoints are there
                await watcher.sleep(0.1)
            swarm.kill("trainer-1")
            weights = [path for path in node.disk.paths() if path.startswith("trainer/weights")]
            self.published = {path: node.disk.read_now(path, 0, None) for path in weights}
            for path in paths:
                if harm == "removed":
                    node.disk.remove_now(path)
                elif harm == "flipped":
                    node.disk.corrupt(path, 70)
                else:
                    node.disk.replace_now(path, node.disk.read_now(path, 0, None)[:-5])
            swarm.restart("trainer-1")

        async def _play(self, swarm: Swarm, scenario: Scenario, recipe: Recipe) -> SwarmStatus:
            status = await super()._play(swarm, scenario, recipe)
            disk = swarm.nodes["trainer-1"].disk
            for path, before in self.published.items():
                assert disk.size_now(path) is None or disk.read_now(path, 0, None) == before
            return status

    health = perform(Rotten(CAST), steps=6)
    assert health["done"] == 1
    assert health["trainer-1"]["roles"]["trainer"]["step"] == 6
    assert health["relay-1"]["shardcast"]["newest"] == 6


@pytest.mark.parametrize(
    "where", ["before the checkpoint", "before the policy is out", "before it is forgotten"]
)
def test_a_trainer_killed_anywhere_learns_from_every_group_once(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = {
        "before the checkpoint": (FakeEngine, "save"),
        "before the policy is out": (TrainerSession, "publish"),
        "before it is forgotten": (Inbox, "forget_all_but"),
    }[where]
    here = trio.Event()
    calls = itertools.count()
    used: dict[int, list[tuple[bytes, int]]] = {}
    step = getattr(owner, name)
    wait = Intake.wait_groups

    async def stop_here(self: object, *args: Any) -> None:
        if next(calls) in (4, 7):
            here.set()
            await trio.sleep_forever()
        await step(self, *args)

    async def wait_groups(self: Intake, count: int) -> list[BufferedGroup]:
        taken = await wait(self, count)
        used[self._step] = [
            (group.source, group.number) for group in taken
        ]  # a step done again replaces itself
        return taken

    class Fatal(Play):
        async def disturb(self, swarm: Swarm) -> None:
            nonlocal here
            for _ in range(2):
                await here.wait()
                here = trio.Event()
                swarm.kill("trainer-1", torn=True)
                await swarm.sleep(0.5)
                swarm.restart("trainer-1")

    monkeypatch.setattr(owner, name, stop_here)
    monkeypatch.setattr(Intake, "wait_groups", wait_groups)
    health = perform(Fatal(CAST), steps=8)
    assert health["done"] == 1
    assert validators(health)[0]["rejected"] == 0
    assert sorted(used) == list(range(8))
    times = Counter(key for keys in used.values() for key in keys)
    assert set(times.values()) == {1}


class Prophet(Forger):
    """Claims a policy that will not exist for long."""

    name: ClassVar[str] = "prophet"

    def forge(self, honest: Any) -> dict[str, Any]:
        return {"version": PolicyVersion(honest.commitment.version + 1000)}


def test_work_under_a_policy_that_never_comes_blames_no_worker() -> None:
    health = perform(Lingering({**CAST, "attacker-1": f"{__name__}:Prophet"}))
    assert health["done"] == 1
    judge = validators(health)[0]
    assert set(judge["refused"]) == {"no such policy"}
    assert judge["rejected"] == 0
    assert health["attacker-1"]["roles"]["prophet"]["inconclusive"] == 0


def test_nobody_works_under_the_last_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    plain = InferenceSession.produce

    async def produce(self: InferenceSession) -> Any:
        submission = await plain(self)
        late.append(submission.commitment.version)
        return submission

    monkeypatch.setattr(InferenceSession, "produce", produce)
    health = perform(Lingering(CAST), steps=3)
    assert health["done"] == 1
    assert late.count(3) <= 2  # what the two nodes were about to draw when it came


def test_places_that_a_validator_gave_up_are_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a newer policy before an older one, which comes after all: what it gave up
    meanwhile is done.
    """
    holds = Shardcast.holds
    asked = itertools.count()

    def not_yet(self: Shardcast, version: PolicyVersion) -> bool:
        late = self._world.name == "validator-1" and version == 1
        return holds(self, version) and not (late and next(asked) < 2)

    monkeypatch.setattr(Shardcast, "holds", not_yet)
    judge = validators(perform(Play(CAST), steps=3, groups=128))[0]
    assert judge["inconclusive"] == {"the policy is not held by this validator": 2}
    assert judge["rejected"] == 0


def test_a_lost_answer_is_given_again_whatever_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine fails now and then, and every worker's first answer is lost."""
    score, plain = FakeEngine.score, InferenceSession.ask
    calls = itertools.count()
    lost: dict[bytes, None] = {}

    async def fail(self: FakeEngine, *args: Any) -> Any:
        if next(calls) % 3 == 0:
            raise EngineError("out of memory")
        return await score(self, *args)

    async def lose(self: InferenceSession, validator: Any, submission: Any) -> Any:
        verdict = await plain(self, validator, submission)
        first = submission.commitment.content not in lost
        lost[submission.commitment.content] = None
        return None if first else verdict

    monkeypatch.setattr(FakeEngine, "score", fail)
    monkeypatch.setattr(InferenceSession, "ask", lose)
    health = perform(Play(CAST), steps=6)
    assert health["done"] == 1
    judge = validators(health)[0]
    assert judge["inconclusive"]["the validator's engine could not score it"] > 3
    assert judge["rejected"] == 0


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

    health = perform(Unsynchronised(CAST))
    assert health["done"] == 1
    judge = validators(health)[0]
    assert judge["rejected"] == 0
    assert all(
        judge["nodes"][health[name]["peer"]]["accepted"]
        for name in ("inference-1", "inference-2")
    )


def test_a_submission_that_is_stuck_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = InferenceSession.ask

    async def ask(self: InferenceSession, validator: PeerId, submission: Submission) -> Any:
        if submission.commitment.index == 0 and not self.counts.retries:
            await self.node.world.sleep(20)
        return await plain(self, validator, submission)

    monkeypatch.setattr(InferenceSession, "ask", ask)
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    # sixteen submissions of one node under one policy
    health = perform(Play(cast), steps=2, groups=64)
    assert health["done"] == 1
    assert validators(health)[0]["rejected"] == 0
