"""`shoal envs check` finds what is wrong with a package, and `run create` refuses it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roles.envs.examine import Examiner, examine
from roles.own.envs import HEAD, ONE_TURN, TURNS, main
from tests.support.packages import install

GOOD = HEAD.replace("NAME", "tried") + ONE_TURN
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
    install(tmp_path, "tried", "", "shoal.envs", tried="tried:Vowels")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("tried", None)


def write(folder: Path, source: str) -> None:
    (folder / "tried.py").write_text(source)


@pytest.mark.parametrize(
    ("head", "reward", "said"),
    [WRONG[0], *(pytest.param(*one, marks=pytest.mark.deep) for one in WRONG[1:])],
)
def test_a_bad_package_is_found_with_the_line(
    folder: Path, head: str, reward: str, said: str
) -> None:
    body = f"    async def reward(self, task, text, ended):\n        {reward}\n"
    write(folder, f"{head}\n{HEAD.replace('NAME', 'tried')}\n{body}")
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
    source = GOOD.replace(before, after).replace("in {word}?", "in {word[:3]}?")
    if "answer" in after:
        source = source.replace(
            "        question =", "        answer = 'vowels'\n        question ="
        )
        source = source.replace("answer = str(", "str(")
    write(folder, source)
    assert any(said in fault for fault in examine("tried")), examine("tried")


@pytest.mark.parametrize(
    "source", [GOOD, pytest.param(GOOD.replace(ONE_TURN, TURNS), marks=pytest.mark.deep)]
)
def test_the_template_is_sound(folder: Path, source: str) -> None:
    write(folder, source)
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
    """Two that check was wrong about: of acre, whose answers are named in each question, and of
    arc_1d, whose answers are alike in their first 40 characters."""
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
