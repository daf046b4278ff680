"""A folder's tokenizer: conversations and text into tokens, and tokens into text.

``tokenizer.json``, ``tokenizer_config.json`` and the chat template come from the run's owner, a
stranger. `tokenizers` reads the first in Rust, with regular expressions of its own; `template`
runs the last. Both may compute for as long as they like, therefore this is used in processes
with limits only: that of the environment (`roles.envs.worker`), a command of a person.

Special tokens that a message spells out (``<|im_end|>``) become those tokens, as everywhere
else: what environments ask is theirs to clean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from p2p.errors import BadMessage, MissingDependency
from roles.models.errors import NO_TEMPLATE, BadModel
from roles.models.files import MAX_TOKENIZER, json_object_untrusted, read_bounded

try:
    import tokenizers

    from roles.models.template import MAX_RENDERED, MAX_TEMPLATE, ChatTemplate
except ImportError as error:
    raise MissingDependency(
        "text of a language model needs tokenizers and jinja2: pip install 'shoal[hf]'"
        f" ({error})"
    ) from error

T = TypeVar("T")

MAX_TOKENIZER_CONFIG: Final = 4 * 1024 * 1024
"""Bytes of ``tokenizer_config.json``, which repeats added tokens at 150 bytes each: Llama 3's
has 55,000."""
MAX_TOKEN: Final = 1024
"""Characters of one token. 128 blanks are the longest usual one; without a bound a short answer
could be a text of any length."""

_SPECIAL: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""The names under which a template finds special tokens, as in transformers."""


TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
CHAT_TEMPLATE: Final = "the chat template"
"""Name of the chat template among the sources of end tokens, beside the configuration files."""
_BEFORE: Final = "1"
"""Text whose tokens are put before others to decode them, since the first token of a text may
lose its blank."""
_LINES: Final = ("1\n1", "a\na")
"""Texts with a line break inside."""
_ASKED: Final = "Which word?"
_SAID: Final = "Shoal"
"""Words of a conversation that shows what a template puts after an answer."""
_PANIC: Final = "PanicException"
"""Name of Rust's panics in Python; the class cannot be imported."""


class ChatMessage(Protocol):
    """The words of one side in a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class Tokenizer:
    """Text and tokens of one model."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        eos: Mapping[str, int] | None = None,
    ) -> None:
        self._core = core
        self._template = template
        self._eos = dict(eos or {})
        tokens = core.get_vocab(with_added_tokens=True)
        longest = max(map(len, tokens), default=0)
        if not tokens or longest > MAX_TOKEN:
            raise BadModel(
                f"the tokenizer has {len(tokens):,} tokens, the longest of {longest:,}"
                f" characters (at most {MAX_TOKEN:,})"
            )
        self._ids = frozenset(tokens.values())
        self.vocabulary: Final = max(self._ids) + 1
        """Every token's id is below. The model may have more rows: its table is padded."""
        self.has_template: Final = template is not None
        self._before = self.encode(_BEFORE)
        self._text_before = self._text(self._before)

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer in a model's folder.

        Raises:
            BadModel: A file cannot be used.
        """
        path = folder / "tokenizer.json"
        core = _core_untrusted(read_bounded(path, MAX_TOKENIZER), path)
        table = _table(folder / TOKENIZER_CONFIG)
        named = {
            SPECIAL_TOKENS: _special_tokens(_table(folder / SPECIAL_TOKENS)),
            TOKENIZER_CONFIG: _special_tokens(table),
        }
        eos = {}
        for name, special in named.items():
            if (end := special.get("eos_token")) is None:
                continue
            look = partial(core.token_to_id, end)
            token = _contained(look, f"{path} cannot look up eos_token")
            if token is None:
                raise BadModel(
                    f"{path} has no token {end!r:.40}, which {name} names as eos_token: the two"
                    " files are not of one model"
                )
            eos[name] = token
        source, special = _template_source(folder, table), named[SPECIAL_TOKENS]
        special |= named[TOKENIZER_CONFIG]
        return cls(core, None if source is None else ChatTemplate(source, special), eos)

    def chat(self, messages: Sequence[ChatMessage], prefill: str = "") -> tuple[int, ...]:
        """Return the prompt tokens of a conversation. The prompt ends with ``prefill``, where
        the assistant goes on. Raises `BadModel`."""
        return self.encode(self.render(messages, prefill))

    def render(self, messages: Sequence[ChatMessage], prefill: str = "") -> str:
        """Return the text of the prompt that `chat` encodes."""
        if self._template is None:
            raise BadModel(NO_TEMPLATE)
        said = [{"role": one.role, "content": one.content} for one in messages]
        return self._template.render(said) + prefill

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text``, without tokens for its beginning or end."""
        return tuple(self._encoding(text).ids)

    def encode_behind(self, before: str, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` when it follows ``before``, which may differ from its
        tokens alone."""
        whole = self._encoding(before + text)
        return tuple(
            token
            for token, (start, _) in zip(whole.ids, whole.offsets, strict=True)
            if start >= len(before)
        )

    def _encoding(self, text: str) -> tokenizers.Encoding:
        if len(text) > 2 * MAX_RENDERED:
            raise BadModel(f"a text of {len(text):,} characters is too long to be a prompt")
        encode = partial(self._core.encode, text, add_special_tokens=False)
        return _contained(encode, "tokenizer.json cannot encode a text")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` as it stands behind other words. Special tokens and
        invalid ids are left out.

        Alone it may be another: tokenizers of SentencePiece drop the first blank of a text.
        """
        known = [token for token in tokens if token in self._ids]
        return self._text([*self._before, *known]).removeprefix(self._text_before)

    def token(self, text: str) -> int | None:
        """Return the id of the token spelled ``text``, if there is one."""
        return self._core.token_to_id(text)

    def end_tokens(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens that end an answer, by their source.

        The sources are ``eos_token``, and the token that the chat template puts after the
        assistant's words.
        """
        said = {name: (token,) for name, token in self._eos.items()}
        return {**said, CHAT_TEMPLATE: self._turn_ends()}

    def line_ends(self) -> tuple[int, ...]:
        """Tokens whose text is a line break alone, wherever they stand; none if the tokenizer
        treats line breaks as blanks.

        What a lone line break encodes to is something else: tokenizers of SentencePiece put a
        blank before it, and to each answer that begins with a blank its token would be an end.
        """
        tokens = {token for text in _LINES for token in self.encode(text)}
        before = self._text(self._before, keeps_special=True)
        return tuple(
            token
            for token in sorted(tokens)
            if self._text([*self._before, token], keeps_special=True) == f"{before}\n"
        )

    def tail(self, end_tokens: Collection[int]) -> Tail:
        """Return the template's text around an answer to the assistant.

        Raises:
            BadModel: What it puts around the answer depends on what was said before, or does
                not begin with an end token: turns cannot be told apart then.
        """
        if self._template is None:
            raise BadModel(NO_TEMPLATE)
        asked = [{"role": "user", "content": _ASKED}]
        later = [
            *asked,
            {"role": "assistant", "content": "No"},
            {"role": "user", "content": "7"},
        ]
        found = set[tuple[str, str]]()
        for before, said, told in product((asked, later), (_SAID, "Tide"), ("Reef", "x = 12")):
            more = [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
            _, is_there, behind = self._template.render([*before, *more]).rpartition(said)
            if not is_there or behind.count(told) != 1:
                raise BadModel(
                    "the chat template does not show an answer of a user behind the assistant's"
                    " words as they are: a run of several turns needs another template"
                )
            head, _, foot = behind.partition(told)
            found.add((head, foot))
        if len(found) > 1:
            raise BadModel(
                "what the chat template puts around an answer depends on what was said before:"
                " a run of several turns needs another template"
            )
        ((head, foot),) = found
        first, *_ = self.encode(head + "x" + foot)
        added = self._core.get_added_tokens_decoder()
        if first not in end_tokens or not (first in added and added[first].special):
            raise BadModel(
                "the chat template ends the assistant's turn with"
                f" {head.lstrip()[:24]!r}, which is no special token among the run's"
                " end_tokens: name it there, or turns cannot be told apart"
            )
        spellings = [
            one.content
            for one in added.values()
            if one.special or any(sign.isalnum() for sign in one.content)
        ]
        return Tail(self, head, foot, sorted(spellings, key=len, reverse=True), set(added))

    def _turn_ends(self) -> tuple[int, ...]:
        if self._template is None:
            return ()
        said = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}]
        try:
            text = self._template.render(said, is_open=False)
        except BadModel:
            return ()  # it knows no answers
        _, is_there, rest = text.rpartition(_SAID)
        added = self._core.get_added_tokens_decoder() if is_there else {}
        found = [
            (len(one.content), token)
            for token, one in added.items()
            if one.content.strip() and rest.lstrip().startswith(one.content)
        ]
        return (max(found)[1],) if found else ()

    def _text(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        decode = partial(self._core.decode, list(tokens), skip_special_tokens=not keeps_special)
        return _contained(decode, "tokenizer.json cannot decode an answer")

    def require(self, tokens: Iterable[int]) -> None:
        """Check that the tokenizer has all of ``tokens``, the run's end tokens.

        Raises:
            BadModel: The tokenizer lacks one of them.
        """
        for token in tokens:
            if token not in self._ids:
                raise BadModel(
                    f"tokenizer.json has no token {token}, which is named as an end token: no"
                    " answer could end with it; name one of its own"
                )


@dataclass(frozen=True, slots=True)
class Tail:
    """The text between an assistant's turn and its next one, around somebody's answer."""

    tokenizer: Tokenizer
    head: str
    """Text from the end token of the assistant's turn to the answer."""
    foot: str
    """Text from the answer to where the assistant speaks again."""
    spellings: Sequence[str]
    """Spellings of added tokens, which an answer must not contain."""
    added: Collection[int]
    """Ids of the added tokens."""

    def tokens(self, words: str, room: int) -> tuple[int, ...] | None:
        """Return the tokens from behind the end token to where the assistant speaks again.

        Args:
            words: The answer. It is stripped, spelled added tokens get a blank inside, and what
                does not fit is cut.
            room: Tokens that there may be.

        Returns:
            None if not even an empty answer fits.
        """
        frame = self._encoded("")
        for one in self.spellings:
            words = words.replace(one, f"{one[:1]} {one[1:]}")
        words = words.encode(errors="replace")[: max(0, room - len(frame))].decode(
            errors="ignore"
        )
        tokens = self._encoded(words)
        marks = sum(token in self.added for token in frame)
        while words and (
            len(tokens) > room or sum(token in self.added for token in tokens) != marks
        ):
            words = words[: len(words) // 2]
            tokens = self._encoded(words)
        return tokens if 0 < len(tokens) <= room else None

    def _encoded(self, words: str) -> tuple[int, ...]:
        return self.tokenizer.encode(self.head + words.strip() + self.foot)[1:]


def _core_untrusted(data: bytes, path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that `tokenizers` makes of the file.

    Raises:
        BadModel: It makes none.
    """
    core = _contained(
        partial(tokenizers.Tokenizer.from_buffer, data), f"{path} is no tokenizer"
    )
    core.no_truncation()
    core.no_padding()
    return core


def _contained(work: Callable[[], T], failure: str) -> T:
    """Turn the library's errors in the block into `BadModel`: plain `Exception`, and the
    library's own `BaseException` if a file breaks an assertion in Rust."""
    try:
        return work()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise BadModel(f"{failure}: {error!s:.160}") from error


def _table(path: Path) -> dict[str, Any]:
    """Return a JSON file of the folder; an empty table if it is not there.

    Raises:
        BadModel: The file is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        return json_object_untrusted(read_bounded(path, MAX_TOKENIZER_CONFIG))
    except BadMessage as error:
        raise BadModel(f"{path} cannot be used: {error}") from None


def _special_tokens(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token by name. A file has a string, or a table with
    ``content``."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = table.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _template_source(folder: Path, table: Mapping[str, Any]) -> str | None:
    """Return the chat template: a file of its own first, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, MAX_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise BadModel(f"{path} is not UTF-8 text") from None
    value = table.get("chat_template")
    if isinstance(value, list):
        named = [one for one in value if isinstance(one, dict) and one.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise BadModel(f"{folder / TOKENIZER_CONFIG}: chat_template is no text")
    return value
