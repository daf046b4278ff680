"""`shoal envs check`, and the laws it tries: rewards that repeat, no constant that pays."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.errors import ConfigError
from roles.envs import gym
from roles.envs.base import Task, make_environment
from roles.envs.check import CONSTANTS, check_rewards, why_not_repeatable
from roles.envs.examine import Examiner, examine
from roles.envs.mix import MixedEnvironment
from roles.envs.questions import MathEnvironment
from roles.envs.sort import SortEnvironment
from roles.envs.text import Message, TextTask
from roles.own.draft import check_environments, read_draft
from roles.own.envs import HEAD, ONE_TURN, TURNS, main
from tests.support.packages import install, needs_gym
from tests.support.runs import DRAFT
from tests.sweeps import swept

GOOD = [{"question": f"{number}?", "answer": rf"{number}\pi"} for number in range(40)]
BAD = [{"question": "a", "answer": r"\frac{1"}, {"question": "b", "answer": "<think>5"}]
BAD += [{"question": "c", "answer": "$$"}, {"question": "d", "answer": None}]


class Faulty:
    """Pays as it is told to, for the answer to one of forty questions."""

    name = "faulty"

    def __init__(self, pay: Any) -> None:
        self.pay = pay

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return self.evaluation()[seed[0] % 40]

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        return float(self.pay(task, text))

    def evaluation(self) -> list[TextTask]:
        return [TextTask((Message("user", f"{n}?"),), "", f"{n + 10}") for n in range(40)]


def right(task: TextTask, text: str) -> bool:
    return text == task.answer


def test_each_fault_is_found_where_it_is() -> None:
    def of(pay: Any) -> tuple[int, int, int]:
        environment = Faulty(pay)
        report = check_rewards(environment, environment.evaluation())
        faults = report.earns_nothing, report.pays_fragments, report.pays_constants
        assert bool(report.faults) == any(faults)
        return tuple(map(len, faults))  # type: ignore[return-value]

    assert of(right) == (0, 0, 0)
    assert of(lambda task, text: right(task, text) and task.answer != "17") == (1, 0, 0)
    assert of(lambda task, text: right(task, text) or text == "nan") == (0, 0, 1)
    assert of(lambda task, text: bool(text) and text in task.answer)[:2] == (0, 76)
    assert of(lambda task, text: not text.isdigit() or right(task, text))[2] > 0


def test_a_reward_that_does_not_repeat_is_found() -> None:
    calls = count()
    assert why_not_repeatable(Faulty(right)) == ""
    for pay in (
        lambda *_: next(calls) % 2,
        lambda task, text: right(task, text) and next(calls) % 3 == 0,
    ):
        said = why_not_repeatable(Faulty(pay))
        assert said.startswith("the environment 'faulty' pays ")
        assert "its author must mend it" in said

    def failing(*_: object) -> float:
        raise LookupError("no such word")

    assert why_not_repeatable(Faulty(failing)) == "", "what raises, raises everywhere"
    assert why_not_repeatable(Faulty(lambda *_: float("nan"))) == ""

    class Moody(SortEnvironment):
        def task(self, seed: bytes, *, held_out: bool = False) -> Task:
            return super().task(bytes([next(calls) % 256]), held_out=held_out)

    class Talks(Faulty):
        async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
            return f"no {next(calls)}" if said[-1] else None

    assert "says 'no " in why_not_repeatable(Talks(lambda *_: 0.0))
    mix = MixedEnvironment({"sort": (1.0, SortEnvironment()), "moody": (1.0, Moody())})
    assert "makes two tasks of one seed" in why_not_repeatable(mix)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_that_do_not_read_back_are_refused_by_line_and_counted(tmp_path: Path) -> None:
    said = r"line 41 has an answer that .*line 44 has no text under 'answer' \(4 of 44\)"
    with pytest.raises(ConfigError, match=said):
        MathEnvironment(write(tmp_path, [*GOOD, *BAD]).read_bytes())


@pytest.mark.deep
def test_the_command_says_what_it_finds_and_writes_what_is_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path, [*GOOD, *BAD]), tmp_path / "good.jsonl"
    assert main(["check", "math", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "earns itself     40 of 40 answers\npays a fragment  0\npays a constant  0\n" in said
    assert "pays 1           \\boxed{0\\pi}\npays 0           39\\pi" in said
    assert "refused 4 lines" in said
    assert MathEnvironment(out.read_bytes()).evaluation()
    golds = write(tmp_path, [{"gold": "5"}] * 16 + [{"gold": ""}])
    assert main(["check", "math-exact", str(golds), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["refused"] == ["line 17 has no text under 'answer'"]
    assert table["pays_a_constant"] == ["'5' earns 1.00"]
    assert main(["check", "arithmetic", "--tasks", "24"]) == 0
    assert "earns itself     24 of 24" in capsys.readouterr().out


def test_init_refuses_an_environment_that_does_not_repeat_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms = read_draft(DRAFT, "draft.toml", 0.0)
    check_environments(terms, ())
    calls = count()
    monkeypatch.setattr(SortEnvironment, "reward", lambda *_: float(next(calls) % 2))
    with pytest.raises(ConfigError, match="the environment 'sort' pays"):
        check_environments(terms, ())


@needs_gym
@pytest.mark.parametrize("family", sorted(gym.GUESSED))
def test_a_family_that_pays_a_constant_is_refused_by_name(family: str) -> None:
    """Three paid "nan", "0" and any text in full."""
    with pytest.raises(ConfigError, match=f"the family '{family}' .* pays one constant"):
        gym.GymEnvironment({"chain_sum": 1.0, family: 1.0})


def families() -> list[str]:
    if importlib.util.find_spec("reasoning_gym") is None:
        return []
    from reasoning_gym.factory import DATASETS

    refused = gym.EVALUATING | gym.GUESSED | gym.NEEDS_SETTINGS
    return swept(sorted(set(DATASETS) - refused), 10)


@needs_gym
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", families())
def test_no_constant_earns_more_than_half_of_a_family(family: str) -> None:
    environment = gym.GymEnvironment({family: 1.0})
    tasks = [environment.task(bytes([number]) * 32) for number in range(24)]
    for constant in (*CONSTANTS, *("0 :00", "6 :00", "12:00", "3", "6", "a", "[0]", "1 1 1")):
        paid = 0.0
        for task in tasks:
            try:
                paid += trio.run(environment.reward, task, constant, True)
            except Exception:  # noqa: BLE001 - an answer that fails earns nothing
                continue
        assert paid <= 12, constant


@needs_gym
@pytest.mark.filterwarnings("ignore")
def test_the_gyms_thoughts_open_tags_and_nan_earn_nothing() -> None:
    environment = make_environment("reasoning-gym", kinds={"gcd": 1.0})
    task = environment.task(bytes(32))
    right = f"<answer>{task.answer}</answer>"
    for text, reward in {
        right: 1.0,
        f"<answer>0</answer> no: {right}": 1.0,
        f"<think>{right}</think><answer>no</answer>": 0.0,
        f"<think>{right}": 0.0,
        f"{right} no: <answer>0": 0.0,
        "<answer>nan</answer>": 0.0,
    }.items():
        assert trio.run(environment.reward, task, text, True) == reward, text


# Whole packages


TEMPLATE = HEAD.replace("NAME", "tried") + ONE_TURN
RIGHT = 'ended and spoken(text).strip(" .") == task.answer'
WRONG = [
    ("import time", f"return float({RIGHT}) * (time.time() % 1 > 0.5)", "time.time at"),
    ("import random", f"return float({RIGHT}) * random.random()", "had another result"),
    ("n = []", f"n.append(1); return float({RIGHT} and len(n) % 2)", "earlier calls"),
    ("", f"return float({RIGHT}) if hash(text) % 2 else 0.5", "had another result"),
    ("", f"return 2.0 * ({RIGHT})", "it must be from 0 to 1"),
    ("", f"return float('nan') if text == '' else float({RIGHT})", "it must be from 0 to 1"),
    ("", "return float(int(text) == int(task.answer))", "raises"),
    ("import re", f"return float({RIGHT}) if re.match('(a|a)*b', text) is None else 0.0",
     "its process ended"),
    ("", f"return float({RIGHT} or len(str(eval(repr(text)))) < 0)", "evaluation of an answer"),
    ("", f"return float({RIGHT}) if open(__file__) else 0.0", "it reaches for open at"),
    ("import os", f"return float({RIGHT}) if not os.system('true') else 0.0", "os.system"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path, "tried", "tried = tried:Vowels")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("tried", None)


@pytest.mark.parametrize(
    ("head", "reward", "said"),
    [WRONG[0], *(pytest.param(*one, marks=pytest.mark.deep) for one in WRONG[1:])],
)
def test_a_bad_package_is_found_with_the_line(
    folder: Path, head: str, reward: str, said: str
) -> None:
    body = f"    async def reward(self, task, text, ended):\n        {reward}\n"
    (folder / "tried.py").write_text(f"{head}\n{HEAD.replace('NAME', 'tried')}\n{body}")
    faults = examine("tried")
    assert any(said in fault for fault in faults), faults
    if said != "its process ended":
        assert any("tried.py:" in fault for fault in faults)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("is_held_out(question) == held_out", "question", "also trained on"),
        ("Say the number.", "Say just {answer}.", "stands in every question"),
        ("rng.choices(", "Random(seedless).choices(", "raises"),
    ],
)
def test_bad_tasks_are_found(folder: Path, before: str, after: str, said: str) -> None:
    source = TEMPLATE.replace(before, after).replace("in {word}?", "in {word[:3]}?")
    if "answer" in after:
        source = source.replace(
            "        question =", "        answer = 'vowels'\n        question ="
        )
        source = source.replace("answer = str(", "str(")
    (folder / "tried.py").write_text(source)
    assert any(said in fault for fault in examine("tried")), examine("tried")


@pytest.mark.parametrize(
    "source",
    [TEMPLATE, pytest.param(TEMPLATE.replace(ONE_TURN, TURNS), marks=pytest.mark.deep)],
)
def test_the_template_is_sound(folder: Path, source: str) -> None:
    (folder / "tried.py").write_text(source)
    assert examine("tried") == []


@pytest.mark.deep
def test_what_comes_with_shoal_is_sound_or_needs_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["arithmetic", "calculator", "guess", "math-exact", "sort"]
    monkeypatch.setattr("roles.own.envs.environment_names", lambda: names)
    assert main(["check", "--all", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["verdict"] for row in rows] == ["sound", "sound", "sound", "refused", "sound"]
    assert "need a file" in rows[3]["why"]


@pytest.mark.deep
def test_families_are_examined_one_by_one() -> None:
    """Check was wrong about acre and arc_1d."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with Examiner("reasoning-gym") as examiner:
        for family in ("gcd", "acre", "arc_1d"):
            assert examiner.examine({family: 1.0}) == []
        assert "in another process" in examiner.examine({"list_functions": 1.0})[0]
        assert "TypeError" in examiner.examine({"boxnet": 1.0})[0]


def test_public_rows_are_converted_and_bad_ones_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"text": "Add.", "code": "def f(a): return a", "test_list": ["assert f(1) == 1"]}
    rows, out = tmp_path / "rows.jsonl", tmp_path / "problems.jsonl"
    rows.write_text(json.dumps(row) + "\n" + '{"what": 1}\n')
    assert main(["convert", str(rows), "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "1 problems written, 1 lines refused" in said
    assert "line 2 is a row of neither MBPP" in said
    assert json.loads(out.read_text())["tests"]["asserts"]["lines"] == row["test_list"]


def test_new_and_list_say_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "tides"]) == 0
    assert "pip install -e tides && shoal envs check tides" in capsys.readouterr().out
    compile((tmp_path / "tides" / "tides" / "__init__.py").read_text(), "tides", "exec")
    assert 'tides = "tides:Vowels"' in (tmp_path / "tides" / "pyproject.toml").read_text()
    assert main(["new", "tides"]) != 0
    assert main(["new", "sort"]) != 0
    said = capsys.readouterr().err
    assert "tides is there already" in said
    assert "an environment called 'sort' is installed" in said
    assert main(["list"]) == 0
    assert "calculator" in capsys.readouterr().out
