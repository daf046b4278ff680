"""Environments that do not return, eat memory or end their process: each fails on its own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import pytest
import trio

from p2p.errors import BadMessage, ConfigError
from p2p.machine import load_or_create_key, open_world
from roles.contract import Run
from roles.contract.core.file import EnvironmentPin, sign_run
from roles.engines.config import MachineLimits
from roles.envs.base import Ration, Task, TurnLimits, environment_digest
from roles.envs.client import MOST_DEATHS, WorkerEnvironment, open_environment_of, setup_of
from roles.envs.contained import MAX_READ, EnvironmentDied, EnvironmentFailed, Payment
from roles.envs.data import pin_data
from roles.envs.frames import payment_untrusted, tasks_untrusted, texts_untrusted
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.ration import interrupted
from roles.envs.text import TextModel
from roles.models.bundle import pin_folder
from roles.models.tokenizer import Tokenizer
from roles.workers.calls import decode_reply_untrusted
from tests.model_folders import END, LLAMA, SPECIAL, TEMPLATE, make_folder
from tests.support.packages import install_module
from tests.support.runs import OWNER, TERMS

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
BRIEF = 0.3  # seconds of patience with what waits
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
async def opened(
    ration: Ration = RATION, setup: EnvironmentSetup = SETUP
) -> AsyncIterator[WorkerEnvironment]:
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, setup, ration, stack, required=False)
        await environment.open()
        yield environment


async def earns(environment: WorkerEnvironment, first: int) -> list[float]:
    return await environment.rewards([(TASK, [TASK.answer, (first,)])])


@pytest.mark.usefixtures("game")
async def test_what_an_environment_does_costs_the_call_and_no_other() -> None:
    """It stopped validator, trainer and worker for good."""
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
    """One that dies at every answer is not to start a hundred processes."""
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
    setup = EnvironmentSetup(parts=(EnvironmentPart(name="talk"),), turns=turns)
    async with opened(setup=setup) as environment:
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
    """Answers whatever it is asked with a million empty lists, or one long list."""

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
    """A task of 16 million tokens kept the node from all else for 3 s."""
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
    """The engine's process ended, and from 2^32 on the node."""
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


async def test_a_reward_that_does_not_repeat_is_found_in_the_process(game: Path) -> None:
    await trio.Path(game).write_text(MOODY)
    async with opened() as environment:
        assert "pays 0.0, and then 1.0" in await environment.why_not_repeatable()
        answers = [(TASK, [(40,), (41,), (42,)])]
        with pytest.raises(EnvironmentFailed, match="3 of 3 answers another reward"):
            await environment.confirm(answers, [1.0, 0.0, 1.0])


# Environments of text


WORDY = """
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, and beside it a package with an environment."""
    install_module(tmp_path, "wordy_env", WORDY, "shoal.envs", wordy="wordy_env:Game")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return make_folder(tmp_path / "model")


def setup_in(folder: Path) -> EnvironmentSetup:
    model = TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=128, max_new_tokens=8
    )
    return EnvironmentSetup(parts=(EnvironmentPart(name="wordy"),), model=model)


async def test_what_a_reward_does_costs_its_answer_and_no_other(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    async with opened(setup=setup_in(folder)) as environment:
        (held,) = await environment.evaluation()
        for text in ("raise", "group", "much", "exit"):
            answers = [(*tokenizer.encode(word), END) for word in (text, "word")]
            assert await environment.rewards([(held, answers)]) == [0.0, 1.0], text
        for change, said in (
            ({"environment": "other"}, "a task is of the environment 'other'"),
            ({"source": b"\xc1"}, "comes back as none: not msgpack"),
            ({"source": bytes(300_000)}, "over the limit of 262,144"),
        ):
            with pytest.raises(EnvironmentFailed, match=said):
                await environment.rewards([(replace(held, **change), [()])])  # type: ignore[arg-type]


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
    async with opened(setup=setup_in(folder)) as environment:
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
    """The role was told that it cannot be opened, as if it had just begun."""
    tokenizer = Tokenizer.open(folder)
    async with opened(setup=setup_in(folder)) as environment:
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
        async with opened(setup=setup_in(folder)) as environment:
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
    async with opened(replace(RATION, cpu=30.0), setup_in(folder)) as environment:
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


# A token that is a Python expression


QUESTIONS = b"".join(
    json.dumps({"question": f"What is {number}?", "answer": str(number)}).encode() + b"\n"
    for number in range(100)
)
FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>")  # where environments look for an answer


def make_node(folder: Path) -> tuple[int, ...]:
    """A node's data, with its key and the base of the run; the tokens of the expression."""
    folder.mkdir()
    load_or_create_key(folder / "key")
    base = make_folder(folder / "base")
    key, stolen = str(folder / "key"), str(folder / "stolen")
    path = "__import__('pathlib').Path"
    steal = f"{path}({stolen!r}).write_bytes({path}({key!r}).read_bytes())"
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = len(vocabulary)
    for form in FORMS:
        vocabulary[form.format(steal)] = len(vocabulary)
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tuple(range(first, first + len(FORMS)))


def run_of(folder: Path, environment: EnvironmentPin) -> Run:
    base = pin_folder(folder / "base")
    model = replace(TERMS.model, base=base, context=4096, end_tokens=(END,), shape=LLAMA)
    sampling = replace(TERMS.sampling, max_new_tokens=8)
    terms = replace(TERMS, environments=(environment,), model=model, sampling=sampling)
    return sign_run(terms, OWNER)


def pin(name: str, **options: object) -> EnvironmentPin:
    return EnvironmentPin(name=name, digest=environment_digest(name), **options)  # type: ignore[arg-type]


def test_the_expression_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what follows would show nothing."""
    source = (
        "from roles.envs.text import Message, TextTask\n"
        "class Trusting:\n"
        "    name = 'trusting'\n"
        "    def task(self, seed, *, held_out=False):\n"
        "        return TextTask((Message('user', '1 + 1?'),), '', '2')\n"
        "    async def reward(self, task, text, ended):\n"
        "        return float(eval(text) == 2)\n"
        "    def evaluation(self):\n"
        "        return [self.task(b'')]\n"
    )
    install_module(
        tmp_path, "trusting_env", source, "shoal.envs", trusting="trusting_env:Trusting"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "node"
    tokens = make_node(folder)
    run = run_of(folder, pin("trusting"))
    mix = open_mix(setup_of(run, MachineLimits(), str(folder / "base")))
    payment = Payment()
    payment.pay(mix, mix.task(bytes(32)), (tokens[0], END))
    assert (folder / "stolen").read_bytes() == (folder / "key").read_bytes()


@pytest.mark.parametrize("name", ["arithmetic", "math", "math-exact", "reasoning-gym"])
async def test_no_environment_that_comes_with_shoal_runs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "reasoning-gym" and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "node"
    tokens = make_node(folder)
    options: dict[str, object] = {}
    if name.startswith("math"):
        (tmp_path / "questions.jsonl").write_bytes(QUESTIONS)
        options["data"] = pin_data(str(tmp_path / "questions.jsonl"))
    if name == "reasoning-gym":
        options["kinds"] = {"prime_factorization": 1.0, "number_sorting": 1.0, "jugs": 1.0}
    run = run_of(folder, pin(name, **options))
    machine = MachineLimits(environment_data=str(tmp_path))
    async with (
        open_world(folder) as world,
        open_environment_of(world, run, machine, "base") as environment,
    ):
        (task,) = await environment.tasks([bytes(32)])
        answers = [(token, END) for token in tokens]
        assert await environment.rewards([(task, answers)]) == [0.0] * len(FORMS)
    assert not (folder / "stolen").exists()
