"""Files of others on their way in: what becomes of their rows, and which are kept."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import ConfigError
from roles.envs.data import MAX_DATA
from roles.envs.questions import ExactEnvironment
from roles.envs.text import is_held_out
from roles.own.__main__ import main
from roles.own.envs import main as envs_main
from roles.own.filter import main as filter_main
from roles.own.tables import as_chat, as_question, as_text, convert, read_rows
from tests.model_folders import make_folder
from tests.support.packages import install

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
FORMS: list[dict[str, Any]] = [
    {"messages": TURNS},
    {"prompt": "2+2?", "completion": "4"},
    {"prompt": TURNS[:1], "completion": TURNS[1:]},
    {"question": "2+2?", "answer": "4"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist(rows), path
        )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", FORMS, ids=lambda row: "-".join(row))
def test_every_form_becomes_the_same_rows(
    row: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    [(_, found)] = read_rows(write(tmp_path / f"x.{suffix}", [row]))
    assert as_question(found) == {"question": "2+2?", "answer": "4"}
    assert as_chat(found) == {"messages": TURNS}
    assert as_text(found) == {"text": "2+2?\n\n4"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"ask": "a", "reply": "b"}], "it needs messages, prompt and completion"),
        ([{"prompt": "a", "completion": 4}], "int under 'completion': each row needs text"),
        ([{"prompt": "a"}], "nothing under 'completion'"),
        ([{"messages": TURNS}, {"messages": "2+2?"}], "2 has str under 'messages'"),
        ([{"messages": TURNS[:1]}], "has the turns user: a question is one of user"),
        ([{"messages": [{"role": "user"}]}], "nothing under 'content'"),
        ([], "has no rows"),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_place(
    rows: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    source, target = write(tmp_path / "x.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match=said):
        convert(source, target, as_question)
    assert list(tmp_path.iterdir()) == [source], "no half of a file is left"


def test_bad_parquet_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"question": "a", "answer": 4}])
    with pytest.raises(ConfigError, match="row 1 has int under 'answer'"):
        convert(path, tmp_path / "out", as_question)
    with pytest.raises(ConfigError, match="has the columns ask: it needs messages"):
        list(read_rows(write(tmp_path / "y.parquet", [{"ask": "a"}])))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="no sound Parquet"):
        list(read_rows(path))
    with pytest.raises(ConfigError, match="nodes read JSON lines"):
        ExactEnvironment(path.read_bytes())


def test_ten_gigabytes_of_rows_stop_at_the_limit_in_little_memory(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, many = tmp_path / "x.parquet", 160_000
    same = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * many, pyarrow.int32()), pyarrow.array(["a" * 65_536])
    )
    parquet.write_table(pyarrow.table({"question": same, "answer": same}), path)
    assert path.stat().st_size < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="have over 256 MiB as JSON lines"):
        convert(path, tmp_path / "out", as_question, MAX_DATA)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_parquet_is_one_corpus_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wiki").mkdir()
    rows = [{"text": "Some words of a page, which are long enough. " * 60}] * 8
    for part in range(2):
        write(tmp_path / f"wiki/train-{part}.parquet", rows)
    run = tmp_path / "run"
    assert main(["init", str(run), "--diloco", "--corpus", str(tmp_path / "wiki")]) == 0
    assert (run / "data/wiki.jsonl").read_text().count("\n") == 16
    assert f'wiki = "{run}/data/wiki.jsonl"' in (run / "node.toml").read_text()
    assert "sha256" in capsys.readouterr().err


def test_check_refuses_rows_of_a_chat_by_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n}?"}, TURNS[1]]} for n in range(40)]
    path = write(tmp_path / "x.jsonl", [*chats, {"messages": TURNS[:1]}])
    out = tmp_path / "good.jsonl"
    envs_main(["check", "math-exact", str(path), "--out", str(out)])
    assert "refused: line 41 has the turns user" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 40
    assert ExactEnvironment(out.read_bytes()).evaluation()


def test_a_table_that_is_small_on_the_disk_alone_is_refused(tmp_path: Path) -> None:
    """Its 2.5 KB were 64 GB of JSON lines."""
    arrow = pytest.importorskip("pyarrow")
    said = arrow.array(["a" * (9 << 20)])
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 40, arrow.int32()), said)
    path = tmp_path / "bomb.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table({"text": column}), path, compression="zstd"
    )
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigError, match="row 1 has over 8 MiB"):
        convert(path, tmp_path / "out.jsonl", as_text)
    assert [one.name for one in tmp_path.iterdir()] == ["bomb.parquet"]


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
KINDS = ("never", "always", "sometimes")
ROWS = [{"question": f"{n}?", "answer": KINDS[n % 3], "source": "é\u2028"} for n in range(60)]
HELD = [row for row in ROWS if is_held_out(str(row["question"]))]


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    install(tmp_path, "odd", "odd = odd_env:Odd")
    (tmp_path / "odd_env.py").write_text(CODE)
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
    assert filter_main(argv) == 0
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_bytes().splitlines()]
    learnt = [row for row in kept if row not in HELD]
    assert [row for row in kept if row in HELD] == HELD
    assert {row["answer"] for row in learnt} == {"sometimes"}
    assert kept == [row for row in ROWS if row in kept], "as they were, in their order"
    said = capsys.readouterr().err
    assert f"{len(learnt)} of {60 - len(HELD)} lines kept: 1 to 5 of 6 answers" in said
    assert f"{len(HELD)} held-out lines stay" in said
    assert filter_main([*argv[:-1], "-", "--least", "6", "--most", "6", "--tasks", "30"]) == 0
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
    assert filter_main([*argv, *options]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "kept.jsonl").exists()
