"""Small files of a model's folder, read whole up to a bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from p2p.errors import BadMessage
from roles.models.errors import BadModel

MAX_TOKENIZER: Final = 64 * 1024 * 1024
"""Bytes of ``tokenizer.json``: 17 MB for Llama 3's 128,256 tokens, 33 MB for the largest in
use."""
MAX_ITEMS: Final = 12
"""Most items of a table or a list that a sentence names."""
MAX_SHOWN: Final = 60
"""Characters of a value that a sentence repeats."""


def check_regular(path: Path) -> None:
    """Check that ``path`` is a regular file, or absent.

    An archive may unpack a pipe, whose reader waits for ever, or a link to a device, which
    never ends.

    Raises:
        BadModel: It is something else.
    """
    if path.exists() and not path.is_file():
        raise BadModel(f"{path} is no regular file: a model's folder has no other; remove it")


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes.

    Raises:
        BadModel: The file cannot be read, or is longer.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise BadModel(f"{path} has more than the {limit:,} bytes that such a file may have")
    return data


def shown(value: object) -> str:
    """Return a JSON value as text for a sentence: whole if it is short. A nested table or list
    is shown by its length, a long text by its beginning."""
    if isinstance(value, dict):
        items = [f"{_cut(str(key))}: {_part(one)}" for key, one in value.items()]
        return f"{{{_some(items)}}}"
    return f"[{_some([*map(_part, value)])}]" if isinstance(value, list) else _part(value)


def _some(items: Sequence[str]) -> str:
    more = [f"{len(items) - MAX_ITEMS} more"] if len(items) > MAX_ITEMS else []
    return ", ".join([*items[:MAX_ITEMS], *more])


def _part(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, (dict, list)) else _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def json_object_untrusted(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Raises:
        BadMessage: The bytes are no JSON object.
    """
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"it is not JSON: {error!s:.160}") from None
    if not isinstance(table, dict):
        raise BadMessage("it is not a JSON object")
    return table
