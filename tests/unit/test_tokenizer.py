"""A folder's tokenizer and chat template as tokens, bounded, and what ends an answer."""

from pathlib import Path

import pytest

from roles.contract.core.shape import Family
from roles.envs.arithmetic import ArithmeticEnvironment
from roles.envs.contained import reward_of, task_of
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.text import Message, TextModel, unpack_text_task_untrusted
from roles.models.bundle import check_weights, read_config
from roles.models.ends import need_end_tokens, read_end_tokens
from roles.models.errors import BadModel
from roles.models.fetch import MODELS, is_whole
from roles.models.template import MAX_RENDERED, MAX_TEMPLATE, ChatTemplate
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
    tokenizer_json,
)
from tests.support.templates import TEMPLATES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "m")


def test_a_conversation_becomes_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    messages = [Message("user", "hello world")]
    text = tokenizer.render(messages, "so")
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\nso"
    tokens = tokenizer.chat(messages, "so")
    assert tokens == tokenizer.encode(text)
    assert tokens[0] == 0
    assert tokens.count(END) == 1
    assert tokenizer.decode(tokens) == "user\nhello world\nassistant\nso"
    assert tokenizer.vocabulary == 262
    assert (tokenizer.token(SPECIAL[1]), tokenizer.token("nothing")) == (END, None)


def test_merges_and_bytes_of_any_text_and_ids_that_are_no_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    assert len(tokenizer.encode("hell w")) == 2
    for text in ("", "naïve 日本 🐟", "a\x00b", " \n "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    (letter,) = tokenizer.encode("h")
    assert tokenizer.decode([letter, -1, 319, 10**30, END]) == "h"


def test_named_end_tokens_must_be_there(own: Path) -> None:
    tokenizer = Tokenizer.open(own)
    tokenizer.require([0, END, 261])
    with pytest.raises(BadModel, match="no token 262, which is named as an end token"):
        tokenizer.require([END, 262])
    edit(own / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(BadModel, match=r"'</s>', which tokenizer_config.json names"):
        Tokenizer.open(own)


def test_a_template_comes_from_its_own_file_first(own: Path) -> None:
    config = own / "tokenizer_config.json"
    config.write_text("{}")
    assert Tokenizer.open(own).encode("hell")
    with pytest.raises(BadModel, match="no chat template"):
        Tokenizer.open(own).chat([Message("user", "x")])
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(config, chat_template=named, bos_token={"content": "<s>"})
    assert Tokenizer.open(own).render([]) == "d"
    (own / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert Tokenizer.open(own).render([]) == "<s>file"
    config.unlink()
    edit(own / "special_tokens_map.json", bos_token="<b>")
    assert Tokenizer.open(own).render([]) == "<b>file"


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
    own: Path, name: str, content: str, said: str
) -> None:
    (own / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(BadModel, match=said):
        Tokenizer.open(own)


def test_what_cannot_be_encoded_is_an_error_like_others(own: Path) -> None:
    with pytest.raises(BadModel, match="too long"):
        Tokenizer.open(own).encode("a" * (2 * MAX_RENDERED + 1))
    panics = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}  # in Rust
    edit(own / "tokenizer.json", normalizer=panics)
    with pytest.raises(BadModel, match="cannot encode a text"):
        Tokenizer.open(own).encode("hello <|im_end|> aaaaab 日本")
    (own / "tokenizer.json").unlink()
    with pytest.raises(BadModel, match=r"tokenizer.json cannot be read"):
        Tokenizer.open(own)


def test_truncation_in_the_file_is_not_followed(own: Path) -> None:
    truncation = {
        "max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    edit(own / "tokenizer.json", truncation=truncation)
    assert len(Tokenizer.open(own).encode("abcdef")) == 6


# Chat templates


ASK = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] = ASK, **special: str) -> str:
    return ChatTemplate(source, special).render(messages)


def test_a_template_sees_what_transformers_shows_it() -> None:
    source = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
[none]
    {%- endif %}
{{ '<' + message['role'] + '>' ~ message.content | trim }}
{%- endfor %}
{% if tools is not none %}tools{% endif %}
{% generation %}
go {{ eos_token if eos_token is defined else 'nowhere' }}
{% endgeneration %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
    text = render(source, [{"role": "user", "content": " a "}, *ASK], bos_token="<s>")
    assert text == "<s>[none]<user>a<user>higo nowhere\n<assistant>"


def test_loop_controls_macros_and_filters_work() -> None:
    source = (
        "{% macro say(text) %}[{{ text|upper }}]{% endmacro %}"
        "{% for i in range(9) if i is even %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i > 5 %}{% break %}{% endif %}{{ say('a' ~ i) }}{% endfor %}"
        "{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n * 3 }} {{ '-' * 3 }} {{ messages|map(attribute='role')|join(',') }}"
        " {{ ', '.join(['x', 'y']) }} {{ 'a.b'.replace('.', '-') }}"
        " {{ 'aa'|replace('a', 'b', 1) }}"
    )
    assert render(source) == "[A0][A4]3 --- user x, y a-b ba"


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_in_use_ask_for_is_there(name: str) -> None:
    messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "hi"}]
    text = render(TEMPLATES[name], messages, bos_token="<s>")
    said = {
        "chatml": (
            "<|im_start|>system\n s <|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        "headers": "<|system|>s<user>\n\nhi</>",
        "thinking": "<system> s 1<user>hi2",
        "lists": (
            '<s>"role": "system", "content": " s "| [last]'
            '"role": "user", "content": "hi"|HTrueTruesystem,user'
        ),
    }
    assert text == said[name]


def test_to_json_is_transformers_and_not_jinjas() -> None:
    messages = [{"role": "user", "content": "<é>'"}]
    assert render("{{ messages[0]|tojson }}", messages) == (
        '{"role": "user", "content": "<é>\'"}'
    )
    assert render("{{ [1]|tojson(indent=2) }}") == "[\n  1\n]"
    with pytest.raises(BadModel, match="indent"):
        render("{{ [1]|tojson(indent=1000000000) }}")


def test_a_template_has_one_date_and_no_dice_and_may_refuse_a_conversation() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    assert render(dated) == "26 Jul 2024"
    for source in ("{{ strftime_now('%9d' * 99) }}", "{{ [1, 2]|random }}", "{{ lipsum() }}"):
        with pytest.raises(BadModel):
            render(source)
    with pytest.raises(BadModel, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) if false %}{% endfor %}" * 2,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) * 2 }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
    ids=["nested", "condition", "macro", "recursive", "range"],
)  # fmt: skip
def test_a_template_that_loops_ends(source: str) -> None:
    with pytest.raises(BadModel, match=r"turns|RecursionError|Range too big"):
        render(source)


def test_turns_are_counted_for_each_conversation_anew() -> None:
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}x", {})
    assert [template.render(ASK) for _ in range(3)] == ["x"] * 3


def grown(start: str, operator: str) -> str:
    return (
        "{% set n = namespace(x=" + start + ") %}"
        "{% for i in range(99) %}{% set n.x = n.x " + operator + " n.x %}{% endfor %}"
    )


LONG = "{% set x = 'a' * 1000000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}", "{{ 10**9 * 'a' }}", "{{ [messages] * 10**9 }}",
        "{{ '%1000000000d' % 1 }}", grown("'a'", "~"), grown("'a'", "+"), grown("9", "*"),
        "{{ 2 ** 100 }}", LONG + "{{ x }}{{ x }}", LONG + "{{ [x, x]|join }}",
        LONG + "{{ ''.join([x, x]) }}", LONG + "{{ x|replace('a', 'bb') }}",
        LONG + "{{ x.replace('', 'b') }}",
    ],
)  # fmt: skip
def test_no_text_and_no_number_grows_without_a_bound(source: str) -> None:
    with pytest.raises(BadModel, match=r"more than 1,048,576|numbers here|beyond"):
        render(source)


def test_a_long_conversation_is_bounded_too() -> None:
    with pytest.raises(BadModel, match="1,048,576"):
        render(
            "{{ messages[0].content }}", [{"role": "user", "content": "a" * MAX_RENDERED + "b"}]
        )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages.append(1) }}", "'append' of a list"),
        ("{{ messages[0].pop('role') }}", "'pop' of a dict"),
        ("{{ ''.__class__.__mro__ }}", "'__class__' of a str"),
        ("{{ messages[0]['__class__'] }}", "'__class__' of a dict"),
        ("{{ messages|map(attribute='__class__')|list }}", "'__class__' of a dict"),
        ("{{ raise_exception.__globals__ }}", "'__globals__' of a function"),
        ("{{ self._TemplateReference__context }}", "_TemplateReference__context"),
        ("{{ loop.__init__ if loop else namespace.__init__ }}", "'__init__' of a type"),
        ("{{ '{:1000000000}'.format(1) }}", "'format' of a str"),
        ("{{ 'a'.center(1000000000) }}", "'center' of a str"),
        ("{{ 'a'['zfill'](9) }}", "'zfill' of a str"),
        ("{{ 'a'|center(1000000000) }}", "center"),
        ("{{ messages|attr('append') }}", "attr"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{% for %}", "cannot be read"),
        ("{{ " + "(" * 5000, "RecursionError"),
        ("{% for a in messages %}" * 25 + "{% endfor %}" * 25, "cannot be read"),
        ("x" * (MAX_TEMPLATE + 1), "at most"),
    ],
)
def test_what_a_template_must_not_do_is_said(source: str, said: str) -> None:
    with pytest.raises(BadModel, match=said.replace("(", "\\(")):
        render(source)


# What ends an answer


KINDS = ("bytes", *SENTENCEPIECE)
TEXTS = ("109", " 109", "  two  blanks ", "so\nit\n\n is", " = -3.", "a W", " \n x")


@pytest.fixture(params=KINDS)
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "bytes":
        return make_folder(tmp_path / "m")
    return make_sentencepiece(tmp_path / "m", request.param)


def test_a_right_answer_earns_all_whatever_the_tokenizer(any_folder: Path) -> None:
    """With Llama 2's each answer ended before its first digit."""
    ends = need_end_tokens(any_folder, read_config(any_folder)).of_line
    model = TextModel(
        folder=str(any_folder), end_tokens=ends, vocabulary=400, context=4096, max_new_tokens=16
    )
    parts = (EnvironmentPart(name=ArithmeticEnvironment.name),)
    environment = open_mix(EnvironmentSetup(parts=parts, model=model))
    tokenizer = Tokenizer.open(any_folder)
    for number in range(24):
        task = task_of(environment, number.to_bytes(32, "big"))
        asked = unpack_text_task_untrusted(task.source)
        for answer in (asked.answer, f" {asked.answer}", f" {asked.answer}."):
            tokens = tokenizer.encode_behind(asked.prefill, answer)
            drawn = next((at for at, one in enumerate(tokens) if one in ends), len(tokens))
            assert reward_of(environment, task, (*tokens[:drawn], ends[0])) == 1.0


def test_each_end_of_a_line_says_a_line_break_and_nothing_else(any_folder: Path) -> None:
    tokenizer = Tokenizer.open(any_folder)
    lines = tokenizer.line_ends()
    said = tokenizer.decode(tokenizer.encode("a\na"))
    assert bool(lines) == ("\n" in said)
    for end in lines:
        assert tokenizer.decode([end]) == "\n"
        assert end not in tokenizer.encode("a line of words, 12 + 3 and blanks  ")


def test_tokens_say_the_text_that_they_were_made_of(any_folder: Path) -> None:
    """Decoded alone, an answer lost its first blank."""
    tokenizer = Tokenizer.open(any_folder)
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
    """One file says `<|im_start|>`, the others the other token, or nothing."""
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


def test_tokens_beyond_the_table_are_said(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    for size, said in (
        (256, "tokens up to 261, and by config.json the model has 256"),
        (100, "token 261, which the model cannot draw"),
    ):
        edit(folder / "config.json", vocab_size=size)
        ends = read_end_tokens(folder, read_config(folder))
        assert any(said in note for note in ends.notes)
        assert max(ends.of_line) < size
        edit(folder / "tokenizer_config.json", eos_token=f"{BLANK}w")


def test_what_a_template_puts_behind_an_answer_is_found_whatever_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    for template, end in {
        TEMPLATE: (END,), CHATML: (END,), OTHER: (0,), ENDLESS: (),
        "{{ raise_exception('no answers') }}": (), "nothing of it": (),
    }.items():  # fmt: skip
        edit(folder / "tokenizer_config.json", chat_template=template)
        assert Tokenizer.open(folder).end_tokens()["the chat template"] == end


# The real model, where it is


QUESTION = Message("user", "What is 27 + 82?")
PROMPT = (
    1, 4093, 198, 1780, 314, 216, 34, 39, 1232, 216, 40, 34, 47, 2, 198,
    1, 520, 9531, 198, 34, 39, 1232, 216, 40, 34, 446,
)  # fmt: skip
"""Hugging Face's tokenizer of the GGUF file gives the same 26."""


def test_the_folder_has_its_pins_and_its_weights_are_numbers(smollm2: Path) -> None:
    assert is_whole(MODELS["smollm2"], smollm2)
    config = read_config(smollm2)
    assert (config.shape.family, config.shape.parameters) == (Family.LLAMA, 134_515_008)
    check_weights(smollm2, config)


def test_a_question_is_these_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.open(smollm2)
    assert tokenizer.render([QUESTION], "27 + 82 =") == (
        "<|im_start|>user\nWhat is 27 + 82?<|im_end|>\n<|im_start|>assistant\n27 + 82 ="
    )
    assert tokenizer.chat([QUESTION], "27 + 82 =") == PROMPT
    system = Message("system", "Be brief.")
    told = tokenizer.chat([system, QUESTION], "27 + 82 =")
    assert told[-26:] == PROMPT
    assert tokenizer.decode(told[:-26]) == "system\nBe brief.\n"


def test_text_is_these_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.open(smollm2)
    assert tokenizer.vocabulary == 49_152
    assert tokenizer.encode(" 109\n") == (216, 33, 32, 41, 198)
    assert (tokenizer.token("<|im_end|>"), tokenizer.token("\n")) == (2, None)
    for text in ("naïve 日本 🐟\t\n\n  x", "def f(x):\n    return x ** 2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.require([2, 198])
