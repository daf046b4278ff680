"""`shoal rl filter`: the lines that a model solves sometimes, and all held-out ones."""

import json
import os
import sys
from pathlib import Path

import pytest

from roles.envs.text import is_held_out
from roles.own.filter import main
from tests.model_folders import make_folder
from tests.support.packages import install

CODE = """
import json
from roles.envs.text import Message, TextTask, is_held_out

class Odd:
    name = "odd"

    def __init__(self, data=b""):
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
        self.rows = [row for row in rows if not is_held_out(row["question"])]

    def task_of(self, question, answer):
        return TextTask((Message("user", question),), "", answer)

    def task(self, seed, *, held_out=False):
        row = self.rows[seed[0] % len(self.rows)]
        return self.task_of(row["question"], row["answer"])

    async def reward(self, task, text, ended):
        is_odd = sum(map(ord, text)) % 2 == 1
        return {"never": 0.0, "always": 1.0}.get(task.answer, float(is_odd))

    def evaluation(self):
        return [self.task(bytes([n]) * 32) for n in range(4)]
"""
ROWS = [
    {
        "question": f"{n}?",
        "answer": ("never", "always", "sometimes")[n % 3],
        "source": "é\u2028",
    }
    for n in range(60)
]
HELD = [row for row in ROWS if is_held_out(str(row["question"]))]


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model and a file of an environment that its owner has installed."""
    install(tmp_path, "odd_env", CODE, "shoal.envs", odd="odd_env:Odd")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    make_folder(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    return ["filter", "llama", "--env", f"odd={tmp_path / 'rows.jsonl'}", "--tokens", "8",
            "--k", "6", "--device", "cpu", "--out", str(tmp_path / "kept.jsonl")]  # fmt: skip


def test_what_is_solved_sometimes_is_kept_with_all_held_out_lines(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_bytes().splitlines()]
    learnt = [row for row in kept if row not in HELD]
    assert [row for row in kept if row in HELD] == HELD
    assert {row["answer"] for row in learnt} == {"sometimes"}
    assert kept == [row for row in ROWS if row in kept], "as they were, in their order"
    said = capsys.readouterr().err
    assert f"{len(learnt)} of {60 - len(HELD)} lines kept: 1 to 5 of 6 answers" in said
    assert f"{len(HELD)} held-out lines stay" in said
    assert main([*argv[:-1], "-", "--least", "6", "--most", "6", "--tasks", "30"]) == 0
    written = capsys.readouterr().out.strip("\n").split("\n")
    answers = [json.loads(line)["answer"] for line in written]
    assert answers.count("always") == 10


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [(["--least", "3", "--most", "2"], 2, "no line has 3 to 2 right answers of 6"),
     (["--env", "arithmetic"], 2, "'arithmetic' reads no FILE"),
     (["--out", "/nowhere/x"], 2, "there is no folder /nowhere"),
     (["--tasks", "1", "--least", "6", "--most", "6"], 1, "nothing is written")],
)  # fmt: skip
def test_what_cannot_be_filtered_is_said(
    argv: list[str], options: list[str], code: int, said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main([*argv, *options]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "kept.jsonl").exists()
