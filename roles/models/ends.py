"""The tokens that end an answer. Four files of a folder name them, and often disagree.

``config.json`` of a chat model may name its base's end of text, ``generation_config.json`` the
end of a turn, and the chat template a third token. A model that was trained to end its turn
with a token that is none here talks on until the limit, and no answer earns anything. So each
token that any file names is one: what a model never draws does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2p.errors import BadMessage
from roles.models.bundle import CONFIG, GENERATION_CONFIG
from roles.models.config import MAX_CONFIG, ModelConfig, read_end_tokens_untrusted
from roles.models.errors import BadModel
from roles.models.files import read_bounded
from roles.models.trial import try_tokenizer


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The end tokens of a folder."""

    tokens: tuple[int, ...]
    """All tokens that any file names as an end, those of ``config.json`` first."""
    of_line: tuple[int, ...]
    """The end tokens and the line breaks, for answers of one line."""
    has_template: bool
    """True if the model has a chat template, so that it can be asked anything."""
    notes: tuple[str, ...]
    """Contradictions between the files, a sentence each, for people."""


def read_end_tokens(folder: Path, config: ModelConfig) -> EndTokens:
    """Return the end tokens of a model's folder, after trying its tokenizer.

    Raises:
        BadModel: A file cannot be used, or none names an end.
    """
    named = {CONFIG: config.end_tokens, GENERATION_CONFIG: _of_generation(folder, config)}
    known = tuple(dict.fromkeys(token for tokens in named.values() for token in tokens))
    facts = try_tokenizer(folder, known)
    rows = config.shape.vocabulary
    notes = []
    for source, tokens in facts.end_tokens.items():
        named[source] = tuple(token for token in tokens if token < rows)
        for token in tokens:
            if token >= rows:
                notes.append(
                    f"{source} ends answers with token {token}, which the model cannot draw:"
                    f" {CONFIG} says that it has {rows:,} tokens"
                )
    if len({frozenset(tokens) for tokens in named.values() if tokens}) > 1:
        said = "; ".join(
            f"{source} {', '.join(map(str, tokens))}"
            for source, tokens in named.items()
            if tokens
        )
        notes.append(f"files do not agree on end tokens, and each of these is one: {said}")
    if facts.vocabulary > rows and not notes:
        notes.append(
            f"tokenizer.json has tokens up to {facts.vocabulary - 1}, and by {CONFIG} the model"
            f" has {rows:,}: a task whose prompt has one of the others cannot be asked"
        )
    if not facts.has_template:
        notes.append("there is no chat template: no environment of text can ask this model")
    union = tuple(dict.fromkeys(token for tokens in named.values() for token in tokens))
    of_line = tuple(dict.fromkeys((*union, *(one for one in facts.line_ends if one < rows))))
    return EndTokens(union, of_line, facts.has_template, tuple(notes))


def need_end_tokens(folder: Path, config: ModelConfig) -> EndTokens:
    """Return the end tokens of a model's folder, as `read_end_tokens` does.

    Raises:
        BadModel: No file names an end token.
    """
    ends = read_end_tokens(folder, config)
    if not ends.tokens:
        raise BadModel(
            f"no file of {folder} names an end token, with which an answer could end: set"
            f" eos_token_id in {CONFIG}, or end_tokens in a draft's [model]"
        )
    return ends


def _of_generation(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return ()
    try:
        data = read_bounded(path, MAX_CONFIG)
        return read_end_tokens_untrusted(data, config.shape.vocabulary)
    except BadMessage as error:
        raise BadModel(f"{path} cannot be used: {error}") from None
