"""What ends an answer, and what tokens say, whatever kind of tokenizer a folder has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from roles.envs.arithmetic import ArithmeticEnvironment
from roles.envs.contained import reward_of, task_of
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.text import TextModel, unpack_text_task_untrusted
from roles.models.bundle import read_config
from roles.models.ends import need_end_tokens, read_end_tokens
from roles.models.errors import BadModel
from roles.models.tokenizer import Tokenizer
from roles.models.trial import facts_of
from tests.model_folders import (
    BLANK,
    END,
    SENTENCEPIECE,
    SPECIAL,
    TEMPLATE,
    edit,
    make_folder,
    make_sentencepiece,
)

KINDS = ("bytes", *SENTENCEPIECE)
TEXTS = ("109", " 109", "  two  blanks ", "so\nit\n\n is", " = -3.", "a W", " \n x")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "bytes":
        return make_folder(tmp_path / "m")
    return make_sentencepiece(tmp_path / "m", request.param)


def test_a_right_answer_earns_all_whatever_the_tokenizer(folder: Path) -> None:
    """With Llama 2's a lone line break begins with a blank, the blank's token became an end,
    and each answer ended before its first digit."""
    ends = need_end_tokens(folder, read_config(folder)).of_line
    model = TextModel(
        folder=str(folder), end_tokens=ends, vocabulary=400, context=4096, max_new_tokens=16
    )
    parts = (EnvironmentPart(name=ArithmeticEnvironment.name),)
    environment = open_mix(EnvironmentSetup(parts=parts, model=model))
    tokenizer = Tokenizer.open(folder)
    for number in range(24):
        task = task_of(environment, number.to_bytes(32, "big"))
        asked = unpack_text_task_untrusted(task.source)
        for answer in (asked.answer, f" {asked.answer}", f" {asked.answer}."):
            tokens = tokenizer.encode_behind(asked.prefill, answer)
            drawn = next((at for at, one in enumerate(tokens) if one in ends), len(tokens))
            assert reward_of(environment, task, (*tokens[:drawn], ends[0])) == 1.0


def test_each_end_of_a_line_says_a_line_break_and_nothing_else(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    lines = tokenizer.line_ends()
    said = tokenizer.decode(tokenizer.encode("a\na"))
    assert bool(lines) == ("\n" in said)
    for end in lines:
        assert tokenizer.decode([end]) == "\n"
        assert end not in tokenizer.encode("a line of words, 12 + 3 and blanks  ")


def test_tokens_say_the_text_that_they_were_made_of(folder: Path) -> None:
    """Decoded alone, an answer lost its first blank."""
    tokenizer = Tokenizer.open(folder)
    for text in TEXTS:
        tokens = tokenizer.encode_behind("27 + 82 =", text)
        kept = text if tokenizer.line_ends() else text.replace("\n", " ")
        assert tokenizer.decode(tokens) == kept
        whole = tokenizer.encode(f"27 + 82 ={text}")
        assert whole[len(whole) - len(tokens) :] == tokens


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
OTHER = "{% for m in messages %}{{ m.content }} <|im_start|>\n{% endfor %}"
ENDLESS = "{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}"
FILES = {
    "config.json": lambda token: {"eos_token_id": token},
    "generation_config.json": lambda token: {"eos_token_id": [token]},
    "special_tokens_map.json": lambda token: {"eos_token": {"content": SPECIAL[token]}},
    "tokenizer_config.json": lambda token: {"eos_token": SPECIAL[token]},
}


@pytest.mark.parametrize("template", [None, ENDLESS, CHATML, OTHER])
@pytest.mark.parametrize("bits", range(16))
def test_ends_are_those_that_any_file_names(
    bits: int, template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file says `<|im_start|>`, and each of the others, on its own, the other token, or
    nothing."""
    folder = make_folder(tmp_path / "m")
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None, chat_template=template)
    monkeypatch.setattr("roles.models.ends.try_tokenizer", facts_of)  # 64 processes
    expected = {0} if template == OTHER else {END} if template == CHATML else set()
    for place, (name, says) in enumerate(FILES.items()):
        if bits >> place & 1:
            edit(folder / name, **says(place % 2))
            expected.add(place % 2)
    ends = read_end_tokens(folder, read_config(folder))
    assert set(ends.tokens) == expected
    assert any("do not agree on end tokens" in note for note in ends.notes) == (
        len(expected) > 1
    )
    assert any("no chat template" in note for note in ends.notes) == (template is None)
    if not expected:
        with pytest.raises(BadModel, match="names an end token"):
            need_end_tokens(folder, read_config(folder))


def test_where_files_do_not_agree_each_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    (note,) = read_end_tokens(folder, read_config(folder)).notes
    assert "config.json 1; generation_config.json 5, 6; tokenizer_config.json 1; the" in note
    edit(folder / "generation_config.json", eos_token_id=320)
    with pytest.raises(BadModel, match=r"generation_config.json cannot be used"):
        read_end_tokens(folder, read_config(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 256}, "tokens up to 261, and by config.json the model has 256"),
        ({"vocab_size": 100}, "token 261, which the model cannot draw"),
    ],
)
def test_tokens_beyond_the_table_are_said(
    changes: Mapping[str, int], said: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "m")
    edit(folder / "config.json", **changes)
    if "cannot draw" in said:
        edit(folder / "tokenizer_config.json", eos_token=f"{BLANK}w")
    ends = read_end_tokens(folder, read_config(folder))
    assert any(said in note for note in ends.notes)
    assert max(ends.of_line) < changes["vocab_size"]


def test_what_a_template_puts_behind_an_answer_is_found_whatever_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    for template, end in {
        TEMPLATE: (END,), CHATML: (END,), OTHER: (0,), ENDLESS: (),
        "{{ raise_exception('no answers') }}": (), "nothing of it": (),
    }.items():  # fmt: skip
        edit(folder / "tokenizer_config.json", chat_template=template)
        assert Tokenizer.open(folder).end_tokens()["the chat template"] == end
