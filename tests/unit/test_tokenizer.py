"""A folder's tokenizer and chat template as tokens."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from roles.models.errors import BadModel
from roles.models.template import MAX_RENDERED
from roles.models.tokenizer import Tokenizer
from tests.model_folders import END, SPECIAL, TEMPLATE, make_folder, tokenizer_json


@dataclass(frozen=True)
class Said:
    role: str
    content: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


def copy(folder: Path, to: Path) -> Path:
    for path in folder.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_conversation_becomes_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    messages = [Said("user", "hello world")]
    text = tokenizer.render(messages, "so")
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\nso"
    tokens = tokenizer.chat(messages, "so")
    assert tokens == tokenizer.encode(text)
    assert tokens[0] == 0
    assert tokens.count(END) == 1
    assert tokenizer.decode(tokens) == "user\nhello world\nassistant\nso"
    assert tokenizer.vocabulary == 262
    assert (tokenizer.token(SPECIAL[1]), tokenizer.token("nothing")) == (END, None)


def test_merges_and_bytes_of_any_text(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    assert len(tokenizer.encode("hell w")) == 2
    for text in ("", "naïve 日本 🐟", "a\x00b", " \n "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_that_are_no_tokens_say_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    (letter,) = tokenizer.encode("h")
    assert tokenizer.decode([letter, -1, 319, 10**30, END]) == "h"


def test_named_end_tokens_must_be_there(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    tokenizer.require([0, END, 261])
    with pytest.raises(BadModel, match="no token 262, which is named as an end token"):
        tokenizer.require([END, 262])
    copy(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(BadModel, match=r"'</s>', which tokenizer_config.json names"):
        Tokenizer.open(tmp_path)


def test_a_template_comes_from_its_own_file_first(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    table = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    assert Tokenizer.open(tmp_path).render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert Tokenizer.open(tmp_path).render([]) == "<s>file"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<b>"}))
    assert Tokenizer.open(tmp_path).render([]) == "<b>file"


def test_a_base_model_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hell")
    with pytest.raises(BadModel, match="no chat template"):
        tokenizer.chat([Said("user", "x")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "is no tokenizer"),
        ("tokenizer.json", "[]", "is no tokenizer"),
        ("tokenizer.json", tokenizer_json().replace('"BPE"', '"Mine"'), "is no tokenizer"),
        ("tokenizer.json", tokenizer_json().replace('"#"', f'"{"#" * 2000}"'), "2,000 char"),
        ("tokenizer_config.json", "[", "is not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template is no text"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "cannot be read"),
        ("tokenizer_config.json", " " * (4 << 20) + "{}", "more than"),
        ("chat_template.jinja", "\udcff", "UTF-8"),
        ("chat_template.jinja", "x" * 300_000, "more than"),
    ],
)
def test_what_cannot_be_read_names_the_file(
    folder: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    copy(folder, tmp_path)
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(BadModel, match=said):
        Tokenizer.open(tmp_path)


def test_a_missing_tokenizer_and_a_text_without_end(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"tokenizer.json cannot be read"):
        Tokenizer.open(tmp_path)
    with pytest.raises(BadModel, match="too long"):
        Tokenizer.open(folder).encode("a" * (2 * MAX_RENDERED + 1))


def test_truncation_and_padding_of_the_file_are_not_followed(tmp_path: Path) -> None:
    table = json.loads(tokenizer_json())
    table["truncation"] = {
        "max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert len(Tokenizer.open(tmp_path).encode("abcdef")) == 6
