"""Environments of text whose reward, task or template raises, hangs or eats memory: each fails
on its own, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import trio

from p2p.errors import BadMessage, ConfigError
from p2p.machine import open_world
from roles.envs.base import Ration
from roles.envs.client import WorkerEnvironment
from roles.envs.contained import MAX_READ, EnvironmentFailed
from roles.envs.frames import payment_untrusted, texts_untrusted
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel
from roles.models.tokenizer import Tokenizer
from roles.workers.calls import decode_reply_untrusted
from tests.model_folders import END, SPECIAL, TEMPLATE, make_folder
from tests.support.packages import install_module

CODE = """
import os
import stat
import trio
from roles.envs.text import Message, TextTask

class Game:
    name = "wordy"

    def task(self, seed, *, held_out=False):
        text = "\\n".join(sorted({"ask", "for", "a", "word"}, key=hash))
        return TextTask((Message("user", text),), "", "word")

    async def reward(self, task, text, ended):
        if text.startswith("say "):  # beside the reply, into every pipe that there is
            frame = bytes.fromhex(text[4:])
            for pipe in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                        os.write(pipe, len(frame).to_bytes(4, "big") + frame)
                except OSError:
                    pass
        match text:
            case "raise":
                raise LookupError("no such word")
            case "spin":
                while True:
                    pass
            case "wait":
                await trio.sleep_forever()
            case "eat":
                return len(bytearray(1 << 40))
            case "exit":
                os._exit(3)
            case "group":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.reward, task, "raise", ended)
            case "much":
                return 2.0
        return float(text == task.answer and ended)

    def evaluation(self):
        return [self.task(b"")]
"""
RATION = Ration(memory=2 << 30, cpu=0.3, patience=60.0)
BRIEF = 0.3
"""Seconds of patience with what waits."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, and beside it a package with an environment."""
    install_module(tmp_path, "wordy_env", CODE, "shoal.envs", wordy="wordy_env:Game")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return make_folder(tmp_path / "model")


def setup_in(folder: Path) -> EnvironmentSetup:
    model = TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=128, max_new_tokens=8
    )
    return EnvironmentSetup(parts=(EnvironmentPart(name="wordy"),), model=model)


@asynccontextmanager
async def opened(folder: Path, ration: Ration = RATION) -> AsyncIterator[WorkerEnvironment]:
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, setup_in(folder), ration, stack, required=False)
        await environment.open()
        yield environment


async def test_what_a_reward_does_costs_its_submission_and_no_other(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)

    async def earns(environment: WorkerEnvironment, text: str) -> list[float]:
        (task,) = await environment.tasks([bytes(32)])
        return await environment.rewards([(task, [(*tokenizer.encode(text), END), ()])])

    async with opened(folder) as environment:
        assert await earns(environment, "word") == [1.0, 0.0]
        for text in ("raise", "spin", "eat", "exit", "group", "much"):
            with trio.fail_after(60):
                assert await earns(environment, text) == [0.0, 0.0], text
            assert await earns(environment, "word") == [1.0, 0.0], text
        environment._ration = replace(RATION, patience=BRIEF)
        with pytest.raises(EnvironmentFailed, match=r"no answer in 0\.3 s"):
            await earns(environment, "wait")
        environment._ration = RATION
        (held,) = await environment.evaluation()
        assert held.environment == "wordy"
        with pytest.raises(EnvironmentFailed, match="a task is of the environment 'other'"):
            await environment.rewards([(replace(held, environment="other"), [()])])
        with pytest.raises(EnvironmentFailed, match="comes back as none: not msgpack"):
            await environment.rewards([(replace(held, source=b"\xc1"), [()])])
        with pytest.raises(EnvironmentFailed, match="over the limit of 262,144"):
            await environment.rewards([(replace(held, source=bytes(300_000)), [()])])


def frame(value: object) -> str:
    packed: bytes = msgpack.packb(value)
    return packed.hex()


def paid(rewards: list[object], failed: Sequence[int] = ()) -> str:
    return frame([True, [rewards, list(failed), "", ""]])


REPLIES = {
    "no msgpack": ("616263", "not msgpack"),
    "nested": ("92c3" + "91" * 2000 + "c0", "not msgpack"),
    "no reply": (frame(5), "a reply has 2 fields"),
    "no failure": (frame([False, [1]]), "a failure has 2 fields"),
    "nothing": (frame([True, None]), "a payment has 4 fields"),
    "too many": (paid([0.5, 0.5]), "a reply lists 1 to 1 answers"),
    "a word": (paid(["a"]), "a reward is a number from 0 to 1, not 'a'"),
    "no number": (paid([float("nan")]), "a reward is a number from 0 to 1, not nan"),
    "more raised": (paid([0.0], [1]), "not all answers that were raised on are among 1"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_of_foreign_code_are_read_as_a_strangers(name: str) -> None:
    """Each ended the role, or was signed as a reward."""
    reply, said = REPLIES[name]
    with pytest.raises(BadMessage, match=said):
        payment_untrusted(decode_reply_untrusted(bytes.fromhex(reply)), 1)


@pytest.mark.parametrize(
    "reply", [None, [], [["a"]], [["a", 1]], [[b"a", "b"]], "ab", [["a", "b"], ["c", "d"]]]
)
def test_texts_for_people_are_as_many_as_answers_and_bounded(reply: object) -> None:
    with pytest.raises(BadMessage):
        texts_untrusted(reply, 1)
    assert texts_untrusted([["q" * 9000, "a"]], 1) == [("q" * MAX_READ, "a")]


async def test_what_foreign_code_writes_into_the_pipe_is_no_reply(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    failure = frame([False, ["MissingDependency", "m" * 9000]])
    async with opened(folder) as environment:
        (task,) = await environment.tasks([bytes(32)])
        for reply, said in (
            (paid([7.0]), "nonsense: a reward is"),
            (failure, "opened again: m{600}$"),
        ):
            answer = [(task, [(*tokenizer.encode(f"say {reply}"), END)])]
            with pytest.raises(EnvironmentFailed, match=said) as failed:
                await environment.rewards(answer)
            assert len(str(failed.value)) < 1000


async def test_a_file_that_has_rotted_since_ends_no_role(folder: Path) -> None:
    """The process of an environment is started again after each failure, and the role had been
    told that it cannot be opened: as if it had just begun."""
    tokenizer = Tokenizer.open(folder)
    async with opened(folder) as environment:
        (task,) = await environment.tasks([bytes(32)])
        sound = (folder / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(EnvironmentFailed, match="it cannot be opened again: the run's"):
            await environment.rewards([(task, [(*tokenizer.encode("exit"), END)])])
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="it cannot be opened again: the run's"):
                await environment.tasks([bytes(32)])
        (folder / "tokenizer.json").write_bytes(sound)
        assert await environment.tasks([bytes(32)]) == [task]


async def test_two_processes_see_sets_in_one_order(folder: Path) -> None:
    """The environment above orders words by their hash."""
    prompts = []
    for _ in range(2):
        async with opened(folder) as environment:
            prompts.append(await environment.tasks([bytes(32)]))
    assert prompts[0] == prompts[1]


def with_template(folder: Path, template: str) -> None:
    config = {"eos_token": SPECIAL[1], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no roles here') }}", "no roles here"),
        ("{{ messages.append }}", r"task\(\) of the environment 'wordy'"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            r"task\(\) of the environment 'wordy'",
        ),
    ],
)
async def test_a_hostile_template_fails_its_tasks(
    folder: Path, template: str, said: str
) -> None:
    with_template(folder, template)
    # On a slow machine `MAX_TURNS` take more than a second.
    async with opened(folder, replace(RATION, cpu=30.0)) as environment:
        with pytest.raises(EnvironmentFailed, match=said):
            await environment.tasks([bytes(32)])
        with_template(folder, TEMPLATE)


async def test_a_model_that_cannot_be_read_ends_the_node_with_a_sentence(folder: Path) -> None:
    async def refused(said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            await WorkerEnvironment(
                world, setup_in(folder), RATION, stack, required=False
            ).open()

    async with open_world() as world, AsyncExitStack() as stack:
        with_template(folder, "{% for %}")
        await refused(r"the run's model cannot be used: the chat template cannot be read")
        (folder / "tokenizer.json").write_text("{}")
        await refused(r"the run's model cannot be used: .*tokenizer\.json")
