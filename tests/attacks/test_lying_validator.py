"""A validator that signs whatever it likes: what of that reaches the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import trio
from roles.trainer.check import DeliveryCheck
from roles.validator.judge import Judge
from roles.validator.verdicts import Job, Ruling

from p2p.identity import KeyPair, PeerId, verify
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.demo.players import CAST
from roles.engines.base import Completion, Group, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.torch.learner import TorchLearner
from roles.protocol.core.assignment import draw_order, run_sampling, validator_of
from roles.protocol.core.groups import (
    AcceptedWork,
    Commitment,
    Receipt,
    SignedVerdict,
    Submission,
    content_digest,
    decode_groups_untrusted,
)
from roles.protocol.replay import answers_of
from roles.rl.recipe import Recipe
from roles.trainer.core.buffer import BufferedGroup, GroupBuffer
from roles.trainer.intake import Intake
from roles.validator.role import Validator
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads.spine import Spine
from tests.trainer_bench import Silent, make_run

WORKER, STRANGER = KeyPair(b"w" * 32), KeyPair(b"s" * 32)
JUDGES = (KeyPair(b"j" * 32), KeyPair(b"k" * 32))
RUN_ID = b"r" * 32
LOOK = 0.5
"""Virtual seconds between looks at the trainer."""


class LyingJudge(Judge):
    """Accepts everything, with the reward that it wishes."""

    reward: ClassVar[float] = 3e38

    async def judge(self, job: Job, weights: str) -> Ruling:
        await trio.lowlevel.checkpoint()
        submission = job.submission
        groups = decode_groups_untrusted(submission.content)
        # With spread, or no step would take the group anyway.
        rewards = tuple(
            self.reward * (i % 2) for group in groups for i, _ in enumerate(group.completions)
        )
        me, commitment = self.node.host.peer_id, submission.commitment
        logprobs = self.logprobs(groups)
        lie = SignedVerdict(
            me,
            commitment,
            Verdict.ACCEPTED,
            "fine",
            0.0,
            0.0,
            rewards,
            content_digest(logprobs),
        )
        return Ruling(lie.signed(self.node.world.signer), logprobs)

    def logprobs(self, groups: Sequence[Group]) -> bytes:
        return bytes(2 * sum(len(one.tokens) for group in groups for one in group.completions))


class FlatteringJudge(LyingJudge):
    reward: ClassVar[float] = 1.0


class MumblingJudge(LyingJudge):
    """The right rewards, and log-probs that are none."""

    reward: ClassVar[float] = 1.0
    said: ClassVar[bytes] = b"\xff\xff"

    def logprobs(self, groups: Sequence[Group]) -> bytes:
        return self.said * (len(super().logprobs(groups)) // 2)


class RubberStampingJudge(Judge):
    """Pays what is right, and accepts what is not: cheap tokens count as drawn."""

    async def judge(self, job: Job, weights: str) -> Ruling:
        ruling = await super().judge(job, weights)
        if ruling.verdict.verdict is Verdict.ACCEPTED:
            return ruling
        replayer, commitment = self._replayer, job.submission.commitment
        groups = decode_groups_untrusted(job.submission.content)
        order = draw_order(self.run, commitment.node, commitment.version, commitment.policy)
        made = await replayer._environment.tasks(order.task_seeds(commitment.index))
        tasks = order.with_draws(commitment.index, made)
        answers = answers_of([task for task, _ in tasks], groups)
        scored = await replayer._engine.score(
            [task for _, task in tasks], groups, run_sampling(self.run)
        )
        logprobs = b"".join(one.logprobs for one in scored)
        lie = replace(
            ruling.verdict,
            verdict=Verdict.ACCEPTED,
            rewards=tuple(await replayer._environment.rewards(answers)),
            logprobs=content_digest(logprobs),
        )
        return Ruling(lie.signed(self.node.world.signer), logprobs)


class LyingValidator(Validator):
    name: ClassVar[str] = "validator"
    judge_type: ClassVar[type[Judge]] = LyingJudge


class FlatteringValidator(LyingValidator):
    judge_type: ClassVar[type[Judge]] = FlatteringJudge


class MumblingValidator(LyingValidator):
    judge_type: ClassVar[type[Judge]] = MumblingJudge


class RubberStampingValidator(LyingValidator):
    judge_type: ClassVar[type[Judge]] = RubberStampingJudge


def is_convicted(spine: Spine) -> bool:
    trainer = spine.health().get("trainer-1", {}).get("roles", {}).get("trainer", {})
    return bool(trainer.get("liars"))


def play(
    validator: type[Validator], steps: int = 3, seed: int = 7, **others: str
) -> Mapping[str, Any]:
    """Every node's health when the only validator of a swarm, a liar, has been convicted for
    two seconds; after two minutes if it never is."""
    cast = {
        "relay-1": "none",
        "trainer-1": "trainer",
        "validator-1": f"{__name__}:{validator.__name__}",
        "inference-1": "inference",
        **others,
    }
    spine = Spine(cast)
    scenario: Scenario = load_scenario("spine").with_changes(nodes=len(cast))
    scenario = replace(
        scenario, parameters={**scenario.parameters, "steps": steps, "kill_at_step": 99}
    )

    async def main(simulation: Simulation) -> Mapping[str, Any]:
        async with open_swarm(simulation) as swarm, trio.open_nursery() as nursery:
            nursery.start_soon(spine.run, swarm, scenario)
            with trio.move_on_after(120):
                while not is_convicted(spine):
                    await swarm.sleep(LOOK)
            await swarm.sleep(2)
            nursery.cancel_scope.cancel()
        return spine.health()

    outcome = run_simulation(main, seed=seed, horizon=600)
    assert outcome.value is not None
    return outcome.value


@pytest.mark.parametrize("validator", [LyingValidator, FlatteringValidator, MumblingValidator])
def test_no_group_is_learnt_from_with_rewards_that_its_tokens_do_not_earn(
    validator: type[Validator],
) -> None:
    """A reward of 3e38 was learnt from; the trainer computes rewards from tasks and
    tokens.
    """
    trainer = play(validator)["trainer-1"]["roles"]["trainer"]
    assert trainer["groups_used"] == 0
    assert trainer["step"] == 0


def test_a_validator_that_accepts_greedy_tokens_is_found_and_refused() -> None:
    """It was believed for as long as the run lasted, and its friend's tokens were learnt
    from."""
    health = play(RubberStampingValidator, 400, seed=11, **{"inference-2": CAST["cheat-1"]})
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert list(trainer["liars"]) == [health["validator-1"]["peer"]]
    assert trainer["lies"] == 1  # the first that it signed
    assert trainer["pooled"] == 0
    assert trainer["step"] < 400
    validator = next(iter(health["validator-1"]["roles"].values()))
    assert validator["accepted"] > trainer["submissions_taken"]  # the rest was refused


def test_in_an_honest_swarm_replays_convict_nobody() -> None:
    """With the demo's cheat, as its validator refuses him."""
    scenario = load_scenario("spine")
    scenario = replace(scenario, parameters={**scenario.parameters, "steps": 40})

    async def main(simulation: Simulation) -> Mapping[str, Any]:
        async with open_swarm(simulation) as swarm:
            spine = Spine()
            await spine.run(swarm, scenario)
            return spine.health()

    outcome = run_simulation(main, seed=7, horizon=600)
    assert outcome.value is not None
    trainer = outcome.value["trainer-1"]["roles"]["trainer"]
    assert trainer["done"]
    assert trainer["replayed"] >= 2
    assert (trainer["liars"], trainer["lies"], trainer["replays_unsure"]) == ({}, 0, 0)


def delivery(
    judge: KeyPair, worker: KeyPair = WORKER, index: int = 0, content: bytes = b"1"
) -> bytes:
    commitment = Commitment(
        RUN_ID, worker.peer_id, PolicyVersion(1), bytes(32), index, content_digest(content)
    )
    work = Submission.sign(commitment, content, worker)
    bound = content_digest(b"")
    verdict = SignedVerdict(
        judge.peer_id, commitment, Verdict.ACCEPTED, "", 0.0, 0.0, (), bound
    )
    return AcceptedWork(verdict.signed(judge), work, b"").to_bytes()


class _Disk:
    """An inbox and a ledger that take everything."""

    async def keep(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()

    async def append(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


class CheckWithoutModel(DeliveryCheck):
    async def groups(self, *_: object) -> list[Any]:
        return []


TRAINER_RUN: Any = SimpleNamespace(
    id=RUN_ID,
    terms=SimpleNamespace(
        recipe=Recipe(),
        validators=tuple(judge.peer_id for judge in JUDGES),
    ),
)


def make_intake(check: type[DeliveryCheck] = CheckWithoutModel, inbox: Any = None) -> Intake:
    world = SimpleNamespace(
        verify=verify,
        buggify=lambda _: False,
        sometimes=lambda *_: None,
        rng=Random,
        now=lambda: 0.0,
    )

    def may(peer: PeerId, _: object) -> bool:
        return peer != STRANGER.peer_id

    node: Any = SimpleNamespace(
        world=world,
        shardcast=SimpleNamespace(holds=lambda _: True),
        may=may,
        ledgers=SimpleNamespace(is_forked=lambda _: False, forks=(), on_news=lambda _: None),
    )
    node.book = SimpleNamespace(hint=lambda _: False)
    node.gossip, node.run = Silent(), make_run()
    disk: Any = _Disk()
    nothing: Any = SimpleNamespace()
    standing: Any = SimpleNamespace(run=TRAINER_RUN, why_not="")
    auditor: Any = SimpleNamespace(why_refused=lambda _: "")
    checks = check(node, TRAINER_RUN, nothing, standing, auditor)
    return Intake(node, Recipe(), checks, disk, inbox or disk, GroupBuffer(100, 2), nothing)


async def test_only_the_judge_of_a_place_delivers_it_once_and_for_admitted_workers() -> None:
    """A validator sold others' places, one place many times, and workers of its
    invention.
    """
    intake = make_intake()
    right = validator_of(TRAINER_RUN, WORKER.peer_id, PolicyVersion(1))
    judge, other = JUDGES if JUDGES[0].peer_id == right else JUDGES[::-1]

    async def hand_over(by: KeyPair, payload: bytes) -> tuple[Receipt, str]:
        return await intake.take(by.peer_id, payload)

    assert (await hand_over(other, delivery(other)))[1].endswith(
        "judges this node under this policy"
    )
    assert (await hand_over(judge, delivery(judge))) == (Receipt.TAKEN, "")
    receipt, reason = await hand_over(judge, delivery(judge, content=b"2"))
    assert receipt is Receipt.UNWANTED
    assert "another submission was taken for this place" in reason
    assert (await hand_over(judge, delivery(judge, index=1, content=b"2"))) == (
        Receipt.TAKEN,
        "",
    )
    for by in JUDGES:
        receipt, reason = await hand_over(by, delivery(by, STRANGER))
        assert receipt is Receipt.UNWANTED
        assert "may not generate" in reason


async def test_work_that_no_step_can_use_is_not_kept_on_the_trainers_disk() -> None:
    """Files go when a step is done: accepted work without spread brings none, and filled the
    disk.
    """
    kept: list[int] = []

    class Check(CheckWithoutModel):
        async def groups(self, work: AcceptedWork) -> list[Any]:
            verdict = work.verdict
            rewards = (1.0, 0.0) if verdict.commitment.index == 1 else (1.0, 1.0)
            group = TrainingGroup((1,), (), rewards)
            return [BufferedGroup(PolicyVersion(1), verdict.commitment.content, 0, group)]

    class Keeping(_Disk):
        async def keep(self, work: AcceptedWork) -> None:
            kept.append(work.verdict.commitment.index)

    intake = make_intake(Check, cast(Any, Keeping()))
    right = validator_of(TRAINER_RUN, WORKER.peer_id, PolicyVersion(1))
    judge = next(one for one in JUDGES if one.peer_id == right)
    for index in range(3):
        payload = delivery(judge, index=index, content=bytes([index]))
        assert await intake.take(judge.peer_id, payload) == (Receipt.TAKEN, "")
        assert await intake.take(judge.peer_id, payload) == (Receipt.TAKEN, "")
    assert kept == [1]
    assert len(intake.buffer) == 1


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("said", [-65504.0, 0.0])
def test_no_log_probs_that_a_verdict_may_bind_end_the_learner(said: float, kl: float) -> None:
    """Both are finite and not above 0. Of the four steps two had gradients that are no numbers:
    the trainer ended, and again on the same groups whenever it was started."""
    torch.set_num_threads(1)
    learner = TorchLearner(EngineConfig(recipe=Recipe(kl=kl)))
    learner.model.initialise(0)
    with torch.no_grad():  # a model that is sure: some tokens are hundreds of nats away
        learner.model.lm_head.weight.mul_(1000)
    answers = tuple(Completion((4, 5, 6, 0), (said,) * 4) for _ in range(4))
    groups = [TrainingGroup((1, 2, 3), answers, (1.0, 0.0, 0.0, 1.0)) for _ in range(4)]
    report = learner.step(groups)
    assert all(map(math.isfinite, (report.loss, report.k3, report.gradient_norm)))
    assert all(bool(weight.isfinite().all()) for weight in learner.model.parameters())
