"""Text on disk as windows of tokens: files and JSON lines, mixed by weight.

This runs in the worker process. A corpus is a file or a folder; its documents are taken in the
order of their paths. A Python or text file is one document; in a ``.jsonl`` file each row's
``text`` is one. The documents' tokens, each document followed by an end token, are laid end to
end and cut into windows. The last windows of each corpus are held out.

Several corpora are mixed by weight. Windows are read from a table in which each corpus has rows
in proportion to its weight: the corpus that is largest for its weight comes once, the others
again and again beside it. When all rows were read, they are read again. While the rate falls at
the end of a run, a second table, that of the annealing mixture, is read from the same place on.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import ConfigError
from p2p.node.usage import expanded

Encode = Callable[[str], Sequence[int]]
"""A function that turns a document into tokens."""
PYTHON: Final = "python"
"""The corpus that every machine has: the library of its Python."""
TEXTS: Final = frozenset({".py", ".txt", ".md", ".rst"})
"""Files that are one document each."""
MAX_BYTES: Final = 4 << 30
"""Most bytes of all files of a corpus together: their tokens must fit into memory. A larger
corpus is given in parts, each member its own.
"""
SKIPPED: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Folders of Python's library that differ from machine to machine, or are no program text."""


class TextCodec:
    """The tokenizer of a base, or bytes where there is no base."""

    def __init__(self, base: Path | None) -> None:
        self._tokenizer: Any = None
        if base is not None:
            from roles.models.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.open(base)

    def encode(self, text: str) -> Sequence[int]:
        """Return a document as tokens."""
        if self._tokenizer is None:
            return text.encode()
        found: Sequence[int] = self._tokenizer.encode(text)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text for people."""
        if self._tokenizer is None:
            return bytes(one for one in tokens if one < 256).decode(errors="replace")
        return str(self._tokenizer.decode(tokens))


@dataclass(frozen=True, slots=True)
class Windows:
    """All training and held-out windows of a mixture."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    """Start of each training window."""
    annealed: NDArray[np.int64]
    """Start of each training window of the mixture at the end of the run."""
    held_out: NDArray[np.int64]
    width: int
    """Tokens of a window, the first of which is only read."""

    def read(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the windows that begin at ``starts``, shape (windows, width)."""
        rows = starts[:, None] + np.arange(self.width)
        found: NDArray[np.int64] = self.tokens[rows].astype(np.int64)
        return found


def open_corpora(
    weights: Mapping[str, float],
    places: Mapping[str, str],
    encode: Encode,
    *,
    end: int,
    vocabulary: int,
    window: int,
    held_out: int,
    anneal: Mapping[str, float] | None = None,
) -> Windows:
    """Read the corpora as windows. ``anneal`` holds the weights at the end of the run, if they
    differ; the loss is always measured on the mixture before. Raises `ConfigError` if a corpus
    is missing, empty, not text, or of another vocabulary."""
    width = window + 1
    tokens, kept, out, offset = [], dict[str, NDArray[np.int64]](), [], 0
    share, last = _shares(weights), _shares(anneal or weights)
    for name in sorted(share.keys() | last.keys()):
        found = _tokens(name, _place(name, places), encode, end)
        if int(found.max(initial=0)) >= vocabulary or int(found.min(initial=0)) < 0:
            raise ConfigError(
                f"the corpus {name!r} has token {int(found.max())}, and the model's vocabulary"
                f" ends at {vocabulary}: the tokenizer is another model's"
            )
        held = max(1, round(held_out * share.get(name, 0.0)))
        starts = offset + np.arange(found.size // width, dtype=np.int64) * width
        if starts.size < 2 * held:
            raise ConfigError(
                f"the corpus {name!r} has {starts.size} windows of {width} tokens; it needs at"
                f" least {2 * held}, half of them to measure the loss on"
            )
        if name in share:
            out.append(starts[-held:])
        kept[name] = starts[:-held]
        tokens.append(found)
        offset += found.size
    mixed, annealed = _mixed(kept, share), _mixed(kept, last)
    return Windows(np.concatenate(tokens), mixed, annealed, np.concatenate(out), width)


def _shares(weights: Mapping[str, float]) -> Mapping[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _mixed(
    kept: Mapping[str, NDArray[np.int64]], share: Mapping[str, float]
) -> NDArray[np.int64]:
    """Return rows in proportion to the weights: all windows of every corpus, those of a scarce
    one repeatedly. Of a corpus with next to no weight only the first windows are taken, lest
    the table outgrow what it is a table of."""
    rows = min(8 * sum(map(len, kept.values())), max(len(kept[n]) / share[n] for n in share))
    return np.concatenate(
        [np.resize(kept[name], max(1, round(rows * share[name]))) for name in sorted(share)]
    )


def _place(name: str, places: Mapping[str, str]) -> Path:
    if name in places:
        return expanded(Path(places[name]))
    if name == PYTHON:
        return Path(sysconfig.get_path("stdlib"))
    raise ConfigError(
        f"the run learns from the corpus {name!r}, and this node does not know where it is: add"
        f' {name} = "PATH" below [role.trainer.corpora]'
    )


def _tokens(name: str, place: Path, encode: Encode, end: int) -> NDArray[np.int32]:
    if not place.exists():
        raise ConfigError(f"the corpus {name!r} is not at {place}")
    parts, size = [], 0
    for text in _documents(name, place):
        found = _as_array(encode(text))
        parts += [found, np.array([end], np.int32)]
        size += 4 * found.size
        if size > MAX_BYTES:
            raise ConfigError(
                f"the corpus {name!r} has more than {MAX_BYTES >> 30} GiB of tokens: give this"
                " node a part of it"
            )
    if not parts:
        raise ConfigError(
            f"the corpus {name!r} at {place} is empty: it needs {', '.join(sorted(TEXTS))} or"
            " .jsonl files"
        )
    return np.concatenate(parts)


def _as_array(tokens: Sequence[int]) -> NDArray[np.int32]:
    if isinstance(tokens, bytes):
        return np.frombuffer(tokens, np.uint8).astype(np.int32)
    return np.fromiter(tokens, np.int32)


def _documents(name: str, place: Path) -> Iterator[str]:
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    for path in files:
        inside = path.relative_to(place).parts if path != place else ()
        if not path.is_file() or (name == PYTHON and SKIPPED & set(inside)):
            continue
        if path.suffix in TEXTS:
            text = _text(name, path)
            if text:
                yield text
        elif path.suffix == ".jsonl":
            yield from _json_lines(name, path)
        elif path.suffix == ".parquet":
            raise ConfigError(
                f"the corpus {name!r}: {path} is Parquet, and trainers read JSON lines: shoal"
                f" run init --diloco --corpus {name}={place} makes them"
            )


def _text(name: str, path: Path) -> str:
    """Return the text of a file. Files of Python's library that are not UTF-8 are skipped,
    since they test just that; elsewhere they are an error."""
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"the corpus {name!r}: {path} has more than {MAX_BYTES >> 30} GiB")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if name == PYTHON:
            return ""
        raise ConfigError(
            f"the corpus {name!r}: {path} is not UTF-8 text: {error.reason} at byte"
            f" {error.start}"
        ) from None


def _json_lines(name: str, path: Path) -> Iterator[str]:
    # not by splitlines, which also cuts where a text has U+2028
    for number, line in enumerate(_text(name, path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not _is_text(row.get("text")):
            raise ConfigError(
                f"the corpus {name!r}: line {number} of {path} is no object with a text"
            )
        yield row["text"]


def _is_text(value: object) -> bool:
    """Return True if the value is text that UTF-8 can write: JSON may have lone surrogates."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)
