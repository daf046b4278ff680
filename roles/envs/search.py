"""Questions whose answers stand in a corpus, which the model searches: several turns of text.

A turn with a line ``search: words`` is answered by the passages that fit the words best, each
with its number; a turn without one is the final answer, compared as in ``math-exact``. The file
has lines of both kinds: ``{"text": ..., "title": ...?}`` is a passage, ``{"question": ...,
"answer": ...}`` a question. Passages are ranked by BM25 (bm25s, of one version), with scores
rounded and ties in the order of the file: every node hears the same.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any, Final

from p2p.errors import ConfigError
from roles.envs.installed import require
from roles.envs.python import ToolEnvironment
from roles.envs.questions import MAX_LINES

PACKAGES: Final = {"bm25s": "0.3.16"}
PASSAGES: Final = 3
"""Passages of a reply."""
MAX_PASSAGE: Final = 600
"""Characters of a passage in a reply. What the run leaves room for (``heard``) may be less."""
MOST_WORDS: Final = 32
"""Words of a search."""
DIGITS: Final = 3
"""Decimal places of a score: machines that round the last bit differently rank alike."""
_CALL: Final = re.compile(r"^[ \t>*`]*search:(.+)$", re.IGNORECASE | re.MULTILINE)
_WORD: Final = re.compile(r"\w+")


class SearchEnvironment(ToolEnvironment):
    """Questions as of ``math-exact``, with a search to find the answer."""

    name = "search"
    offer = (
        "\nYou may search for passages: write one line `search: words` and stop, and I show you"
        " the best. A turn without a search is your final answer."
    )

    def __init__(self, data: bytes = b"") -> None:
        """Read passages and questions.

        Raises:
            ConfigError: ``data`` is no such file, or bm25s is not installed.
        """
        require(PACKAGES, extra="search", what=f"the environment {self.name!r}")
        self._passages, questions = _parted(data)
        super().__init__(questions)
        self._index: Any = importlib.import_module("bm25s").BM25(backend="numpy")
        self._index.index([_words(text) for text in self._passages], show_progress=False)

    def call_in(self, said: str) -> str | None:
        """Return the words of the first search."""
        call = _CALL.search(said)
        return call and call[1]

    def answer(self, call: str) -> str:
        """Return the passages that fit best, the best first."""
        words = [word for word in _words(call)[:MOST_WORDS] if word in self._index.vocab_dict]
        if not words:
            return "nothing found"
        scores = self._index.get_scores(words).round(DIGITS)
        best = (-scores).argsort(kind="stable")[:PASSAGES]
        return "\n".join(
            f"[{at + 1}] {self._passages[at][:MAX_PASSAGE]}" for at in best if scores[at] > 0
        )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _parted(data: bytes) -> tuple[list[str], bytes]:
    """Return the passages of a file, and its other lines.

    Raises:
        ConfigError: It has no passage, or too many lines.
    """
    passages, others = list[str](), list[bytes]()
    lines = data.splitlines()
    for line in lines[:MAX_LINES]:
        try:
            row = json.loads(line)
            text = (row.get("title") or "") + "\n" + row["text"]
            text.encode()  # half of a surrogate pair has no tokens
            passages.append(" ".join(text.split()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            others.append(line)  # of questions, or bad: those who read them say so
    if not any(map(_words, passages)) or len(lines) > MAX_LINES:
        raise ConfigError(
            "the environment 'search' needs a file with passages, lines"
            f' {{"text": ...}}, and questions; at most {MAX_LINES:,} lines'
        )
    return passages, b"\n".join(others)
