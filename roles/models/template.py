"""A model's chat template: a stranger's jinja2 program that makes one text of a conversation.

Theory of operation
-------------------
A template is rendered as transformers renders it: the same whitespace rules, loop controls,
``raise_exception``, ``tojson``, the tag ``generation``, and the names ``messages``, ``tools``,
``documents``, ``add_generation_prompt`` and those of the special tokens. Two nodes must get the
same tokens from it on any day, or their proofs differ: ``strftime_now`` says the same date for
ever, and there is no ``random`` and no ``lipsum``.

jinja2's sandbox keeps a template from Python's internals. It does not keep it from running for
ever, or from a text of any length, so here

- each turn of a loop and each call of a macro takes one of `MAX_TURNS`;
- what makes a long text of short ones (``+``, ``~``, ``*``, ``join``, ``replace``) may not
  exceed `MAX_RENDERED`, and no more may the whole;
- filters and attributes are those of a list: what templates in use ask for. Those that take a
  width or a precision, which is memory for the asking, are not on it.

What is left (a filter over a long list, in a loop) is bounded by seconds and bytes of the
process, which must have such limits: `roles.envs.ration`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_environment

from roles.models.errors import BadModel

T = TypeVar("T")

MAX_TEMPLATE: Final = 256 * 1024
"""Bytes of a template's source: the longest in use, with tools and documents, have 20,000."""
MAX_RENDERED: Final = 1024 * 1024
"""Characters of a rendered conversation, or of any text on the way: about 250,000 tokens, more
than a run's context."""
MAX_TURNS: Final = 100_000
"""Turns of loops and calls of macros, all together, in one conversation: a loop over 1,000
messages with ten parts each takes 11,000. As many empty ones as this take 0.1 s."""
MAX_INDENT: Final = 16
"""Columns by which ``tojson`` may indent; 4 is usual."""
TODAY: Final = datetime.date(2024, 7, 26)
"""The date that ``strftime_now`` gives, on every day. Llama 3's template names this date itself
where there is no clock, and others (Mistral's) do not render without one.
"""
MAX_DATE: Final = 64
"""Characters of the form in which a template asks for it: ``%d %B %Y`` has eight, and each may
become 256."""
MAX_SAID: Final = 160
"""Characters of the template's own words that are repeated: a sentence."""

_LARGEST: Final = 1 << 63
"""Largest whole number that is added or multiplied: without a bound each product has twice the
digits.
"""
_LARGEST_POWER: Final = 64
"""Largest exponent: 2^63 to the 64th has 4,032 bits."""

_FILTERS: Final = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim",
    "unique", "upper",
)  # fmt: skip
"""jinja2's filters that templates get as they are. Missing, with their reasons: ``center``,
``indent``, ``format``, ``round``, ``batch`` (memory for a number), ``random`` (another text
each time), ``attr`` (a second way to attributes)."""
_OF_TEXT: Final = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
})  # fmt: skip
_ATTRIBUTES: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _OF_TEXT),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (LoopContext, frozenset(name for name in dir(LoopContext) if not name.startswith("_"))),
)
"""Attributes that a template may read, by what it reads them from. ``append`` and its like are
missing because they change the caller's values, ``format``, ``center``, ``ljust``, ``zfill``
and ``expandtabs`` because a short text makes a long one."""


class ChatTemplate:
    """A compiled template, for any number of conversations, one at a time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Raises:
            BadModel: ``source`` is no template that we run.
        """
        if len(source) > MAX_TEMPLATE:
            raise BadModel(
                f"the chat template has {len(source):,} characters (at most {MAX_TEMPLATE:,})"
            )
        self._sandbox = _Sandbox()
        self._special_tokens = dict(special_tokens)
        self._template: Template = _contained(partial(self._sandbox.compiled, source), "read")

    def render(self, messages: Sequence[Mapping[str, str]], *, is_open: bool = True) -> str:
        """Return the text up to where the assistant begins to speak; unless it ``is_open``, up
        to the end of the last message.

        Raises:
            BadModel: The template failed.
        """
        return _contained(partial(self._render, messages, is_open), "rendered")

    def _render(self, messages: Sequence[Mapping[str, str]], is_open: bool) -> str:
        self._sandbox.turns = 0
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=is_open,
            **self._special_tokens,
        ):
            length += len(piece)
            _check_length(length)
            pieces.append(piece)
        return "".join(pieces)


def _contained(work: Callable[[], T], what: str) -> T:
    """Return the result of ``work``; a template may fail in any way that Python knows.

    Raises:
        BadModel: ``work`` raised.
    """
    try:
        return work()
    except Exception as error:
        said = f"{type(error).__name__}: {error!s:.{MAX_SAID}}"
        raise BadModel(f"the chat template cannot be {what}: {said}") from error


class _Generation(Extension):
    """The tag with which templates mark the assistant's words for training: passed over."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's, with bounds on time and length."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else it would compute constants before there is a bound
            extensions=[LoopControlExtension, _Generation],
        )
        self.turns = 0
        self.filters = {name: FILTERS[name] for name in _FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "tojson": _to_json}
        self.globals = {
            "range": safe_range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compiled(self, source: str) -> Template:
        """Return the compiled template, with loops and macros that count their turns."""
        tree = self.parse(source)
        loops: tuple[type[nodes.Node], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in tree.find_all(loops):
            _count_turns(node)
        for concatenation in list(tree.find_all(nodes.Concat)):
            # a node is replaced in place: joined with one operand, which is the bounded sum
            concatenation.nodes = [_call("joined", concatenation.nodes)]
        return Template.from_code(self, self.compile(tree), self.globals)

    def tick(self) -> bool:
        """Take a turn; always true, so that it can stand in a condition."""
        self.turns += 1
        if self.turns > MAX_TURNS:
            raise SecurityError(f"its loops and macros take more than {MAX_TURNS:,} turns")
        return True

    def joined(self, *parts: object) -> str:
        """Return the result of ``a ~ b ~ c``."""
        return _joined(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return ``left operator right``, if the result is of a sane size."""
        is_text = isinstance(left, str | list | tuple), isinstance(right, str | list | tuple)
        if operator == "+" and all(is_text):
            _check_length(len(left) + len(right))
        elif operator == "*" and is_text[0] and isinstance(left, str):
            _check_length(len(left) * max(0, right))
        elif any(is_text):
            raise SecurityError(f"{operator!r} is for numbers here")
        elif any(isinstance(one, int) and abs(one) > _LARGEST for one in (left, right)):
            raise SecurityError(f"a number is beyond {_LARGEST}")
        elif operator == "**" and abs(right) > _LARGEST_POWER:
            raise SecurityError(f"an exponent is beyond {_LARGEST_POWER}")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute``, with our own versions of the methods that make texts
        longer.
        """
        if isinstance(obj, str) and attribute == "join":
            return lambda items: _joined(map(str, items), obj)
        if isinstance(obj, str) and attribute == "replace":
            return partial(_replace, obj)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if templates may read the attribute: it is on the list."""
        known = any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)
        is_variable = isinstance(obj, Namespace) and not attr.startswith("_")
        return known or is_variable

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise `SecurityError` at once. The object that jinja2 returns instead raises it only
        when it is used, and prints as an empty text."""
        raise SecurityError(f"it may not read {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """Return None, so that templates cannot call ``format``."""


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """Return a call of the sandbox's own ``method``, which no template can replace."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _count_turns(node: nodes.Node) -> None:
    """Count each turn of ``node``: for a loop with a condition, each item on which the
    condition is tried."""
    if isinstance(node, nodes.For) and node.test is not None:
        node.test = nodes.And(_call("tick", []), node.test)
    elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        node.body.insert(0, nodes.ExprStmt(_call("tick", []), lineno=node.lineno))


def _check_length(length: int) -> None:
    if length > MAX_RENDERED:
        raise SecurityError(f"it makes a text of more than {MAX_RENDERED:,} characters")


def _joined(parts: Iterable[str], separator: str = "") -> str:
    pieces: list[str] = []
    length = 0
    for part in parts:
        length += len(part) + len(separator)
        _check_length(length)
        pieces.append(part)
    return separator.join(pieces)


@pass_environment
def _join(
    sandbox: _Sandbox, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(sandbox, attribute), value)
    return _joined(map(str, value), str(d))


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _check_length(len(text) + found * (len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers. jinja2's own filter escapes for HTML."""
    if indent is not None and indent > MAX_INDENT:
        raise SecurityError(f"tojson may indent by {MAX_INDENT} at most")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    """Raise the error of a template that cannot render these messages."""
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE:
        raise SecurityError(f"a date is asked for in {MAX_DATE} characters at most")
    return TODAY.strftime(form)
