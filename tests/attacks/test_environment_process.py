"""Environments that do not return, eat memory or end their process: each fails on its own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from p2p.errors import BadMessage, ConfigError
from p2p.machine import open_world
from roles.envs.base import Ration, Task, TurnLimits
from roles.envs.client import MOST_DEATHS, WorkerEnvironment
from roles.envs.contained import EnvironmentDied, EnvironmentFailed
from roles.envs.frames import tasks_untrusted
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.ration import interrupted
from tests.support.packages import install_module

CODE = """
import ctypes, os, sys, time
from roles.envs.sort import SortEnvironment

class Game(SortEnvironment):
    def reward(self, task, tokens):
        match tokens[0]:
            case 1:
                while True:  # and whatever interrupts it is caught
                    try:
                        pass
                    except BaseException:
                        pass
            case 2:
                time.sleep(3600)
            case 3:
                return len(bytearray(1 << 40))
            case 4:
                os._exit(3)
            case 5:
                ctypes.string_at(0)
            case 6:
                sys.exit("enough")
            case 7:
                print("garbage", flush=True)
            case 8:
                raise LookupError("no such word")
            case 9:  # one call into C that never lets another thread go on
                return len(str(7 ** 10**8))
            case 10:
                time.sleep(0.1)
        return super().reward(task, tokens)

class Talk(Game):
    def respond(self, task, tokens, room):
        if tokens[-2] == 4:
            os._exit(3)
        until = time.process_time() + 0.15
        while time.process_time() < until:
            pass
        return [5]
"""
RATION = Ration(memory=2 << 30, cpu=0.3, patience=60.0)
BRIEF = 0.3
"""Seconds of patience with what waits."""
TASK = Task((1,), (40,), environment="dire")
SETUP = EnvironmentSetup(parts=(EnvironmentPart(name="dire"),))


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with an environment, as its owner would install it."""
    points = {"dire": "dire_env:Game", "talk": "dire_env:Talk"}
    install_module(tmp_path, "dire_env", CODE, "shoal.envs", **points)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path / "dire_env.py"


@asynccontextmanager
async def opened(ration: Ration = RATION) -> AsyncIterator[WorkerEnvironment]:
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, SETUP, ration, stack, required=False)
        await environment.open()
        yield environment


async def earns(environment: WorkerEnvironment, first: int) -> list[float]:
    return await environment.rewards([(TASK, [TASK.answer, (first,)])])


@pytest.mark.usefixtures("game")
async def test_what_an_environment_does_costs_the_call_and_no_other() -> None:
    """A reward that hangs stopped validator, trainer and worker for good; one that exits ended
    them. Later the answer made the whole submission inconclusive."""
    async with opened() as environment:
        for number in (1, 3, 4, 5, 6, 8, 9):
            with trio.fail_after(60):
                answers = [TASK.answer, (number,), TASK.answer]
                assert await environment.rewards([(TASK, answers)]) == [1.0, 0.0, 1.0], number
            assert await environment.tasks([bytes(32)]) == await environment.tasks([bytes(32)])
        assert await environment.texts([(TASK, [(1, 2), (99,)])]) == [("0", "01"), ("0", "")]
        environment._ration = replace(RATION, patience=BRIEF)
        with pytest.raises(EnvironmentFailed, match=r"no answer in 0\.3 s"):
            await earns(environment, 2)
        environment._ration = replace(RATION, patience=3.0)
        assert await environment.rewards([(TASK, [(10,)] * 40)]) == [0.0] * 40, "in parts"
        environment._ration = RATION
        assert await earns(environment, 7) == [1.0, 0.0], "what it prints is no answer"


@pytest.mark.usefixtures("game")
async def test_what_ends_a_process_costs_its_answer_and_four_of_a_submission_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An environment that ends its process at every answer is broken, and is not to start a
    hundred processes for a submission."""
    async with opened() as environment:
        good = [TASK.answer]
        mixed = [(TASK, [(4,), *good]), (TASK, [*good, (4,)])]
        assert await environment.rewards(mixed) == [0.0, 1.0, 1.0, 0.0]
        assert caplog.text.count("such an answer earns nothing") == 1
        with pytest.raises(EnvironmentDied, match="its process ended"):
            await environment.rewards([(TASK, [(4,)] * (MOST_DEATHS + 1))])
        assert await environment.rewards([(TASK, good)]) == [1.0]


@pytest.mark.usefixtures("game")
async def test_each_turn_has_the_time_of_an_answer() -> None:
    """A completion with four programs that use up their fuel was one that nobody could hear."""
    task = replace(TASK, environment="talk")
    turns = TurnLimits(most=6, heard=8, max_new_tokens=12, end_tokens=(9,))
    async with open_world() as world, AsyncExitStack() as stack:
        setup = EnvironmentSetup(parts=(EnvironmentPart(name="talk"),), turns=turns)
        environment = WorkerEnvironment(world, setup, RATION, stack, required=False)
        await environment.open()
        assert await environment.hear([(task, [(1, 9) * 5])]) == [((5,),) * 5]
        deadly = [(4, 9), (1, 9), (1, 9, 4, 9), (1, 9, 4, 9, 1, 9)]
        assert await environment.hear([(task, deadly)]) == [
            (None,), ((5,),), ((5,), None), (None,)
        ]  # fmt: skip
        environment._ration = replace(RATION, patience=BRIEF)
        with pytest.raises(EnvironmentFailed, match=r"no answer in 1\.5 s"):
            await environment.hear([(task, [(1, 9) * 5] * 20)])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import time\ntime.sleep(3600)\n",
            "open of the environment 'dire': no answer in 0.3 s",
        ),
        ("1 / 0\n", "open of the environment 'dire': its process ended"),
        ("import nowhere\n", "cannot be loaded from dire_env:Game: No module named 'nowhere'"),
    ],
)
async def test_an_environment_that_cannot_be_opened_ends_the_node_with_its_name(
    game: Path, code: str, said: str
) -> None:
    await trio.Path(game).write_text(code + CODE)
    ration = replace(RATION, opening=BRIEF if "sleep" in code else 60.0)
    async with open_world() as world, AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=said):
            await WorkerEnvironment(world, SETUP, ration, stack, required=False).open()


@pytest.mark.usefixtures("game")
async def test_a_call_that_is_cancelled_leaves_no_process() -> None:
    async with opened(Ration(cpu=60.0, patience=60.0)) as environment:
        worker = environment._remote.process
        with trio.move_on_after(0.1):
            await earns(environment, 2)
        assert environment._remote.process is None
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)  # type: ignore[union-attr]
        assert await environment.rewards([(TASK, [TASK.answer])]) == [1.0]


def resist(interruptions: int) -> None:
    """Hang, and catch what would end it, so many times."""
    while True:
        try:
            while True:
                pass
        except TimeoutError:
            interruptions -= 1
            if not interruptions:
                raise


def test_what_runs_in_the_learners_process_is_interrupted_however_it_resists() -> None:
    """The learner evaluates in its own process, which has too much to lose to be ended."""
    with (
        interrupted(Ration(cpu=0.05, patience=0.05)),
        pytest.raises(TimeoutError, match="has not returned"),
    ):
        resist(3)


class Liar:
    """A process that answers whatever it is asked with a million empty lists, or one list of as
    many numbers."""

    pid = 0

    def __init__(self, item: bytes = b"\x90", before: bytes = b"") -> None:
        self._reply = b"\x92\xc3" + before + b"\xdd" + (1 << 20).to_bytes(4, "big")
        self._reply += item * (1 << 20)

    async def call(self, request: bytes) -> bytes:
        return self._reply


async def test_a_reply_is_read_no_further_than_what_was_asked_for(tmp_path: Path) -> None:
    """16 MiB of empty lists kept the node from all else for 8 s, and took 1.2 GB."""
    async with open_world(tmp_path) as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, SETUP, RATION, stack)
        environment._remote._worker = Liar()
        with pytest.raises(EnvironmentFailed, match="answers nonsense: not msgpack"):
            await environment.rewards([(TASK, [(40,)])])


async def test_a_task_is_no_longer_than_the_context(tmp_path: Path) -> None:
    """One of 16 million tokens kept the node from all else for 3 s, each time it was asked for;
    one a little too long ended the engine's call, and with it the role."""
    async with open_world(tmp_path) as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, SETUP, RATION, stack, context=64)
        environment._remote._worker = Liar(b"\x01", before=b"\x91\x95")
        with pytest.raises(EnvironmentFailed, match="answers nonsense: not msgpack"):
            await environment.tasks([bytes(32)])
    rest = [b"", "dire", ""]
    assert len(tasks_untrusted([[[7] * 60, [8] * 4, *rest]], 1, 1, context=64)) == 1
    with pytest.raises(BadMessage, match="context of 64"):
        tasks_untrusted([[[7] * 60, [8] * 5, *rest]], 1, 1, context=64)


@pytest.mark.usefixtures("game")
async def test_tokens_that_a_model_does_not_have_reach_no_engine() -> None:
    """An engine looked them up: its process ended with IndexError, for a prompt of none with
    ZeroDivisionError, and from 2^32 on the node with OverflowError."""
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(
            world, SETUP, RATION, stack, vocabulary=5, required=False
        )
        await environment.open()
        for call in (partial(environment.tasks, [bytes(32)]), environment.evaluation):
            with pytest.raises(EnvironmentFailed, match="token ids below 5"):
                await call()


@pytest.mark.parametrize(
    ("prompt", "answer"), [([], []), ([9], []), ([7], [9]), ([1 << 32], []), ([-1], [])]
)
def test_a_task_is_of_tokens_that_there_are(prompt: list[int], answer: list[int]) -> None:
    rest = [b"", "dire", ""]
    assert tasks_untrusted([[[7], [8], *rest]], 1, 1, vocabulary=9)[0].prompt == (7,)
    with pytest.raises(BadMessage, match="a task's prompt"):
        tasks_untrusted([[prompt, answer, *rest]], 1, 1, vocabulary=9)


MOODY = """
from itertools import count
from roles.envs.sort import SortEnvironment

class Game(SortEnvironment):
    calls = count()

    def reward(self, task, tokens):
        return next(self.calls) % 2
"""


@pytest.fixture
def moody(game: Path) -> None:
    game.write_text(MOODY)


@pytest.mark.usefixtures("moody")
async def test_a_reward_that_does_not_repeat_is_found_in_the_process() -> None:
    async with opened() as environment:
        assert "pays 0.0, and then 1.0" in await environment.why_not_repeatable()
        answers = [(TASK, [(40,), (41,), (42,)])]
        with pytest.raises(EnvironmentFailed, match="3 of 3 answers another reward"):
            await environment.confirm(answers, [1.0, 0.0, 1.0])
