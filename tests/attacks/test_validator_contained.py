"""What one submission, or the run's own environment, does to the roles: nothing that lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, cast

import pytest

from p2p.shardcast.manifest import PolicyVersion
from roles.engines.base import EngineError, GroupTask, Sampling
from roles.envs.base import Task
from roles.envs.client import LocalEnvironment
from roles.envs.contained import AnswerFailed, EnvironmentFailed, reward_of, task_of
from roles.envs.sort import SortEnvironment
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import validator_of
from roles.protocol.core.messages import TOO_LONG, Receipt, Submission, content_digest
from roles.rl.recipe import Recipe
from roles.trainer.curve import LearningCurve
from roles.validator.judge import ENVIRONMENT_FAILED
from tests.attacks.judged import play, trainer, validator
from tests.attacks.test_lying_validator import (
    JUDGES,
    TRAINER_RUN,
    WORKER,
    CheckWithoutModel,
    delivery,
    make_intake,
)

HUGE = 9_000_000


class Wordy(Inference):
    """Its first submission under each policy is too long; the others are honest."""

    name: ClassVar[str] = "wordy"

    def make_session(self, *args: Any) -> InferenceSession:
        return WordySession(*args, self.name, self.counts)


class WordySession(InferenceSession):
    async def produce(self) -> Submission:
        honest = await super().produce()
        if honest.commitment.index:
            return honest
        content = honest.content + bytes(HUGE)
        claim = replace(honest.commitment, content=content_digest(content))
        return Submission.sign(claim, content, self.node.world.signer)


def test_a_submission_that_is_too_long_is_answered_for_good_and_leaves_no_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was asked again for ever, with an empty refusal, and locked its worker
    out.
    """
    health = play({"inference-1": "inference", "wordy-1": f"{__name__}:Wordy"}, 60.0, steps=5)
    wordy = health["wordy-1"]["roles"]["wordy"]
    assert trainer(health)["step"] == 5
    assert wordy["rejected"] >= 2
    assert wordy["accepted"] > wordy["rejected"]
    assert wordy["retries"] < 20
    told = [record.getMessage() for record in caplog.records if TOO_LONG in record.getMessage()]
    assert len(told) >= wordy["rejected"]
    assert all(" over the limit of " in sentence for sentence in told)
    reasons = validator(health)["nodes"][health["wordy-1"]["peer"]]["reasons"]
    assert set(reasons) <= {reason for reason in reasons if reason.startswith(TOO_LONG)}


def _deep(*_: object) -> float:
    return _deep()


def _raises(error: Exception) -> Callable[..., float]:
    def fail(*_: object) -> float:
        raise error

    return fail


PLACE = r"\((.*\.py:\d+|roles\.envs\.sort\.SortEnvironment)\)$"
FAILURES: dict[str, Callable[..., Any]] = {
    "division": lambda *_: 1 / 0,
    "lookup": lambda *_: {}["missing"],
    "type": lambda *_: len(3),  # type: ignore[arg-type]
    "recursion": _deep,
    "assertion": _raises(AssertionError("never so")),
    "memory": _raises(MemoryError()),
    "own": _raises(type("OwnError", (Exception,), {})("of the package")),
    "nan": lambda *_: float("nan"),
    "huge": lambda *_: 3e38,
    "negative": lambda *_: -0.5,
    "text": lambda *_: "much",
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_whatever_an_environment_raises_or_pays_is_one_error_with_a_place(
    failure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment's exception went through to the role, and a reward could be
    anything.
    """
    environment = SortEnvironment()
    task = environment.task(bytes(32))
    monkeypatch.setattr(SortEnvironment, "reward", failure)
    monkeypatch.setattr(SortEnvironment, "task", failure)
    with pytest.raises(AnswerFailed, match=r"reward\(\) of the environment 'sort': .*" + PLACE):
        reward_of(environment, task, (1, 2))
    with pytest.raises(
        EnvironmentFailed, match=r"task\(\) of the environment 'sort': .*" + PLACE
    ):
        task_of(environment, bytes(32))


def fails_sometimes(
    original: Callable[..., Any], failure: Callable[..., Any]
) -> Callable[..., Any]:
    """``failure`` for one task in four."""

    def reward(self: SortEnvironment, task: Task, tokens: Sequence[int]) -> Any:
        return failure() if sum(task.prompt) % 4 == 0 else original(self, task, tokens)

    return reward


@pytest.mark.parametrize("name", ["division", "nan", "own"])
def test_a_reward_that_fails_costs_its_answer_and_no_submission(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward function that raises ended the validator, and its resubmission did
    it again. Later one such answer made the whole submission inconclusive.
    """
    monkeypatch.setattr(
        SortEnvironment, "reward", fails_sometimes(SortEnvironment.reward, FAILURES[name])
    )
    health = play(
        {"inference-1": "inference", "inference-2": "inference"}, 120.0, steps=3, submission=1
    )
    assert trainer(health)["step"] == 3
    assert validator(health)["inconclusive"].get(ENVIRONMENT_FAILED, 0) == 0
    assert validator(health)["rejected"] == 0
    said = [record.getMessage() for record in caplog.records]
    told = [words for words in said if "such an answer earns nothing" in words]
    assert told
    assert all("reward() of the environment 'sort'" in words for words in told)
    assert len(told) <= len(health), "each role of a node says it once"


def test_an_environment_that_does_not_repeat_itself_convicts_no_validator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing shows of it at the start. The validator was convicted of lying about rewards."""
    original, calls = SortEnvironment.reward, count()

    def reward(self: SortEnvironment, task: Task, tokens: Sequence[int]) -> float:
        is_tried = tuple(tokens) in (task.answer, task.prompt, ())
        if is_tried or sum(task.prompt) % 4:
            return original(self, task, tokens)
        return float(next(calls) % 2)

    monkeypatch.setattr(SortEnvironment, "reward", reward)
    workers = {"inference-1": "inference", "inference-2": "inference"}
    health = play(workers, 60.0, steps=2, submission=1)
    assert trainer(health)["step"] == 2
    assert trainer(health)["liars"] == {}
    assert trainer(health)["lies"] == 0
    assert "answers another reward when asked again" in caplog.text


def test_a_task_that_fails_ends_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is drawn by all roles; a worker stops until the next policy has other
    tasks.
    """
    original = SortEnvironment.task

    def task(self: SortEnvironment, seed: bytes, *, held_out: bool = False) -> Task:
        if seed[0] < 8:
            raise LookupError("no such puzzle")
        return original(self, seed, held_out=held_out)

    monkeypatch.setattr(SortEnvironment, "task", task)
    workers = {f"inference-{number}": "inference" for number in range(1, 5)}
    health = play(workers, 120.0, steps=3)
    assert trainer(health)["step"] == 3
    assert validator(health)["rejected"] == 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert len(errors) <= len(workers)


async def test_an_environment_that_fails_at_the_trainer_loses_a_submission_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trainer computes rewards too."""

    class FailingCheck(CheckWithoutModel):
        async def groups(self, *_: object) -> list[Any]:
            raise EnvironmentFailed(
                "reward() of the environment 'sort': ZeroDivisionError (sort.py:1)"
            )

    intake = make_intake(FailingCheck)
    right = validator_of(TRAINER_RUN, WORKER.peer_id, PolicyVersion(1))
    judge = next(one for one in JUDGES if one.peer_id == right)
    for index in range(3):
        payload = delivery(judge, index=index, content=bytes([index]))
        receipt, reason = await intake.take(judge.peer_id, payload)
        assert receipt is Receipt.UNWANTED
        assert "environment failed" in reason
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert not intake._taking
    assert not intake._filled


async def test_an_evaluation_that_fails_stops_no_learning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out tasks are paid by the same foreign code."""

    def reward(*_: object) -> float:
        raise EnvironmentFailed("no such word")

    class Learner:
        async def answer(self, tasks: list[GroupTask], sampling: Sampling) -> list[Any]:
            if sampling.temperature:
                raise EngineError("answer failed with MemoryError")
            return [(task.prompt,) for task in tasks]

    environment = SortEnvironment()
    curve = LearningCurve(cast(Any, None), Recipe(), LocalEnvironment(environment), 1)
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "answer failed" in caplog.text
    monkeypatch.setattr(SortEnvironment, "reward", reward)
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "no such word" in caplog.text
    assert curve.learnt.curve == []
    assert "evaluation_failed step=0" in caplog.text
