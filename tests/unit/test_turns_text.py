"""Conversations as tokens: the template around an answer, and what an answer may say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from p2p.errors import ConfigError
from roles.envs.base import TurnLimits
from roles.envs.calculator import CalculatorEnvironment, calculate
from roles.envs.client import LocalEnvironment
from roles.envs.guess import GuessEnvironment
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, MixedEnvironment, open_mix
from roles.envs.sort import decode, encode
from roles.envs.text import Message, TextModel, TextTask, TokenizedTurns
from roles.models.errors import BadModel
from roles.models.tokenizer import Tokenizer
from tests.model_folders import END, SPECIAL, make_folder

TURNS = TurnLimits(most=4, heard=64, max_new_tokens=60, end_tokens=(END,))


class Parrot:
    """Repeats what it was told, until it is told to stop."""

    name = "parrot"

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return TextTask((Message("user", f"talk {seed[:1].hex()}"),), "", "stop")

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        return None if said[-1] == task.answer else said[-1]

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        return 1.0 if ended and said[-1] == task.answer else 0.0

    def evaluation(self) -> list[TextTask]:
        return [self.task(b"e", held_out=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("turns") / "llama")


def model_of(folder: Path) -> TextModel:
    return TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=512, max_new_tokens=124
    )


def mixed(folder: Path, limits: TurnLimits = TURNS) -> MixedEnvironment:
    part = TokenizedTurns(Parrot(), Tokenizer.open(folder), model_of(folder))
    return MixedEnvironment({"parrot": (1.0, part)}, limits)


def test_a_row_is_what_the_template_makes_of_the_conversation(folder: Path) -> None:
    """Also of words that spell end tokens: they get a blank inside."""
    tokenizer, environment, rng = Tokenizer.open(folder), mixed(folder), Random(4)
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
        environment = mixed(folder, replace(TURNS, heard=room, max_new_tokens=500))
        task = environment.task(b"s" * 32)
        drawn = (*Tokenizer.open(folder).encode("long " * 40), END)
        assert 0 < sum(map(len, environment.hear(task, drawn))) <= room
        assert 0 < sum(map(len, environment.hear(task, drawn + drawn))) <= room


def test_it_is_asked_until_it_ends_the_completion(folder: Path) -> None:
    environment, encode_text = mixed(folder), Tokenizer.open(folder).encode
    task = environment.task(b"s" * 32)
    more, stop = (*encode_text("hi"), END), (*encode_text("stop"), END)
    answers = [more, more + stop, stop, more * 4, encode_text("hi")]
    one, two, none, four, cut = (environment.hear(task, answer) for answer in answers)
    assert (len(one), len(two), none, len(four), cut) == (1, 2, ((),), 3, ())
    assert two[1] == ()
    assert all(four)
    assert [environment.reward(task, answer) for answer in answers] == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends the assistant's turn"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>"
         "{{ loop.index if loop.last }}{% endfor %}", "depends on what was said before"),
        ("{{ messages[0].content }}<|im_end|>", "does not show an answer"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_carry_turns_is_refused(
    tmp_path: Path, template: str, said: str
) -> None:
    folder = make_folder(tmp_path / "llama")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(BadModel, match=said):
        Tokenizer.open(folder).tail((END,))


def test_an_end_token_that_the_run_does_not_name_is_refused(folder: Path) -> None:
    with pytest.raises(BadModel, match="name it there"):
        Tokenizer.open(folder).tail((END + 1,))


def test_an_environment_of_turns_needs_a_run_of_turns() -> None:
    setup = EnvironmentSetup(parts=(EnvironmentPart(name="guess"),))
    with pytest.raises(ConfigError, match=r"set turns and heard in \[sampling\]"):
        open_mix(setup)


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
