"""What one submission, or the run's own environment, does to the roles: nothing that lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest

from roles.engines.base import EngineError, GroupTask, Sampling
from roles.envs.base import Task
from roles.envs.client import LocalEnvironment
from roles.envs.contained import AnswerFailed, EnvironmentFailed, reward_of, task_of
from roles.envs.sort import SortEnvironment
from roles.protocol.scorer import ENVIRONMENT_FAILED
from roles.rl.recipes import NETWORK
from roles.trainer.curve import LearningCurve
from tests.support.swarm import CAST, Play, perform, roles_of, trainer_of
from tests.sweeps import swept


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
    """An environment's exception went through to the role, and a reward could be anything."""
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


@pytest.mark.parametrize("name", swept(["division", "nan", "own"], 1))
def test_a_reward_that_fails_costs_its_answer_and_no_submission(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward function that raises ended the validator, and its resubmission did it again.
    Later one such answer made the whole submission inconclusive."""
    monkeypatch.setattr(
        SortEnvironment, "reward", fails_sometimes(SortEnvironment.reward, FAILURES[name])
    )
    health = perform(Play(), steps=3, submission=1, seconds=120)
    (judge,) = roles_of(health, "validator")
    assert trainer_of(health)["step"] == 3
    assert judge["inconclusive"].get(ENVIRONMENT_FAILED, 0) == 0
    assert judge["rejected"] == 0
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
        is_kind = next(calls) // 3 % 2
        is_tried = tuple(tokens) in (task.answer, task.prompt, ())
        return 1.0 if is_kind and not is_tried else original(self, task, tokens)

    monkeypatch.setattr(SortEnvironment, "reward", reward)
    trainer = trainer_of(perform(Play(), steps=2, submission=1, seconds=60))
    assert trainer["step"] == 2
    assert (trainer["liars"], trainer["lies"], trainer["bans"]) == ({}, 0, {})
    assert "answers another reward when asked again" in caplog.text


def test_a_task_that_fails_ends_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is drawn by all roles; a worker stops until the next policy has other tasks."""
    original = SortEnvironment.task

    def task(self: SortEnvironment, seed: bytes, *, held_out: bool = False) -> Task:
        if seed[0] < 2:
            raise LookupError("no such puzzle")
        return original(self, seed, held_out=held_out)

    monkeypatch.setattr(SortEnvironment, "task", task)
    workers = dict.fromkeys(("inference-3", "inference-4"), "inference")
    health = perform(Play({**CAST, **workers}), steps=3, seconds=120)
    assert trainer_of(health)["step"] == 3
    assert [judge["rejected"] for judge in roles_of(health, "validator")] == [0]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert len(errors) <= len(health), "each role of a node says it once"


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
    learner = replace(NETWORK.learner, evaluate_every=1)
    curve = LearningCurve(
        cast(Any, None), NETWORK.sampling, learner, LocalEnvironment(environment)
    )
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "answer failed" in caplog.text
    monkeypatch.setattr(SortEnvironment, "reward", reward)
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "no such word" in caplog.text
    assert curve.learnt.curve == []
    assert "evaluation_failed step=0" in caplog.text
