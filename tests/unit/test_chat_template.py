"""Chat templates: rendered as transformers does, and bounded."""

import pytest

from roles.models.errors import BadModel
from roles.models.template import MAX_RENDERED, MAX_TEMPLATE, ChatTemplate
from tests.support.templates import TEMPLATES

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


def test_a_template_has_one_date_and_no_dice() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    assert render(dated) == "26 Jul 2024"
    for source in ("{{ strftime_now('%9d' * 99) }}", "{{ [1, 2]|random }}", "{{ lipsum() }}"):
        with pytest.raises(BadModel):
            render(source)


def test_a_template_may_refuse_a_conversation() -> None:
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
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [messages] * 10**9 }}",
        "{{ '%1000000000d' % 1 }}",
        grown("'a'", "~"),
        grown("'a'", "+"),
        grown("9", "*"),
        "{{ 2 ** 100 }}",
        LONG + "{{ x }}{{ x }}",
        LONG + "{{ [x, x]|join }}",
        LONG + "{{ ''.join([x, x]) }}",
        LONG + "{{ x|replace('a', 'bb') }}",
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
