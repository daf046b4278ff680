"""`shoal sft`: a model learns the answers of chats, and nothing of what was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from roles.models.tokenizer import Tokenizer
from roles.own.sft import TEMPLATE, main, read_lessons
from tests.model_folders import END, LLAMA2_TEMPLATE, make_folder

SAID = "well"


def chats(path: Path, count: int = 64) -> Path:
    rows = []
    for number in range(count):
        turns = [("user", f"{number}?"), ("assistant", SAID), ("user", "b"), ("assistant", "w")]
        rows.append({"messages": [{"role": who, "content": said} for who, said in turns]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_only_answers_and_their_ends_are_learnt_from(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    tokenizer = Tokenizer.open(base)
    # Its prompts end with a blank, which a merge would take into the answer's first token.
    (base / TEMPLATE).write_text(LLAMA2_TEMPLATE.replace("[/INST]", "[/INST] "))
    taught, held = read_lessons(chats(tmp_path / "x.jsonl"), base, END, 128)
    assert len(taught) + len(held) == 128
    for one in (*taught, *held):
        [answer] = one.completions
        assert answer.tokens[-1] == END
        assert tokenizer.decode(answer.tokens[:-1]) in (SAID, "w")
        assert SAID not in tokenizer.decode(one.prompt)[-6:]
    assert sum(SAID in tokenizer.decode(one.prompt) for one in (*taught, *held)) == 64


@pytest.mark.deep
def test_a_model_learns_a_second_template_and_its_folder_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = make_folder(tmp_path / "base"), tmp_path / "out"
    template = tmp_path / "template"
    template.write_text(LLAMA2_TEMPLATE)
    asked = ["--data", str(chats(tmp_path / "x.jsonl")), "-o", str(out), "--rate", "2e-2",
             "--template", str(template), "--steps", "40", "--threads", "1"]  # fmt: skip
    assert main([str(base), *asked, "--device", "cpu"]) == 0
    words = capsys.readouterr().out.split()
    before, after = float(words[2]), float(words[4])
    assert after < before / 2  # of a random model
    assert (out / TEMPLATE).read_text() == LLAMA2_TEMPLATE
    assert main([str(base), *asked]) == 2
    assert "it exists already; name a new folder" in capsys.readouterr().err
    assert not list(tmp_path.glob(".sft-*"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1 ends with a turn of 'user'"),
        ({"question": "a", "answer": 5}, "line 1 has int under 'answer'"),
        ({"question": "a", "answer": "b"}, "each side needs at least one"),
    ],
)
def test_a_bad_file_of_chats_is_one_sentence(
    row: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    base = make_folder(tmp_path / "base")
    assert main([str(base), "--data", str(path), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
