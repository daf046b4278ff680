"""Environments of text: packed tasks, a real tokenizer, several as one, and conversations."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import trio

from p2p.errors import BadMessage, ConfigError
from p2p.wire import pack
from roles.contract.core.pin import FilePin
from roles.engines.evaluation import grade
from roles.envs.base import (
    Task,
    TeachingEnvironment,
    TurnLimits,
    open_teaching,
)
from roles.envs.calculator import CalculatorEnvironment, calculate
from roles.envs.client import LocalEnvironment
from roles.envs.contained import (
    MAX_READ,
    SUSPECT,
    EnvironmentFailed,
    Payment,
    Tally,
    evaluation_of,
    reward_of,
    task_of,
    texts_of,
)
from roles.envs.data import read_data
from roles.envs.guess import GuessEnvironment
from roles.envs.mix import (
    DOMAIN,
    EnvironmentPart,
    EnvironmentSetup,
    MixedEnvironment,
    kind_of,
    open_mix,
)
from roles.envs.sort import SortEnvironment, decode, encode
from roles.envs.text import (
    MAX_MESSAGES,
    MAX_SOURCE,
    LengthTargets,
    Message,
    TextModel,
    TextTask,
    TokenizedEnvironment,
    TokenizedTurns,
    is_held_out,
    is_text,
    pack_text_task,
    unpack_text_task_untrusted,
)
from roles.models.errors import BadModel
from roles.models.tokenizer import Tokenizer
from tests.model_folders import END, SPECIAL, TEMPLATE, make_folder


class EchoEnvironment:
    name = "echo"
    heard: tuple[str, bool] | None = None

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return TextTask((Message("user", "say hello"),), "so", "hello", str(held_out))

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        await trio.lowlevel.checkpoint()
        self.heard = text, ended
        return 1.0 if text == task.answer else 0.0

    def evaluation(self) -> list[TextTask]:
        return [replace(self.task(b"", held_out=True), kind=kind) for kind in "ab"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


def model_in(folder: Path, **changes: int) -> TextModel:
    model = TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=128, max_new_tokens=8
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def test_a_task_comes_back_as_it_was_packed_and_has_limits() -> None:
    turn = Message("user", "x")
    largest = TextTask((turn,) * MAX_MESSAGES, "so", "é🐟\0" * 99, "info", "kind", 2**32)
    assert unpack_text_task_untrusted(pack_text_task(largest)) == largest
    with pytest.raises(ValueError, match="65 messages, over the limit of 64"):
        pack_text_task(TextTask((turn,) * (MAX_MESSAGES + 1), "", ""))
    with pytest.raises(ValueError, match="bytes, over the limit of 262,144"):
        pack_text_task(TextTask((turn,), "", "x" * MAX_SOURCE))
    with pytest.raises(BadMessage, match="over the limit of 262,144"):
        unpack_text_task_untrusted(bytes(MAX_SOURCE + 1))
    with pytest.raises(BadMessage, match="over the limit of 64"):
        unpack_text_task_untrusted(pack([[["a", "b"]] * 65, "", "", "", "", 0]))


def test_text_becomes_tokens_and_tokens_text(folder: Path) -> None:
    plain, tokenizer = EchoEnvironment(), Tokenizer.open(folder)
    environment = TokenizedEnvironment(plain, tokenizer, model_in(folder))
    task = task_of(environment, bytes(32))
    assert task.prompt == tokenizer.chat([Message("user", "say hello")], "so")
    assert task.answer == ()
    assert unpack_text_task_untrusted(task.source) == plain.task(bytes(32))
    hello = tokenizer.encode("hello")
    assert reward_of(environment, task, (*hello, END)) == 1.0
    assert plain.heard == ("hello", True)
    assert reward_of(environment, task, hello) == 1.0
    assert plain.heard == ("hello", False)
    assert reward_of(environment, task, (END,)) == 0.0
    assert plain.heard == ("", True)
    mix = MixedEnvironment({"echo": (1.0, environment)})
    question, answer = texts_of(mix, mix.task(bytes(32)), hello * 200)
    assert "say hello" in question
    assert answer == ("hello" * 200)[-MAX_READ:]


def test_a_length_target_stands_in_the_prompt_and_its_distance_costs(folder: Path) -> None:
    tokenizer, lengths = Tokenizer.open(folder), LengthTargets((2, 6), 0.125)
    model = model_in(folder, context=256)
    environment = TokenizedEnvironment(EchoEnvironment(), tokenizer, model, lengths)
    hello = tokenizer.encode("hello")
    tasks = [task_of(environment, bytes([seed]) * 32) for seed in range(8)]
    assert tasks == [task_of(environment, bytes([seed]) * 32) for seed in range(8)]
    asked = [unpack_text_task_untrusted(task.source).length for task in tasks]
    assert set(asked) == {2, 6}
    for task, length in zip(tasks, asked, strict=True):
        said = f"say hello\n\nThink for {length} tokens before giving a response."
        assert task.prompt == tokenizer.chat([Message("user", said)], "so")
        paid = reward_of(environment, task, hello)
        assert paid == max(0.0, 1.0 - 0.125 * abs(length - len(hello)))
        assert reward_of(environment, task, (END,)) == 0.0
    held = [unpack_text_task_untrusted(one.source).length for one in evaluation_of(environment)]
    assert held == [2, 6]
    assert (lengths.paid(1.5, 4, 2), lengths.paid(-1.0, 4, 4)) == (1.5, -1.0)
    assert math.isnan(lengths.paid(math.nan, 4, 4)), "a wrong reward is not hidden"


def test_a_prompt_that_does_not_fit_the_model_is_named(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    length = len(tokenizer.chat([Message("user", "say hello")], "so"))

    def ask(**changes: int) -> None:
        model = model_in(folder, **changes)
        task_of(TokenizedEnvironment(EchoEnvironment(), tokenizer, model), bytes(32))

    ask(context=length + 8)
    said = (
        f"the prompt of a task is {length} tokens long; with 8 new ones that is over the"
        f" model's context of {length + 7}"
    )
    with pytest.raises(EnvironmentFailed, match=said):
        ask(context=length + 7)
    with pytest.raises(EnvironmentFailed, match="the model knows 0 to 19"):
        ask(vocabulary=20)


class LengthyEnvironment(EchoEnvironment):
    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        text = "x" * 200 if seed[0] % 2 else "y"
        return TextTask((Message("user", text),), "", seed.hex())

    def evaluation(self) -> list[TextTask]:
        return [self.task(bytes([number])) for number in range(10)]


def test_a_long_question_gives_way_to_the_next_in_the_seeds_order(folder: Path) -> None:
    environment = TokenizedEnvironment(
        LengthyEnvironment(), Tokenizer.open(folder), model_in(folder)
    )
    for number in range(32):
        seed = bytes([number]) * 32
        found = task_of(environment, seed)
        while seed[0] % 2:
            seed = hashlib.sha256(seed).digest()
        assert unpack_text_task_untrusted(found.source).answer == seed.hex()
    assert len(evaluation_of(environment)) == 5
    small = TokenizedEnvironment(
        LengthyEnvironment(), Tokenizer.open(folder), model_in(folder, context=20)
    )
    with pytest.raises(EnvironmentFailed, match=r"evaluation\(\) .* PromptTooLong"):
        evaluation_of(small)


def test_an_environment_says_what_it_is_of() -> None:
    assert is_text(EchoEnvironment())
    assert not is_text(SortEnvironment())
    assert isinstance(SortEnvironment(), TeachingEnvironment)
    with pytest.raises(ConfigError, match="'arithmetic' teaches no model"):
        open_teaching("arithmetic")
    with pytest.raises(ConfigError, match="a model that has a base"):
        open_teaching(None)


def setup_of(*names: str, model: TextModel | None = None) -> EnvironmentSetup:
    return EnvironmentSetup(
        parts=tuple(EnvironmentPart(name=name) for name in names), model=model
    )


def test_environment_and_model_must_speak_the_same(folder: Path, tmp_path: Path) -> None:
    model, kinds = model_in(folder), EnvironmentPart(name="sort", kinds={"long": 1.0})
    strange = replace(model, end_tokens=(300,))
    for setup, said in (
        (setup_of("arithmetic"), "'arithmetic' is of text, the run's model has no base"),
        (
            setup_of("arithmetic", "sort", model=model),
            "'sort' is of tokens, the run's model reads text",
        ),
        (setup_of("arithmetic", model=strange), "no token 300, which is named as an end"),
        (setup_of("arithmetic", model=model_in(tmp_path)), "the run's model cannot be used"),
        (EnvironmentSetup(parts=(kinds,)), "'sort' cannot be made with kinds"),
        (setup_of("guess"), r"set turns and heard in \[sampling\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_mix(setup)


class NamedEnvironment(SortEnvironment):
    def __init__(self, name: str) -> None:
        self.name = name

    def reward(self, task: Task, tokens: object) -> float:
        return float(len(self.name)) / 10


def mix_of(weights: dict[str, float]) -> MixedEnvironment:
    return MixedEnvironment(
        {name: (weight, NamedEnvironment(name)) for name, weight in weights.items()}
    )


def test_the_seed_chooses_the_environment_by_weight() -> None:
    weights = {"a": 1.0, "bb": 6.0, "ccc": 3.0}
    mixed, rng = mix_of(weights), Random(0)
    seeds = [rng.randbytes(32) for _ in range(4000)]
    chosen = [mixed.task(seed).environment for seed in seeds]
    counts = Counter(chosen)
    assert {name: counts[name] / 4000 for name in weights} == {
        name: pytest.approx(weight / 10, abs=0.03) for name, weight in weights.items()
    }
    task = mixed.task(seeds[0])
    assert task == replace(SortEnvironment().task(seeds[0]), environment=chosen[0])
    assert mixed.reward(task, ()) == len(chosen[0]) / 10
    assert reward_of(mixed, replace(task, environment="ccc"), ()) == 0.3
    with pytest.raises(EnvironmentFailed, match="a task is of the environment 'other'"):
        reward_of(mixed, replace(task, environment="other"), ())
    even = mix_of({"a": 1.0, "b": 1.0})
    for seed in seeds[:64]:  # by the bytes that the docs name
        first = hashlib.sha256(DOMAIN + seed).digest()[0]
        assert even.task(seed).environment == ("a" if first < 128 else "b")


def test_an_evaluation_tells_environments_and_kinds_apart(folder: Path) -> None:
    echo = TokenizedEnvironment(EchoEnvironment(), Tokenizer.open(folder), model_in(folder))
    mixed = MixedEnvironment({"echo": (1.0, echo), "sort": (1.0, SortEnvironment())})
    evaluation = evaluation_of(mixed)
    kinds = [kind_of(task) for task in evaluation]
    assert Counter(kinds) == {"echo/a": 1, "echo/b": 1, "sort": 512}
    rewards = [1.0, 0.0, *[0.5] * 512]
    report = grade(kinds, rewards, [0.0] * 514)
    assert report.kinds == {"echo/a": (1.0, 0.0), "echo/b": (0.0, 0.0), "sort": (0.5, 0.0)}
    assert (report.greedy, report.sampled) == (257 / 514, 0.0)


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [(lambda *_: [], "1 to 8,192 tasks, not 0"), (lambda *_: [Task(())] * 9000, "not 9,000")],
)
def test_an_evaluation_has_a_size(
    evaluation: Callable[..., list[Task]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SortEnvironment, "evaluation", evaluation)
    with pytest.raises(EnvironmentFailed, match=said):
        evaluation_of(SortEnvironment())


def test_data_is_compared_with_its_pin(tmp_path: Path) -> None:
    data = b'{"question": "a", "answer": "b"}\n'
    pin = FilePin(name="q.jsonl", size=len(data), digest=hashlib.sha256(data).digest())
    with pytest.raises(ConfigError, match="environment_data in"):
        read_data(pin, "")
    with pytest.raises(ConfigError, match=r"q\.jsonl cannot be read: No such file"):
        read_data(pin, str(tmp_path))
    (tmp_path / "q.jsonl").write_bytes(data)
    assert read_data(pin, str(tmp_path)) == data
    for other in (data + b"\n", data[:-1], data.replace(b"a", b"c")):
        (tmp_path / "q.jsonl").write_bytes(other)
        with pytest.raises(ConfigError, match="is not the file that the run pins"):
            read_data(pin, str(tmp_path))
    with pytest.raises(ConfigError, match="over 268,435,456"):
        read_data(replace(pin, size=1 << 30), str(tmp_path))


def test_an_eighth_is_held_out() -> None:
    held = sum(is_held_out(f"question {number}") for number in range(8000))
    assert held / 8000 == pytest.approx(1 / 8, abs=0.01)
    # Nodes compute it from text: a change here is another game.
    held_out = [n for n in range(10, 40) if is_held_out(f"What is {n} + 82?")]
    assert held_out == [14, 16, 21, 22]


class SullenEnvironment(EchoEnvironment):
    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        if text == "never":
            raise EnvironmentFailed("a file of mine has gone")
        if text != "hello":
            raise LookupError(text)
        return 1.0


def test_the_operator_hears_of_answers_that_are_raised_on_once_and_of_all_there_are(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken environment would look like a model that knows nothing."""
    tokenizer = Tokenizer.open(folder)
    environment = TokenizedEnvironment(SullenEnvironment(), tokenizer, model_in(folder))
    task, tally = task_of(environment, bytes(32)), Tally()

    def submit(*texts: str) -> list[float]:
        payment = Payment()
        for text in texts:
            payment.pay(environment, task, (*tokenizer.encode(text), END))
        tally.count(payment)
        return payment.rewards

    assert submit("hello", "no", "hello") == [1.0, 0.0, 1.0]
    for number in range(SUSPECT - 1):
        assert submit(str(number)) == [0.0]
    assert caplog.text.count("such an answer earns nothing") == 1
    assert "its author must mend it" not in caplog.text
    assert submit("hello") == [1.0]
    for number in range(2 * SUSPECT):
        submit(str(number))
    assert caplog.text.count("its author must mend it") == 1
    with pytest.raises(EnvironmentFailed, match="a file of mine has gone"):
        submit("never")


# Conversations


TURNS = TurnLimits(most=4, heard=64, max_new_tokens=60, end_tokens=(END,))


class Parrot:
    name = "parrot"

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return TextTask((Message("user", f"talk {seed[:1].hex()}"),), "", "stop")

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        return None if said[-1] == task.answer else said[-1]

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        return 1.0 if ended and said[-1] == task.answer else 0.0

    def evaluation(self) -> list[TextTask]:
        return [self.task(b"e", held_out=True)]


def talking(folder: Path, limits: TurnLimits = TURNS) -> MixedEnvironment:
    part = TokenizedTurns(
        Parrot(), Tokenizer.open(folder), model_in(folder, context=512, max_new_tokens=124)
    )
    return MixedEnvironment({"parrot": (1.0, part)}, limits)


def test_a_row_is_what_the_template_makes_of_the_conversation(folder: Path) -> None:
    """Also of words that spell end tokens: they get a blank inside."""
    tokenizer, environment, rng = Tokenizer.open(folder), talking(folder), Random(4)
    task = environment.task(b"s" * 32)
    signs = ["a", "Z", " ", "\n", "é", "🐟", "'", '"', "<", "|", *SPECIAL]
    for _ in range(200):
        words = "".join(rng.choices(signs, k=rng.randint(1, 9))).strip() or "x"
        drawn = (*(one for one in tokenizer.encode(words) if one != END), END)
        said = tokenizer.decode(drawn[:-1])
        if said.strip() in {"", "stop"}:
            continue
        (heard,) = environment.hear(task, drawn)
        plain = tokenizer.tail((END,)).tokens("x", 64)
        assert plain is not None
        assert heard.count(END) == plain.count(END)
        clean = said.strip()
        for special in sorted(SPECIAL, key=len, reverse=True):
            clean = clean.replace(special, f"{special[:1]} {special[1:]}")
        talk = [("user", "talk 73"), ("assistant", "@"), ("user", clean)]
        whole = tokenizer.render([SimpleNamespace(role=r, content=c) for r, c in talk])
        _, _, behind = whole.rpartition("@")
        if len(clean.encode()) < 30:
            assert tokenizer.encode(behind)[1:] == heard


def test_observations_are_cut_to_what_is_left(folder: Path) -> None:
    for room in (40, 60, 90):
        environment = talking(folder, replace(TURNS, heard=room, max_new_tokens=500))
        task = environment.task(b"s" * 32)
        drawn = (*Tokenizer.open(folder).encode("long " * 40), END)
        assert 0 < sum(map(len, environment.hear(task, drawn))) <= room
        assert 0 < sum(map(len, environment.hear(task, drawn + drawn))) <= room


def test_it_is_asked_until_it_ends_the_completion(folder: Path) -> None:
    environment, encode_text = talking(folder), Tokenizer.open(folder).encode
    task = environment.task(b"s" * 32)
    more, stop = (*encode_text("hi"), END), (*encode_text("stop"), END)
    answers = [more, more + stop, stop, more * 4, encode_text("hi")]
    one, two, none, four, cut = (environment.hear(task, answer) for answer in answers)
    assert (len(one), len(two), none, len(four), cut) == (1, 2, ((),), 3, ())
    assert two[1] == ()
    assert all(four)
    assert [environment.reward(task, answer) for answer in answers] == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("template", "end", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", END,
         "ends the assistant's turn"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>"
         "{{ loop.index if loop.last }}{% endfor %}", END, "depends on what was said before"),
        ("{{ messages[0].content }}<|im_end|>", END, "does not show an answer"),
        (TEMPLATE, END + 1, "name it there"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_carry_turns_is_refused(
    tmp_path: Path, template: str, end: int, said: str
) -> None:
    folder = make_folder(tmp_path / "llama")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(BadModel, match=said):
        Tokenizer.open(folder).tail((end,))


async def test_guess_is_found_by_halving() -> None:
    limits = TurnLimits(most=4, heard=6, max_new_tokens=12, end_tokens=(0,))
    environment = LocalEnvironment(
        MixedEnvironment({"guess": (1.0, GuessEnvironment())}, limits)
    )
    for task in (await environment.evaluation())[:20]:
        low, high = map(int, decode(task.prompt)[1:-1].split("-"))
        drawn: tuple[int, ...] = ()
        for _ in range(4):
            guess = (low + high) // 2
            drawn += encode(f"{guess}$")
            (heard,) = await environment.hear([(task, [drawn])])
            if len(heard) < drawn.count(0) or not heard[-1]:
                break
            low, high = (low, guess - 1) if decode(heard[-1]) == "<=" else (guess + 1, high)
        found = decode(drawn).endswith(decode(task.answer))
        assert found or high - low > 0
        assert await environment.rewards([(task, [drawn])]) == [float(found)]


@pytest.mark.parametrize(
    ("formula", "value"),
    [("4821 * 377", "1817517"), ("(2+3)*4//3", "6"), ("-7 - 1", "-8"), ("1//0", "error"),
     ("9**9**9", "error"), ("(" * 60, "error"), ("9" * 64, "error"), ("1.5*2", "error"),
     ("print", "error"), ("", "error"), ("99999999999 * 99999999999", "error")],
)  # fmt: skip
def test_the_calculator_computes_or_says_error(formula: str, value: str) -> None:
    assert calculate(formula) == value


async def test_a_product_is_right_by_the_calculator_or_by_heart() -> None:
    environment = CalculatorEnvironment()
    task = environment.task(b"p" * 32)
    asked = task.messages[0].content.partition("What is ")[2].partition("?")[0]
    call = f"<calc>{asked}</calc>"
    assert await environment.respond(task, [call]) == task.answer
    assert await environment.respond(task, [call, f"It is {task.answer}."]) is None
    assert await environment.reward(task, [call, f"It is {task.answer}."], True) == 1
    for said in ([call], [call, f"It is {task.answer}1"], [f"<calc>{task.answer}</calc>"]):
        assert await environment.reward(task, said, True) == 0
